"""What a study has come to, as plain data: the JSON of `status`, `best` and `trials`."""

from __future__ import annotations

import math
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpo.budget import IMPORTED_ATTR
from hpo.errors import StudyError
from hpo.outcome import BEST_ATTR, Outcome, finite, outcome_of
from hpo.study import OpenStudy


def study_status(opened: OpenStudy) -> dict[str, Any]:
    """Counts by state and outcome, and the best trial (None before there is one)."""
    trials = _trials(opened)
    outcomes = dict.fromkeys(map(str, Outcome), 0)
    for trial in trials:
        if trial.state.is_finished():
            outcomes[outcome_of(trial)] += 1
    best = best_trial(opened)
    return {
        "study": opened.spec.study.name,
        "n_trials": opened.budget(),
        "finished": sum(outcomes.values()),
        "running": sum(trial.state == TrialState.RUNNING for trial in trials),
        "waiting": sum(trial.state == TrialState.WAITING for trial in trials),
        "outcomes": outcomes,
        "best": None if best is None else _described(opened, best),
    }


def study_best(opened: OpenStudy) -> dict[str, Any]:
    """The best trial: value, metrics and checkpoint of its best epoch.

    Raises:
        StudyError: No trial is complete yet.
    """
    best = best_trial(opened)
    if best is None:
        raise StudyError(f"the study {opened.spec.study.name} has no complete trial yet")
    return _described(opened, best)


def study_trials(opened: OpenStudy) -> list[dict[str, Any]]:
    """One entry a trial, in the order of their numbers."""
    return [
        {
            "trial": trial.number,
            "outcome": outcome_of(trial),
            "value": finite(trial_value(opened, trial)),
            "params": trial.params,
            "epochs": trial.last_step or 0,
            "seed": opened.trial_seed(trial.number),
            "duration_s": trial.duration.total_seconds() if trial.duration else None,
        }
        for trial in _trials(opened)
    ]


def best_trial(opened: OpenStudy) -> FrozenTrial | None:
    """The complete trial with the best value, the earliest of equals; a diverged one is never it."""
    sign = 1 if opened.spec.study.direction == "minimize" else -1
    complete = [
        trial
        for trial in _trials(opened)
        if outcome_of(trial) == Outcome.COMPLETE and trial.value is not None and math.isfinite(trial.value)
    ]
    return min(complete, key=lambda trial: (sign * (trial.value or 0.0), trial.number), default=None)


def trial_value(opened: OpenStudy, trial: FrozenTrial) -> float | None:
    """A trial's best value so far; None where no epoch has a finite one."""
    reported = [value for value in trial.intermediate_values.values() if math.isfinite(value)]
    if outcome_of(trial) == Outcome.COMPLETE:
        return trial.value
    pick = min if opened.spec.study.direction == "minimize" else max
    return pick(reported, default=None)


def _described(opened: OpenStudy, trial: FrozenTrial) -> dict[str, Any]:
    kept = trial.user_attrs.get(BEST_ATTR) or {}
    relative = kept.get("checkpoint")
    return {
        "study": opened.spec.study.name,
        "trial": trial.number,
        "value": finite(trial.value),
        "params": trial.params,
        "metrics": finite(kept.get("metrics", {})),
        "checkpoint": None if relative is None else str(opened.spec.output_dir / relative),
    }


def _trials(opened: OpenStudy) -> list[FrozenTrial]:
    """The study's own trials; imported ones are the samplers' business only."""
    return [trial for trial in opened.study.get_trials(deepcopy=False) if IMPORTED_ATTR not in trial.system_attrs]
