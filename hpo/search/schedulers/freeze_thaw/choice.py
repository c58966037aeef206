"""The model's choice: the grant that is worth most, for one of the best paused trials or for a new point."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from scipy.linalg import LinAlgError
from scipy.special import ndtr

from hpo.search.axes import Floats
from hpo.search.schedulers.curves import as_learnt
from hpo.search.schedulers.freeze_thaw import kernel
from hpo.search.schedulers.freeze_thaw.acquisition import Aim, drawn_aim, worth
from hpo.search.schedulers.freeze_thaw.earlier import prior_after
from hpo.search.schedulers.freeze_thaw.fitting import fitted
from hpo.search.schedulers.freeze_thaw.kernel import Rows
from hpo.search.schedulers.freeze_thaw.model import CurveModel
from hpo.search.schedulers.freeze_thaw.new_point import LEADERS, ROWS, best_new, new_rows
from hpo.search.schedulers.freeze_thaw.study_view import StudyView
from hpo.search.schedulers.freeze_thaw.table import Table, Warp, rows_of, table_of
from hpo.search.schedulers.rungs import ladder
from hpo.search.schedulers.scheduler import New, Resume, Why
from hpo.search.schedulers.seen import Curve

#: The scales are fitted again when the number of rows has grown or shrunk by this factor.
_GROWN: Final = 1.15
#: The factor from one rung of the model's grants to the next.
_FACTOR: Final = 1.5
#: A grant for a paused trial has at least this many times the epochs that a switch of trials costs.
_WORTH: Final = 0.5
#: In a study without a budget of epochs, a trial stays paused if it is less likely than this to become the best.
_HOPE: Final = 0.05
#: Standard deviations from the middle to the ends of an 80 % interval.
_EIGHTY: Final = 1.2815515655446004


@dataclass(frozen=True)
class Candidate:
    """A grant that the model might make.

    Attributes:
        curve: The paused trial; None: a new one.
        params: The new trial's parameters.
        at: The row of the trial at the horizon.
        worth: See `acquisition.worth`; less the burden of the switch.
    """

    curve: Curve | None
    params: Mapping[str, Any]
    at: Rows
    worth: float


class ModelChoice:
    """The choice that the model makes at one decision.

    Args:
        view: The study.
        first: Where a new trial pauses first.
    """

    def __init__(self, view: StudyView, first: int) -> None:
        self._view, self._first = view, first
        self._curves = as_learnt(view.curves)
        self._warp = Warp(self._curves)
        self._rungs = ladder(view.horizon, _FACTOR)
        self._state: dict[str, Any] | None = None

    def best(self) -> New | Resume | None:
        """A grant for the candidate that is worth most; None where there is no model or no candidate."""
        try:
            model = self._believing()
        except LinAlgError:
            return None
        known = self._table.curves[:LEADERS]
        now, _ = model.predict(self._at(known, [curve.done for curve in known]))
        rivals = np.array([self._is_rival(curve) for curve in known])
        incumbent = min(float(now[rivals].min(initial=math.inf)), self._as_z(self._best_loss))
        aim = drawn_aim(self._view.rng, self._view.horizon, incumbent, self._table.spread)
        found = [self._best_paused(model, aim), self._best_new(model, aim, now)]
        candidates = [each for each in found if each is not None]
        if not candidates:
            return None
        return self._grant(max(candidates, key=lambda each: each.worth), model)

    def _burden(self, curve: Curve | None) -> float:
        """The logarithm of the factor by which the switch of trials before a grant makes it take longer."""
        if curve is not None and curve.number == self._view.standing.here:
            return 0.0
        epochs = self._first if curve is None else self._rung(curve) - curve.done
        return math.log1p(self._view.switch / epochs)

    def _rung(self, curve: Curve) -> int:
        """The epoch at which a paused trial pauses next, far enough to be worth the switch of trials before it."""
        here = curve.number == self._view.standing.here
        least = curve.done + (1 if here else max(_WORTH * self._view.switch, 1))
        return next((rung for rung in self._rungs if rung >= least), self._rungs[-1])

    def _grant(self, chosen: Candidate, model: CurveModel) -> New | Resume:
        mean, std = (float(each[0]) for each in model.predict(chosen.at))
        wide = _EIGHTY * math.hypot(std, model.noise)
        ends = [self._value(mean + self._table.centre + off) for off in (0.0, -wide, wide)]
        incumbent = self._view.as_value(self._best_loss)
        why = Why("model", ends[0], min(ends), max(ends), incumbent)
        if chosen.curve is None:
            return self._view.new(chosen.params, self._first, why, self._state)
        return self._view.resume(chosen.curve, self._rung(chosen.curve), why, self._state)

    @cached_property
    def _best_loss(self) -> float:
        """The best loss of the sound trials that can be the study's best; of all sound ones where none can."""
        rivals = (curve.best for curve in self._sound if self._is_rival(curve))
        return min(rivals, default=self._warp.best)

    def _is_rival(self, curve: Curve) -> bool:
        return not self._found or self._view.standing.is_within(curve.seen)

    @cached_property
    def _found(self) -> bool:
        """Whether a sound trial is within the study's bounds."""
        return any(self._view.standing.is_within(curve.seen) for curve in self._sound)

    @cached_property
    def _sound(self) -> list[Curve]:
        """The trials that have not diverged or failed; such trials are never the study's best."""
        return [curve for curve in self._curves if curve.steps and math.isfinite(curve.last)]

    def _as_z(self, loss: float) -> float:
        return float(self._warp(np.array(loss))) - self._table.centre

    def _value(self, z: float) -> float:
        return self._view.as_value(max(self._warp.loss(z), self._warp.floor))

    def _best_paused(self, model: CurveModel, aim: Aim) -> Candidate | None:
        leaders = self._table.curves[:LEADERS]
        single = [curve for curve in leaders if curve.number not in self._view.twins]
        paused = [curve for curve in single if curve.resumable and curve.done < self._view.horizon]
        if not paused:
            return None
        targets = [min(curve.done + aim.ahead, self._view.horizon) for curve in paused]
        value = worth(aim, *model.predict(self._at(paused, targets)))
        value = value - np.array([self._burden(curve) for curve in paused])
        best = int(np.argmax(value))
        at = self._at([paused[best]], [self._view.horizon])
        if self._view.may_end and self._chance(model, at, self._as_z(self._best_loss)) < _HOPE:
            return None
        return Candidate(paused[best], {}, at, float(value[best]))

    def _chance(self, model: CurveModel, at: Rows, goal: float) -> float:
        mean, std = model.predict(at)
        return float(ndtr((goal - mean[0]) / std[0]))

    def _best_new(self, model: CurveModel, aim: Aim, now: Floats) -> Candidate | None:
        if not self._view.may_start:
            return None
        encoding, parents = self._view.encoding, self._table.points[np.argsort(now, kind="stable")]
        found = best_new(model, encoding, self._view.proposals, parents, aim, self._view.horizon)
        if found is None:
            return None
        params, point, gain = found
        return Candidate(None, params, new_rows(point[None], 1.0, encoding), gain - self._burden(None))

    def _at(self, curves: Sequence[Curve], epochs: Sequence[int]) -> Rows:
        return rows_of(curves, epochs, self._view.encoding, self._view.horizon)

    def _believing(self) -> CurveModel:
        """The model, with each running trial as if it had reached its goal with the predicted loss."""
        table = self._table
        model = CurveModel(self._scales, self._view.encoding.groups, table.rows, table.z, self._view.learnt.known)
        if running := [curve for curve in self._curves if curve.seen.state == "running"]:
            model.believe(self._at(running, [self._view.goal(curve) for curve in running]))
        return model

    @cached_property
    def _table(self) -> Table:
        return table_of(self._curves, self._view.encoding, self._warp, self._view.horizon, ROWS)

    @cached_property
    def _scales(self) -> Floats:
        """The stored scales, or new ones where the number of rows has changed much since they were fitted."""
        encoding, table, known = self._view.encoding, self._table, self._view.learnt.known
        stored, rows = self._view.standing.state, len(table.rows)
        prior = prior_after(self._view.learnt, encoding.lengths)
        theta = np.array(stored.get("scales", ()), dtype=np.float64)
        if len(theta) != kernel.LENGTHS + encoding.lengths:
            theta = prior[0]
        elif stored["rows"] / _GROWN < rows < stored["rows"] * _GROWN:
            return theta
        values = known.at(table.rows)
        off, fixed = table.z - known.expected(values), known.covariance(values, values)
        theta = fitted(theta, prior, encoding.groups, table.rows, off, fixed if known.functions else None)
        self._state = {"scales": theta.tolist(), "rows": rows, "earlier": self._view.learnt.scales}
        return theta
