"""Ranks trials by one metric, or by the Pareto front of several, always within the bounds.

A trial that a scheduler has paused counts with its best epoch, even if it is pruned when the study ends.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from hpo.config.schema_study import Direction
from hpo.storage import optuna_private
from hpo.storage.attributes import BEST_ATTR
from hpo.study.outcome import UNFINISHED, Outcome, outcome_of

_DIRECTIONS: Final = {"minimize": StudyDirection.MINIMIZE, "maximize": StudyDirection.MAXIMIZE}
#: Outcomes of trials that are ranked by their best epoch.
_BEST_EPOCH: Final = frozenset((*UNFINISHED, Outcome.PRUNED))


def study_directions(goals: Mapping[str, Direction]) -> list[StudyDirection]:
    """Optuna's directions of a study's goals, in their order."""
    return [_DIRECTIONS[direction] for direction in goals.values()]


def is_feasible(trial: FrozenTrial) -> bool:
    """Whether a trial keeps to every bound that it was measured against."""
    return all(violation <= 0 for violation in trial.constraints.values())


def is_outside(trial: FrozenTrial) -> bool:
    """Whether a trial has no rank only because it violates a bound."""
    outcome = outcome_of(trial)
    has_value = outcome == Outcome.COMPLETE or (outcome in _BEST_EPOCH and BEST_ATTR in trial.user_attrs)
    return has_value and not is_feasible(trial)


def is_ranked(trial: FrozenTrial) -> bool:
    """Whether a trial is complete, within the bounds, and has finite values."""
    return outcome_of(trial) == Outcome.COMPLETE and _has_rank(trial)


def _has_rank(trial: FrozenTrial) -> bool:
    return trial.values is not None and all(map(math.isfinite, trial.values)) and is_feasible(trial)


def judged(trial: FrozenTrial, goals: Mapping[str, Direction]) -> FrozenTrial | None:
    """The trial with the values by which it is ranked; None for a trial that has no rank.

    A complete trial has these values. A trial that is or was paused gets those of its best epoch up to its last
    pause.
    """
    outcome, best = outcome_of(trial), trial.user_attrs.get(BEST_ATTR)
    if outcome not in _BEST_EPOCH or best is None:
        return trial if outcome == Outcome.COMPLETE and _has_rank(trial) else None
    values = [best["metrics"].get(name) for name in goals]
    # A function may return some metrics only at its end; a value that was not finite is stored as None.
    if any(value is None or not math.isfinite(value) for value in values):
        return None
    trial = copy.copy(trial)
    trial.values = values
    # If its last grant was extended, the trial's constraints were measured at a later epoch.
    return trial if best.get("within", is_feasible(trial)) else None


def best_reported(trial: FrozenTrial, direction: Direction) -> float | None:
    """The best value that a trial has reported; None where no epoch has a finite one."""
    finite = [value for value in trial.intermediate_values.values() if math.isfinite(value)]
    return (min if direction == "minimize" else max)(finite, default=None)


def ranked(trials: Iterable[FrozenTrial], goals: Mapping[str, Direction]) -> list[FrozenTrial]:
    """The trials that have a rank, the best first, the earlier of equals first.

    With several goals the Pareto front comes first; within it and after it, the first metric decides.
    """
    sign = 1 if next(iter(goals.values())) == "minimize" else -1
    eligible = [found for trial in trials if (found := judged(trial, goals)) is not None]
    front = pareto_front(eligible, goals) if len(goals) > 1 else set()
    return sorted(eligible, key=lambda t: (t.number not in front, sign * t.values[0], t.number))


def pareto_front(eligible: Sequence[FrozenTrial], goals: Mapping[str, Direction]) -> set[int]:
    """Numbers of the trials on the Pareto front: no other beats them in a metric without losing in another."""
    return {trial.number for trial in optuna_private.pareto_front(eligible, study_directions(goals))}


def best_of(trials: Iterable[FrozenTrial], goals: Mapping[str, Direction]) -> list[FrozenTrial]:
    """The best trial, or the Pareto front of several goals, the best in the first metric first; may be empty."""
    return best_among(ranked(trials, goals), goals)


def best_among(order: Sequence[FrozenTrial], goals: Mapping[str, Direction]) -> list[FrozenTrial]:
    """As `best_of`, for trials that are `ranked` already."""
    if len(goals) == 1:
        return list(order[:1])
    front = pareto_front(order, goals)
    return [trial for trial in order if trial.number in front]
