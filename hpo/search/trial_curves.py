"""A study's trials as curves: what the curve model is shown for a sampler."""

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
    """Trials as curves.

    Attributes:
        curves: The study's own trials, by number. One that was complete before the horizon has its value there,
            and so has one that never reported; one that diverged is infinite there, or after its last report where
            the horizon is a guess, and one that failed at its last report, or without a report after its first
            epoch.
        earlier: Those that were imported from studies that are known, by the study's name: their losses may be of
            another level.
        horizon: Epochs of a whole trial, or a guess.
    """

    curves: Sequence[Curve]
    earlier: Mapping[str, Sequence[Curve]]
    horizon: int


def curves_of_trials(study: Study, trials: Sequence[FrozenTrial], *, bounded: bool) -> TrialCurves:
    """The curves of a study with one objective.

    Args:
        study: The study; of it the direction and the epochs of a whole trial are read.
        trials: Its trials.
        bounded: Whether a trial that violates a constraint counts as the worst, unless training may mend that.
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
    """Whether a trial of a study with one objective has ended by diverging: its value is no number."""
    return trial.state == TrialState.COMPLETE and trial.value is not None and not math.isfinite(trial.value)


def _seen(trial: FrozenTrial, horizon: int | None, lasting: Collection[str] | None) -> Seen:
    """As the model is shown it; ``lasting`` are the bounds that training does not mend, None where none count."""
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
    """The value that a trial has at the horizon wherever it ended; NaN: the worst. None: that is not known."""
    if trial.state == TrialState.COMPLETE:
        return trial.value
    if trial.state != TrialState.PRUNED or not trial.intermediate_values:
        return None
    last = trial.intermediate_values[max(trial.intermediate_values)]
    return None if feasible and math.isfinite(last) else math.nan
