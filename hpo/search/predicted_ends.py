"""Predicts, with the curve model, the final losses of trials that were stopped or paused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from hpo.search.axes import Floats
from hpo.search.schedulers.freeze_thaw import kernel
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.freeze_thaw.kernel import Rows
from hpo.search.schedulers.freeze_thaw.model import CurveModel
from hpo.search.schedulers.freeze_thaw.table import Table, Warp, places, table_of
from hpo.search.schedulers.seen import Curve

#: Maximum number of rows in the model; fewer with more than `_MANY` trials, as each prediction costs about as
#: much as a row.
_ROWS: Final = 200
_FEW_ROWS: Final = 120
_MANY: Final = 250


def predicted_ends(curves: Sequence[Curve], encoding: Encoding, horizon: int) -> dict[int, float]:
    """The expected loss at the horizon of each trial that has not trained to its end, by trial number.

    The model is that of `hpo.search.schedulers.freeze_thaw.kernel` with its scales at the prior's means: nothing
    is fitted, so the same trials always give the same numbers. It needs no complete trial. It ranks trials nearly
    as well as with fitted scales, and better than last values, fits of single curves or regressions from epoch to
    epoch (docs/search.md).

    Args:
        curves: The study's trials.
        encoding: The study's search space.
        horizon: Epochs of a whole trial.

    Returns:
        One loss for every trial that is not whole and whose last loss is finite, at most the trial's best loss.
    """
    reported = [curve for curve in curves if curve.steps]
    wanted = [curve for curve in reported if not curve.seen.whole and math.isfinite(curve.last)]
    if not wanted:
        return {}
    warp = Warp(reported)
    table = table_of(reported, encoding, warp, horizon, _ROWS if len(reported) <= _MANY else _FEW_ROWS)
    theta, _ = kernel.prior(encoding.lengths)
    model = CurveModel(theta, encoding.groups, table.rows, table.z)
    x = encoding.features(encoding.points([curve.seen.params for curve in wanted]))
    numbers = np.array([curve.number for curve in wanted])
    at = np.full(len(wanted), places(np.array(horizon), horizon))
    mean, _ = model.predict(Rows.each(x, at, numbers))
    known = {curve.number for curve in table.curves}
    others = np.array([index for index, number in enumerate(numbers) if number not in known], dtype=np.int64)
    if len(others):
        mean[others] += _own_part(model, table, warp, [wanted[index] for index in others], x[others], horizon)
    ends = (warp.loss(float(z) + table.centre) for z in mean)
    return {curve.number: min(end, curve.best) for curve, end in zip(wanted, ends, strict=True)}


def _own_part(
    model: CurveModel, table: Table, warp: Warp, curves: Sequence[Curve], x: Floats, horizon: int
) -> Floats:
    """For trials without rows in the model, the correction of the predicted end by the trial's last loss.

    The last loss differs from the model's prediction by the trial's own level, own walk and noise. The end shares
    the level fully, and the walk as far as the kernel between the two epochs says.
    """
    t = places(np.array([curve.done for curve in curves], dtype=np.float64), horizon)
    mean, _ = model.predict(Rows.each(x, t, np.array([curve.number for curve in curves])))
    off = warp(np.array([curve.last for curve in curves])) - table.centre - mean
    level, walk, noise = np.exp(2 * model.theta[[kernel.OWN_LEVEL, kernel.OWN_WALK, kernel.NOISE]])
    far = math.sqrt(3) * (1 - t) / math.exp(model.theta[kernel.LENGTH_OWN])
    return np.asarray((level + walk * (1 + far) * np.exp(-far)) / (level + walk + noise) * off)
