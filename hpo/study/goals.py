"""When a study has reached what it is after, before its trials are used up."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from optuna.trial import FrozenTrial

from hpo.config.schema_study import StudySection
from hpo.study.outcome import leading_value
from hpo.study.ranking import best_of


def goal_reached(study: StudySection, trials: Sequence[FrozenTrial]) -> str | None:
    """Why the study is done by ``study.target_value`` or ``study.stop_after_no_improvement``; None if it is not.

    Both are read from the storage, so that all who work on a study come to the same answer. The best trial, or
    with several objectives the Pareto front, is that of `hpo.study.ranking`; trials that ended after the latest
    of it have brought no improvement, with any outcome. One that a scheduler has paused, or has resumed since, may
    improve yet: as long as it is the best, none has ended after it.

    Args:
        study: The study file's section.
        trials: The study's own trials.
    """
    if study.target_value is None and study.stop_after_no_improvement is None:
        return None
    best = best_of(trials, study.goals)
    if not best:
        return None
    if study.target_value is not None:
        value, sign = leading_value(best[0]), 1 if study.direction == "minimize" else -1
        if value is not None and sign * value <= sign * study.target_value:
            return f"trial {best[0].number} has reached target_value: {value:.6g} (asked {study.target_value:g})"
    if study.stop_after_no_improvement is not None:
        # One as good as another (a result taken over) brings nothing.
        first: dict[tuple[float, ...], datetime] = {}
        for trial in best:
            values = tuple(trial.values)
            first[values] = min(first.get(values, datetime.max), _ended(trial))
        latest = max(first.values())
        since = sum(trial.state.is_finished() and _ended(trial) > latest for trial in trials)
        if since >= study.stop_after_no_improvement:
            return f"{since} trials have ended since the last improvement (stop_after_no_improvement)"
    return None


def _ended(trial: FrozenTrial) -> datetime:
    return trial.datetime_complete or datetime.max
