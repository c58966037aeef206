"""A study's trials as curves: what the curve model is shown for a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from optuna import Study
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.search.schedulers.curves import Curve, curves_of, horizon_of
from hpo.search.schedulers.scheduler import Seen, Standing
from hpo.storage.attributes import IMPORTED_ATTR, MAX_EPOCHS_ATTR
from hpo.storage.grants import granted_until
from hpo.storage.optuna_private import id_of_study, storage_of
from hpo.storage.pausing import paused_at


@dataclass(frozen=True)
class TrialCurves:
    """Trials as curves.

    Attributes:
        curves: Every trial that has not failed, by number. One that was complete before the horizon has its value
            there, and so has one that never reported.
        horizon: Epochs of a whole trial, or a guess.
    """

    curves: Sequence[Curve]
    horizon: int


def curves_of_trials(study: Study, trials: Sequence[FrozenTrial], *, bounded: bool) -> TrialCurves:
    """The curves of a study with one objective.

    Args:
        study: The study; of it the direction and the epochs of a whole trial are read.
        trials: Its trials.
        bounded: Whether a trial that violates a constraint counts as the worst.
    """
    attrs = storage_of(study).get_study_user_attrs(id_of_study(study))
    horizon = attrs.get(MAX_EPOCHS_ATTR)
    known = [trial for trial in trials if trial.state != TrialState.FAIL]
    standing = Standing(
        read=lambda: [_seen(trial, horizon, bounded=bounded) for trial in known],
        horizon=horizon,
        minimize=study.direction != StudyDirection.MAXIMIZE,
    )
    curves = curves_of(standing)
    return TrialCurves(curves, horizon_of(standing, curves))


def _seen(trial: FrozenTrial, horizon: int | None, *, bounded: bool) -> Seen:
    values, whole = trial.intermediate_values, trial.state == TrialState.COMPLETE
    if whole and trial.value is not None and (not values or max(values) < (horizon or 1)):
        values = {**values, horizon or 1: trial.value}
    return Seen(
        number=trial.number,
        params=trial.params,
        values=values,
        state=_state(trial),
        until=granted_until(trial),
        whole=whole,
        imported=IMPORTED_ATTR in trial.system_attrs,
        feasible=not bounded or all(violation <= 0 for violation in trial.constraints.values()),
    )


def _state(trial: FrozenTrial) -> Literal["waiting", "running", "paused", "ended"]:
    if trial.state == TrialState.RUNNING:
        return "running" if paused_at(trial) is None else "paused"
    return "waiting" if trial.state == TrialState.WAITING else "ended"
