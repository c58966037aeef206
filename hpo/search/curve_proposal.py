"""Proposes the next point for `CurveGPSampler`: the one with the greatest expected improvement at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from scipy.linalg import LinAlgError

from hpo.search.axes import Floats
from hpo.search.schedulers.freeze_thaw.acquisition import Aim
from hpo.search.schedulers.freeze_thaw.earlier import Earlier, earlier_of, prior_after
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.freeze_thaw.fitting import fitted
from hpo.search.schedulers.freeze_thaw.model import CurveModel
from hpo.search.schedulers.freeze_thaw.new_point import LEADERS, ROWS, best_new
from hpo.search.schedulers.freeze_thaw.proposals import Proposals
from hpo.search.schedulers.freeze_thaw.table import Table, Warp, rows_of, table_of
from hpo.search.trial_curves import TrialCurves

#: Maximum number of rows to fit the scales to: fitting is the most costly part, and fitting to all of the
#: model's rows gave no better proposals.
_FITTED_ROWS: Final = 120


def proposed(known: TrialCurves, encoding: Encoding, proposals: Proposals) -> Mapping[str, Any] | None:
    """The untried point with the greatest expected improvement at the horizon; None where there is none.

    Each running trial counts as if it had reached its goal with the predicted loss.

    Args:
        known: The study's trials; at least one has a finite last loss.
        encoding: The study's search space.
        proposals: Generates the candidate points.
    """
    try:
        model, parents, incumbent = _believing(known, encoding)
    except LinAlgError:
        return None
    aim = Aim(incumbent, known.horizon, expected=True)
    found = best_new(model, encoding, proposals, parents, aim, known.horizon)
    return None if found is None else found[0]


def _believing(known: TrialCurves, encoding: Encoding) -> tuple[CurveModel, Floats, float]:
    """The model with running trials as predicted; the leaders' coordinates, the best first; the loss to beat."""
    reported, horizon = [curve for curve in known.curves if curve.steps], known.horizon
    warp = Warp(reported)
    table = table_of(reported, encoding, warp, horizon, ROWS)
    learnt = earlier_of(known.earlier, encoding, horizon, {})
    theta = _scales(table_of(reported, encoding, warp, horizon, _FITTED_ROWS), encoding, learnt)
    model = CurveModel(theta, encoding.groups, table.rows, table.z, learnt.known)
    running = [curve for curve in known.curves if curve.seen.state == "running" and curve.seen.params]
    if running:
        goals = [max(curve.done, curve.seen.until or horizon) for curve in running]
        model.believe(rows_of(running, goals, encoding, horizon))
    leaders = table.curves[:LEADERS]
    now, _ = model.predict(rows_of(leaders, [curve.done for curve in leaders], encoding, horizon))
    order = np.argsort(now, kind="stable")
    # A trial that diverged later, or that violates a constraint, does not set the loss to beat.
    best = warp(np.array([curve.best for curve in reported if math.isfinite(curve.last)])) - table.centre
    return model, table.points[order], min(float(now.min()), float(best.min()))


def _scales(few: Table, encoding: Encoding, learnt: Earlier) -> Floats:
    """Scales fitted from the prior's means each time, so that they depend on the trials alone: repeatable."""
    prior = prior_after(learnt, encoding.lengths)
    values = learnt.known.at(few.rows)
    fixed = learnt.known.covariance(values, values) if learnt.known.functions else None
    off = few.z - learnt.known.expected(values)
    return fitted(prior[0], prior, encoding.groups, few.rows, off, fixed)
