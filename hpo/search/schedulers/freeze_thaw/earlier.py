"""Learns from earlier studies of the same space what to expect of a new study's curves.

An earlier study may have had other data, with losses of another level and spread, so its losses are warped and
modelled separately. Its model's statement about the parameters alone, s(x, t), the posterior mean of level(x) +
shape(x, t), enters the new model as b · s(x, t), where b is normal around `_TRUST`. The new study's reports then
move b: to 0 where the two studies have nothing in common, below 0 where they contradict each other. The earlier
model's scales become the prior means of the new one's, and the earlier study's best trials are tried first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

import numpy as np
from scipy.linalg import LinAlgError

from hpo.search.axes import Floats
from hpo.search.schedulers.freeze_thaw import kernel
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.freeze_thaw.fitting import fitted
from hpo.search.schedulers.freeze_thaw.kernel import Rows
from hpo.search.schedulers.freeze_thaw.model import CurveModel, Known
from hpo.search.schedulers.freeze_thaw.table import Warp, table_of
from hpo.search.schedulers.seen import Curve

#: Maximum number of rows that are read of an earlier study.
_ROWS: Final = 150
#: Leaders are further apart than this, in length scales.
_APART: Final = 0.5
#: Mean and standard deviation of b before anything is seen.
_TRUST: Final = 0.6
_DOUBT: Final = 0.6


@dataclass(frozen=True)
class Earlier:
    """What was learnt from earlier studies.

    Attributes:
        scales: The scales of each study's model, by the study's name; stored for later decisions.
        known: What the models say about parameters.
        leaders: Parameters of each study's best trials, some distance apart; the studies take turns.
    """

    scales: Mapping[str, Sequence[float]]
    known: Known
    leaders: Sequence[Mapping[str, Any]]


def earlier_of(
    studies: Mapping[str, Sequence[Curve]],
    encoding: Encoding,
    horizon: int,
    stored: Mapping[str, Sequence[float]],
) -> Earlier:
    """Learn from earlier studies.

    Args:
        studies: Each study's curves, by its name.
        encoding: The search space.
        horizon: Epochs of a whole trial in the new study.
        stored: `Earlier.scales` of an earlier decision, which are not fitted again; empty at first.
    """
    models = {}
    for name, curves in studies.items():
        with contextlib.suppress(LinAlgError):  # one that can't be modelled teaches nothing
            models[name] = _model(curves, encoding, horizon, stored.get(name))
    count = max(len(models), 1)
    known = Known(
        tuple(model.of_parameters for model in models.values()), _TRUST / count, _DOUBT / math.sqrt(count)
    )
    best = [_leaders(studies[name], model, encoding) for name, model in models.items()]
    leaders = [each for turn in zip_longest(*best) for each in turn if each is not None]
    return Earlier({name: model.theta.tolist() for name, model in models.items()}, known, leaders)


def _leaders(curves: Sequence[Curve], model: CurveModel, encoding: Encoding) -> list[Mapping[str, Any]]:
    """Parameters of the trials that the model expects to end best, each some distance from those before it."""
    x = encoding.features(encoding.points([curve.seen.params for curve in curves]))
    numbers = np.array([curve.number for curve in curves], dtype=np.int64)
    ends, _ = model.predict(Rows.each(x, np.ones(len(curves)), numbers))
    scaled = x / np.exp(model.theta[kernel.LENGTHS :])[model.groups]
    chosen: list[int] = []
    for index in np.argsort(ends, kind="stable"):
        if all(np.linalg.norm(scaled[index] - scaled[other]) > _APART for other in chosen):
            chosen.append(int(index))
    return [curves[index].seen.params for index in chosen]


def _model(
    curves: Sequence[Curve], encoding: Encoding, horizon: int, scales: Sequence[float] | None
) -> CurveModel:
    table = table_of(curves, encoding, Warp(curves), horizon, _ROWS)
    prior = kernel.prior(encoding.lengths)
    if scales is None or len(scales) != len(prior[0]):
        theta = fitted(prior[0], prior, encoding.groups, table.rows, table.z)
    else:
        theta = np.array(scales)
    return CurveModel(theta, encoding.groups, table.rows, table.z)


def prior_after(earlier: Earlier, lengths: int) -> tuple[Floats, Floats]:
    """The prior of the scales, around the mean of the earlier studies' scales where there are any."""
    mean, std = kernel.prior(lengths)
    return (np.mean(list(earlier.scales.values()), axis=0), std) if earlier.scales else (mean, std)
