"""The study's own trials, without imported ones: their values so far, their ranking, and the best one."""

from __future__ import annotations

from collections.abc import Iterable

from optuna.trial import FrozenTrial

from hpo.errors import StudyError
from hpo.storage.attributes import IMPORTED_ATTR
from hpo.storage.outlines import outlined_trials
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome, leading_value, outcome_of
from hpo.study.ranking import best_of, best_reported, ranked


def own_trials(opened: OpenStudy) -> list[FrozenTrial]:
    """The study's own trials; imported ones are only for the sampler and scheduler."""
    return own_among(opened.study.get_trials(deepcopy=False))


def outlined(opened: OpenStudy) -> list[FrozenTrial]:
    """The own trials with only what decides how they count, without parameters and curves; see
    `hpo.storage.outlines`.
    """
    return own_among(outlined_trials(opened.storage, opened.study_id))


def own_among(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that were not imported."""
    return [trial for trial in trials if IMPORTED_ATTR not in trial.system_attrs]


def best_trial(opened: OpenStudy) -> FrozenTrial | None:
    """The best trial that can be ranked (see `hpo.study.ranking`), the earliest of equals; None without one.

    Raises:
        StudyError: The study has several objectives, and so no single best.
    """
    best = best_of(own_trials(opened), opened.spec.study.goals)
    if opened.spec.study.objectives:
        listed = ", ".join(str(trial.number) for trial in best) or "none is complete yet"
        raise StudyError(
            f"the study {opened.spec.study.name} has several objectives, and so no single best trial\n"
            f"  fix: choose one of its Pareto front: {listed}"
        )
    return next(iter(best), None)


def ranked_trials(opened: OpenStudy) -> list[FrozenTrial]:
    """The trials that can be ranked (see `hpo.study.ranking`), the best first, the earlier of equals first."""
    return ranked(own_trials(opened), opened.spec.study.goals)


def trial_value(opened: OpenStudy, trial: FrozenTrial) -> float | None:
    """A trial's best value so far; None where no epoch has a finite one."""
    if outcome_of(trial) == Outcome.COMPLETE:
        return leading_value(trial)
    return best_reported(trial, opened.spec.study.direction)
