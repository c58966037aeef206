"""Decides whether a study is done before its trials are used up."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from optuna.trial import FrozenTrial

from hpo.config.schema_study import StudySection
from hpo.study.outcome import leading_value
from hpo.study.ranking import best_of


def goal_reached(study: StudySection, trials: Sequence[FrozenTrial]) -> str | None:
    """Why the study is done by ``study.target_value`` or ``study.stop_after_no_improvement``; None if it is not.

    The answer follows from the storage, so all workers come to the same one. The best trial, or with several
    objectives the Pareto front, is that of `hpo.study.ranking`. Trials that ended after the latest of these, with
    any outcome, have brought no improvement. A trial that a scheduler has paused, or has resumed since, may still
    improve: as long as it is the best, no trial counts as ended after it.

    Args:
        study: The section ``study`` of the study file.
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
        # Of trials with equal values, such as a result taken over, only the first is an improvement.
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
