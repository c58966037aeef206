"""The covariance of the curve model and its derivatives.

The warped loss of trial i at configuration x and time t = ln(epoch) / ln(horizon) is modelled as a sum of
independent Gaussian processes:

    constant + trend(t) + level(x) + shape(x, t) + own level(i) + own walk(i, t) + noise

with the kernels 1, s0²·kt, s1²·kx, s2²·kx·kt, s3²·[i = i'], s4²·[i = i']·ko and σ²; kx is Matérn-5/2 with a length
for each parameter, kt and ko are Matérn-3/2 in t. After Swersky, Snoek and Adams, Freeze-Thaw Bayesian
Optimization (2014), with products in place of their exponential decay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hpo.search.axes import Floats

#: Scales are exp(theta). Indices into theta; from `LENGTHS` on, it has the length scales of the parameters.
TREND, LEVEL, SHAPE, OWN_LEVEL, OWN_WALK, NOISE, LENGTH_T, LENGTH_OWN = range(8)
LENGTHS: Final = 8
#: Mean and standard deviation of the normal prior of theta, in that order.
_PRIORS: Final = (
    (-0.5, 1.0),
    (-0.5, 1.0),
    (-1.0, 1.0),
    (-2.0, 1.0),
    (-1.5, 1.0),
    (-3.0, 1.0),
    (-0.7, 0.5),
    (-0.3, 0.5),
)
_JITTER: Final = 1e-6


@dataclass(frozen=True)
class Rows:
    """The inputs of the model: points on curves whose losses are seen or predicted.

    Attributes:
        x: Columns of the configurations [configurations, columns].
        of: Each row's configuration, as an index of x [rows].
        t: ln(epoch) / ln(horizon) [rows].
        trial: Each row's trial number [rows]; -1 for a trial that does not exist yet.
    """

    x: Floats
    of: NDArray[np.int64]
    t: Floats
    trial: NDArray[np.int64]

    @classmethod
    def each(cls, x: Floats, t: Floats, trial: NDArray[np.int64]) -> Rows:
        """One row for each configuration."""
        return cls(x, np.arange(len(x)), t, trial)

    def __len__(self) -> int:
        return len(self.t)

    def between(self, start: int, stop: int) -> Rows:
        """The rows from ``start`` to ``stop``."""
        some = slice(start, stop)
        return Rows.each(self.x[self.of[some]], self.t[some], self.trial[some])

    def joined(self, other: Rows) -> Rows:
        """These rows followed by the other ones."""
        return Rows(
            np.concatenate([self.x, other.x]),
            np.concatenate([self.of, other.of + len(self.x)]),
            np.concatenate([self.t, other.t]),
            np.concatenate([self.trial, other.trial]),
        )


def prior(lengths: int) -> tuple[Floats, Floats]:
    """The prior's mean and standard deviation of theta; length scales grow with the root of their number."""
    mean = [each for each, _ in _PRIORS] + [0.5 * np.log(max(lengths, 1))] * lengths
    return np.array(mean), np.array([each for _, each in _PRIORS] + [1.0] * lengths)


Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class Kernels:
    """The kernels between two sets of rows [rows, other rows], and the scaled distances behind them.

    Rows share configurations and epochs, so distances are computed once for each pair of these, and looked up.

    Attributes:
        kx: Over configurations.
        kt: Over epochs.
        ko: Over the epochs of one trial.
        own: 1 where both rows are of the same trial, else 0; None: 0 everywhere.
        far_x: √5 times the scaled distance of each pair of configurations; ``of_x`` has the indices of the rows.
        far_t: √3 times the scaled distance of each pair of epochs for kt, ``far_o`` for ko; ``of_t`` has the
            indices of the rows.
    """

    kx: Floats
    kt: Floats
    ko: Floats
    own: Floats | None
    far_x: Floats
    of_x: Pairs
    far_t: Floats
    far_o: Floats
    of_t: Pairs

    def covariance(self, theta: Floats) -> Floats:
        """The covariance of the noise-free curves."""
        squares = np.exp(2 * theta[:NOISE])
        total: Floats = squares[SHAPE] * self.kt
        total += squares[LEVEL]
        total *= self.kx
        total += 1.0
        total += squares[TREND] * self.kt
        if self.own is not None:
            total += self.own * (squares[OWN_LEVEL] + squares[OWN_WALK] * self.ko)
        return total


def kernels(theta: Floats, groups: NDArray[np.int64], a: Rows, b: Rows) -> Kernels:
    """The kernels for scales exp(theta); ``groups`` has the index of the length scale of each column of x."""
    lengths = np.exp(theta[LENGTHS:])[groups]
    one, two = np.sqrt(5.0) * a.x / lengths, np.sqrt(5.0) * b.x / lengths
    square = one @ (-2 * two).T
    square += (one * one).sum(1)[:, None]
    square += (two * two).sum(1)
    far_x = np.sqrt(np.maximum(square, 0.0, out=square), out=square)
    kx = far_x * far_x
    kx /= 3
    kx += far_x
    kx += 1
    kx *= np.exp(-far_x)
    (at, row), (other, column) = (np.unique(rows.t, return_inverse=True) for rows in (a, b))
    apart = np.sqrt(3.0) * np.abs(at[:, None] - other)
    far_t, far_o = apart / np.exp(theta[LENGTH_T]), apart / np.exp(theta[LENGTH_OWN])
    of_x, of_t = (a.of, b.of), (row, column)
    kt, ko = (_look_up((1 + far) * np.exp(-far), of_t) for far in (far_t, far_o))
    own = None
    if (a.trial >= 0).any():
        own = ((a.trial[:, None] == b.trial) & (a.trial >= 0)[:, None]).astype(np.float64)
    return Kernels(_look_up(kx, of_x), kt, ko, own, far_x, of_x, far_t, far_o, of_t)


def _look_up(values: Floats, pairs: Pairs) -> Floats:
    return values.take(pairs[0], axis=0).take(pairs[1], axis=1)


def noisy(covariance: Floats, theta: Floats) -> Floats:
    """Add the noise of reports to the covariance's diagonal, in place."""
    covariance[np.diag_indices_from(covariance)] += np.exp(2 * theta[NOISE]) + _JITTER
    return covariance


def variance(theta: Floats) -> float:
    """The prior variance of a noise-free value."""
    return 1.0 + float(np.exp(2 * theta[:NOISE]).sum())


def slopes(theta: Floats, groups: NDArray[np.int64], rows: Rows, found: Kernels, weight: Floats) -> Floats:
    """The sum of weight · dK/dtheta over all pairs of rows, for a symmetric weight [rows, rows]."""
    squares = np.exp(2 * theta[: NOISE + 1])
    by_x, by_own = weight * found.kx, weight * (0.0 if found.own is None else found.own)
    result = np.empty_like(theta)
    result[TREND] = 2 * squares[TREND] * np.vdot(weight, found.kt)
    result[LEVEL] = 2 * squares[LEVEL] * by_x.sum()
    result[SHAPE] = 2 * squares[SHAPE] * np.vdot(by_x, found.kt)
    result[OWN_LEVEL] = 2 * squares[OWN_LEVEL] * by_own.sum()
    result[OWN_WALK] = 2 * squares[OWN_WALK] * np.vdot(by_own, found.ko)
    result[NOISE] = 2 * squares[NOISE] * np.trace(weight)
    # With f the distance, by ln length: (1 + f) e^-f becomes f² e^-f,
    slope_t, slope_o = (_look_up(far * far * np.exp(-far), found.of_t) for far in (found.far_t, found.far_o))
    result[LENGTH_T] = squares[TREND] * np.vdot(weight, slope_t) + squares[SHAPE] * np.vdot(by_x, slope_t)
    result[LENGTH_OWN] = squares[OWN_WALK] * np.vdot(by_own, slope_o)
    # and (1 + f + f²/3) e^-f becomes (1 + f) e^-f / 3 times the part of f² that a parameter has.
    steep = (5 / 3) * weight * (squares[LEVEL] + squares[SHAPE] * found.kt)
    steep *= _look_up((1 + found.far_x) * np.exp(-found.far_x), found.of_x)
    x = rows.x[rows.of]
    columns = 2 * ((steep.sum(1)[:, None] * x * x).sum(0) - (x * (steep @ x)).sum(0))
    lengths = np.exp(theta[LENGTHS:])
    result[LENGTHS:] = np.bincount(groups, weights=columns, minlength=len(lengths)) / lengths**2
    return result
