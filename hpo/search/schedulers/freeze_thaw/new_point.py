"""Finds the new point that is worth most by the curve model, for the scheduler and for the sampler."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from hpo.search.axes import Floats
from hpo.search.schedulers.freeze_thaw.acquisition import Aim, worth
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.freeze_thaw.kernel import Rows
from hpo.search.schedulers.freeze_thaw.model import CurveModel
from hpo.search.schedulers.freeze_thaw.proposals import Proposals
from hpo.search.schedulers.freeze_thaw.table import places

#: Maximum number of rows that the model reads.
ROWS: Final = 300
#: Number of leaders, the trials with the best last losses; only their present losses are predicted.
LEADERS: Final = 60
#: Minimum distance of a new point from each known one, in length scales: a nearer one would add little.
_APART: Final = 0.1


def best_new(
    model: CurveModel, encoding: Encoding, proposals: Proposals, parents: Floats, aim: Aim, horizon: int
) -> tuple[dict[str, Any], Floats, float] | None:
    """The untried point that is worth most: its parameters, coordinates and worth. None where there is none.

    Args:
        model: The curve model.
        encoding: The search space.
        proposals: Generates the candidate points.
        parents: Coordinates of known points to search near, the best first.
        aim: What makes a point worth much.
        horizon: Epochs of a whole trial.
    """
    place = float(places(np.array(min(aim.ahead, horizon)), horizon))

    def gain_of(points: Floats) -> Floats:
        at = new_rows(points, place, encoding)
        return np.asarray(np.where(model.nearest(at.x) < _APART, -np.inf, worth(aim, *model.predict(at))))

    points = proposals.candidates(parents)
    found = proposals.refined(points, gain_of(points), gain_of)
    return None if found is None or found[2] == -np.inf else found


def new_rows(points: Floats, place: float, encoding: Encoding) -> Rows:
    """Rows of new trials with these coordinates, at one time."""
    x = encoding.features(points)
    return Rows.each(x, np.full(len(x), place), np.full(len(x), -1, dtype=np.int64))
