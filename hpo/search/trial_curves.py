"""Turns a study's trials into the learning curves that the curve model reads for a sampler."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from optuna import Study
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.search.schedulers.curves import as_learnt, curves_of, earlier_curves, horizon_of
from hpo.search.schedulers.mending import lasting_bounds, may_mend, violated
from hpo.search.schedulers.scheduler import Standing
from hpo.search.schedulers.seen import Curve, Seen, state_of
from hpo.storage.attributes import IMPORTED_ATTR, MAX_EPOCHS_ATTR, ORIGIN_ATTR
from hpo.storage.grants import granted_until
from hpo.storage.optuna_private import id_of_study, storage_of


@dataclass(frozen=True)
class TrialCurves:
    """The learning curves of a study's trials.

    Attributes:
        curves: The trials by number, without those in ``earlier``. A trial that was complete before the horizon,
            or that never reported, has its value at the horizon. A trial that diverged is infinite at the horizon,
            or after its last report where the horizon is a guess. A trial that failed is infinite at its last
            report, or after its first epoch if it never reported.
        earlier: The trials that were imported from studies whose name is known, by that name: their losses may be
            on another level.
        horizon: Epochs of a whole trial, or a guess.
    """

    curves: Sequence[Curve]
    earlier: Mapping[str, Sequence[Curve]]
    horizon: int


def curves_of_trials(study: Study, trials: Sequence[FrozenTrial], *, bounded: bool) -> TrialCurves:
    """The curves of a study with one objective.

    Args:
        study: The study, for its direction and the epochs of a whole trial.
        trials: Its trials.
        bounded: Whether a trial that violates a constraint counts as the worst, unless training may still bring it
            within the constraint.
    """
    lasting = lasting_bounds(trials) if bounded else None
    attrs = storage_of(study).get_study_user_attrs(id_of_study(study))
    horizon = attrs.get(MAX_EPOCHS_ATTR)
    standing = Standing(
        read=lambda: [_seen(trial, horizon, lasting) for trial in trials],
        horizon=horizon,
        minimize=study.direction != StudyDirection.MAXIMIZE,
    )
    curves, earlier = curves_of(standing), earlier_curves(standing)
    every = [*curves, *chain.from_iterable(earlier.values())]
    return TrialCurves(as_learnt(curves), earlier, horizon_of(standing, every))


def has_diverged(trial: FrozenTrial) -> bool:
    """Whether a trial has diverged, in a study with one objective: it is complete and its value is not finite."""
    return trial.state == TrialState.COMPLETE and trial.value is not None and not math.isfinite(trial.value)


def _seen(trial: FrozenTrial, horizon: int | None, lasting: Collection[str] | None) -> Seen:
    """A trial as the model sees it; ``lasting``: the bounds that training does not mend, None to ignore bounds."""
    state, bounds = state_of(trial), [] if lasting is None else violated(trial.constraints)
    end = _known_end(trial, feasible=not bounds)
    values, last = trial.intermediate_values, horizon or 1
    if end is not None and (not values or max(values) < last):
        values = {**values, last: end}
    return Seen(
        number=trial.number,
        params=trial.params,
        values=values,
        state=state,
        until=granted_until(trial),
        whole=trial.state == TrialState.COMPLETE and not has_diverged(trial),
        failed=trial.state == TrialState.FAIL,
        diverged=has_diverged(trial),
        imported=IMPORTED_ATTR in trial.system_attrs,
        source=trial.system_attrs.get(ORIGIN_ATTR, (None,))[0],
        feasible=not bounds,
        mends=lasting is not None and state != "ended" and may_mend(bounds, lasting),
    )


def _known_end(trial: FrozenTrial, *, feasible: bool) -> float | None:
    """The value that a trial counts with at the horizon, wherever it ended: NaN for the worst, None if unknown."""
    if trial.state == TrialState.COMPLETE:
        return trial.value
    if trial.state != TrialState.PRUNED or not trial.intermediate_values:
        return None
    last = trial.intermediate_values[max(trial.intermediate_values)]
    return None if feasible and math.isfinite(last) else math.nan
