"""Warps the losses that were seen and selects the rows that the curve model reads."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpo.search.axes import Floats
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.freeze_thaw.kernel import Rows
from hpo.search.schedulers.seen import Curve

#: What a loss that is not finite is warped to, and the largest warped loss: 28 times as far from the best as half.
_WORST: Final = 1.0
#: How far below the best seen the logarithm of the warp ends, in distances from the best to the median.
_BELOW: Final = 0.1
#: With a best loss above 0, the warp ends at most `_TIMES` times that loss below it, but at least `_LEAST`
#: distances.
_TIMES: Final = 10
_LEAST: Final = 1e-12
#: Slope of the warp above the median, in logarithms of distances, where it ends at `_BELOW`.
_FLAT: Final = 0.3
#: A trial's rows stand at epochs that grow by this.
_SPACING: Final = 2.0


class Warp:
    """Maps losses to a scale on which differences that matter have about the same size in every study.

    Let u be the distance from the best loss seen, divided by the distance from the best to the median of the
    trials' last losses. Then z = ln((u + .1) / 1.1) / ln 11 up to the median, and .3 ln u above it, at most 1.

    Where the median is more than a hundred times the best, a number smaller than .1 is used, so that losses of all
    orders of magnitude differ; both slopes are then smaller.

    Attributes:
        best: The best loss seen.
        floor: Predictions shown to people are never below it: 0 where no loss is negative, else -inf. The model
            itself has no such limit.
    """

    def __init__(self, curves: Sequence[Curve]) -> None:
        lasts = np.array([curve.last for curve in curves if math.isfinite(curve.last)])
        finite = [curve.best for curve in curves if math.isfinite(curve.best)]
        self.best = min(finite, default=0.0)
        self.floor = 0.0 if finite and self.best >= 0 else -math.inf
        half = float(np.median(lasts)) if len(lasts) else self.best
        # Relative to the best, so that a metric's unit has no effect: losses may all be about 1e-15.
        self._scale = max(half - self.best, 1e-6 * abs(self.best), sys.float_info.min)
        self._below = min(_BELOW, max(_TIMES * self.best / self._scale, _LEAST)) if self.best > 0 else _BELOW
        self._steep = math.log((1 + self._below) / self._below)
        self._flat = _FLAT * math.log((1 + _BELOW) / _BELOW) / self._steep

    def __call__(self, losses: Floats) -> Floats:
        """Warped losses; the worst value for a loss that is not finite."""
        with np.errstate(over="ignore"):  # where the scale is nearly 0
            u = (np.where(np.isfinite(losses), losses, np.inf) - self.best) / self._scale
        u = np.maximum(u, -0.99 * self._below)
        with np.errstate(divide="ignore"):
            above = self._flat * np.log(np.maximum(u, 1e-12))
        within = np.log((u + self._below) / (1 + self._below)) / self._steep
        return np.minimum(np.where(u > 1, above, within), _WORST)

    def loss(self, z: float) -> float:
        """The loss that is warped to z."""
        if z > 0:
            return self.best + self._scale * math.exp(min(z, _WORST) / self._flat)
        return self.best + self._scale * ((1 + self._below) * math.exp(z * self._steep) - self._below)


def places(epochs: Floats, horizon: int) -> Floats:
    """Epochs on the model's scale: ln(epoch) / ln(horizon)."""
    return np.log(np.maximum(epochs, 1.0)) / math.log(max(horizon, 2))


def rows_of(curves: Sequence[Curve], epochs: Sequence[int], encoding: Encoding, horizon: int) -> Rows:
    """One row for each trial, after its epoch."""
    x = encoding.features(encoding.points([curve.seen.params for curve in curves]))
    numbers = np.array([curve.number for curve in curves], dtype=np.int64)
    return Rows.each(x, places(np.array(epochs, dtype=np.float64), horizon), numbers)


@dataclass(frozen=True, eq=False)
class Table:
    """What the model reads of the curves.

    Attributes:
        rows: Some epochs of each chosen trial, its last one among them.
        z: The warped losses there, less their median.
        centre: That median.
        curves: The chosen trials, the best last loss first.
        points: Their unit coordinates [trials, parameters].
    """

    rows: Rows
    z: Floats
    centre: float
    curves: Sequence[Curve]
    points: Floats

    @property
    def spread(self) -> float:
        """How far the best warped loss lies below the median."""
        return max(-float(self.z.min()), 1e-3)


def table_of(curves: Sequence[Curve], encoding: Encoding, warp: Warp, horizon: int, most: int) -> Table:
    """The rows of the trials with reports, at most ``most``.

    A trial has rows at epochs 1, 2, 4, 8 … and its last one. Where these are too many, poorer trials keep only
    their last row. Where there are more than ``most`` trials, the best ``most // 2`` are kept, and an even sample
    of the others.
    """
    ranked = _chosen(sorted((curve for curve in curves if curve.steps), key=lambda curve: curve.last), most)
    wanted = [_anchors(curve) for curve in ranked]
    left = most - len(ranked)
    full = sorted(range(len(ranked)), key=lambda index: ranked[index].best)
    for index in full:
        left -= len(wanted[index]) - 1
        if left < 0:
            wanted[index] = wanted[index][-1:]
    points = encoding.points([curve.seen.params for curve in ranked])
    which = np.repeat(np.arange(len(ranked)), [len(places) for places in wanted])
    at = np.array([index for indices in wanted for index in indices], dtype=np.int64)
    epochs = np.array([ranked[k].steps[i] for k, i in zip(which, at, strict=True)], dtype=np.float64)
    z = warp(np.array([ranked[k].losses[i] for k, i in zip(which, at, strict=True)]))
    numbers = np.array([curve.number for curve in ranked], dtype=np.int64)
    centre = float(np.median(z))
    rows = Rows(encoding.features(points), which, places(epochs, horizon), numbers[which])
    return Table(rows, z - centre, centre, ranked, points)


def _anchors(curve: Curve) -> list[int]:
    """Indices of the reports that become rows: the last, and those nearest below 1, 2, 4, 8 …"""
    indices, anchor = {len(curve.steps) - 1}, 1.0
    while anchor < curve.done:
        if index := bisect_right(curve.steps, anchor):
            indices.add(index - 1)
        anchor *= _SPACING
    return sorted(indices)


def _chosen(ranked: list[Curve], most: int) -> list[Curve]:
    if len(ranked) <= most:
        return ranked
    kept = most // 2
    stride = np.linspace(kept, len(ranked) - 1, most - kept).round().astype(int)
    return ranked[:kept] + [ranked[index] for index in stride]
