"""What an earlier study of the same space says of a new one's curves.

The earlier study may have been of other data, with losses of another level and spread: they are warped on their
own, and have a model of their own. What that says of the parameters alone, s(x, t), the posterior mean of level(x)
+ shape(x, t), enters the new model as b · s(x, t), with b normal around `_TRUST`. The new study's own reports move
b: to 0 where the two have nothing in common, below it where they contradict each other. The scales of the earlier
model are where those of the new one are expected, and its best trials are tried first.
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

#: Rows that are read of an earlier study, at most.
_ROWS: Final = 150
#: Leaders are so many lengths apart, at least.
_APART: Final = 0.5
#: Mean and standard deviation of b before anything is seen.
_TRUST: Final = 0.6
_DOUBT: Final = 0.6


@dataclass(frozen=True)
class Earlier:
    """What was learnt from earlier studies.

    Attributes:
        scales: The scales of each study's model, by the study's name: what is stored for later decisions.
        known: What their models say of parameters.
        leaders: Parameters of their best trials that are some way apart, of each study in turn.
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
        studies: The curves of each, by its name.
        encoding: The space.
        horizon: Epochs of a whole trial, of this study.
        stored: `Earlier.scales` of an earlier decision, or nothing; what is there is not fitted again.
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
    """The trials that the model expects to end best, each some lengths from those before it."""
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
    """The prior of the scales: around the mean of what earlier studies came to, where there were any."""
    mean, std = kernel.prior(lengths)
    return (np.mean(list(earlier.scales.values()), axis=0), std) if earlier.scales else (mean, std)
