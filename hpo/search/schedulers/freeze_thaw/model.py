"""The curve model: a Gaussian process over configuration and epoch, its scales fitted to what was seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_solve, cholesky, solve_triangular
from scipy.linalg.lapack import dpotri
from scipy.optimize import minimize

from hpo.search.schedulers.freeze_thaw import kernel
from hpo.search.schedulers.freeze_thaw.kernel import Floats, Rows

#: Steps of L-BFGS in one fit; the next fit starts where this one ends.
_STEPS: Final = 12
#: Standard deviations of the prior that the scales may leave its mean by.
_WIDEST: Final = 4.0
#: Rows that are computed at once: larger arrays would be new pages of memory each time, which takes longer than
#: to compute them.
_BLOCK: Final = 50
#: What a covariance that can't be decomposed counts as.
_IMPOSSIBLE: Final = 1e10


def negative_log_posterior(
    theta: Floats, groups: NDArray[np.int64], rows: Rows, z: Floats
) -> tuple[float, Floats]:
    """-ln p(z | theta) - ln p(theta) without constants, and its gradient; see `kernel` for theta."""
    mean, std = kernel.prior(len(theta) - kernel.LENGTHS)
    found = kernel.parts(theta, groups, rows, rows)
    covariance = kernel.noisy(found.covariance(theta), theta)
    try:
        factor = cholesky(covariance, lower=True, check_finite=False)
    except LinAlgError:
        return _IMPOSSIBLE, np.zeros_like(theta)
    lower, _ = dpotri(factor, lower=1)
    inverse = lower + np.tril(lower, -1).T
    alpha = inverse @ z
    off = (theta - mean) / std
    value = 0.5 * float(z @ alpha) + float(np.log(np.diag(factor)).sum()) + 0.5 * float(off @ off)
    weight = 0.5 * (inverse - np.outer(alpha, alpha))
    return value, kernel.slopes(theta, groups, rows, found, weight) + off / std


def fitted(start: Floats, groups: NDArray[np.int64], rows: Rows, z: Floats) -> Floats:
    """Scales of the maximum a posteriori near ``start``; the prior's means where none is found."""
    mean, std = kernel.prior(len(start) - kernel.LENGTHS)
    bounds = list(zip(mean - _WIDEST * std, mean + _WIDEST * std, strict=True))
    found = minimize(
        negative_log_posterior,
        np.clip(start, mean - _WIDEST * std, mean + _WIDEST * std),
        args=(groups, rows, z),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": _STEPS, "maxfun": 2 * _STEPS},
    )
    return np.asarray(found.x) if np.isfinite(found.x).all() else mean


def _blocks(rows: Rows) -> Iterator[Rows]:
    return (rows.part(start, start + _BLOCK) for start in range(0, len(rows), _BLOCK))


class CurveModel:
    """The process after what was seen.

    Args:
        theta: Logarithms of the scales; see `kernel`.
        groups: For each column of x, the index of its length.
        rows: Where something was seen.
        z: Warped losses there [rows].

    Raises:
        LinAlgError: The covariance is not positive definite.
    """

    def __init__(self, theta: Floats, groups: NDArray[np.int64], rows: Rows, z: Floats) -> None:
        self.theta, self.groups, self.rows, self.z = theta, groups, rows, z
        covariance = np.concatenate([self._with(part) for part in _blocks(rows)])
        self._factor = cholesky(kernel.noisy(covariance, theta), lower=True, overwrite_a=True, check_finite=False)
        self._alpha = cho_solve((self._factor, True), z, check_finite=False)

    @property
    def noise(self) -> float:
        """Standard deviation of a report around its curve."""
        return math.exp(self.theta[kernel.NOISE])

    def predict(self, at: Rows) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the noise-free value at each row."""
        mean, std = zip(*(self._predict(part) for part in _blocks(at)), strict=True)
        return np.concatenate(mean), np.concatenate(std)

    def nearest(self, x: Floats) -> Floats:
        """Distance of each configuration [configurations, columns] to the nearest that was seen, in lengths."""
        lengths = np.exp(self.theta[kernel.LENGTHS :])[self.groups]
        one, two = x / lengths, self.rows.x / lengths
        square = (one * one).sum(1)[:, None] + (two * two).sum(1) - 2 * one @ two.T
        return np.asarray(np.sqrt(np.maximum(square.min(1), 0.0)))

    def _predict(self, at: Rows) -> tuple[Floats, Floats]:
        covariance = self._with(at)
        explained = self._explained(covariance)
        left = kernel.variance(self.theta) - (explained * explained).sum(0)
        return covariance @ self._alpha, np.sqrt(np.maximum(left, 1e-10))

    def believe(self, at: Rows) -> None:
        """From here on, take each of these rows as seen where it is predicted.

        Raises:
            LinAlgError: The covariance with them is not positive definite.
        """
        covariance = self._with(at)
        explained = self._explained(covariance)
        among = kernel.noisy(kernel.parts(self.theta, self.groups, at, at).covariance(self.theta), self.theta)
        corner = cholesky(among - explained.T @ explained, lower=True, check_finite=False)
        self._factor = np.block([[self._factor, np.zeros((len(self.rows), len(at)))], [explained.T, corner]])
        self.z = np.concatenate([self.z, covariance @ self._alpha])
        self.rows = self.rows.joined(at)
        self._alpha = cho_solve((self._factor, True), self.z, check_finite=False)

    def _with(self, at: Rows) -> Floats:
        return kernel.parts(self.theta, self.groups, at, self.rows).covariance(self.theta)

    def _explained(self, covariance: Floats) -> Floats:
        return np.asarray(solve_triangular(self._factor, covariance.T, lower=True, check_finite=False))
