"""The curve model: a Gaussian process over configuration and epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular

from hpo.search.axes import Floats
from hpo.search.schedulers.freeze_thaw import kernel
from hpo.search.schedulers.freeze_thaw.kernel import Rows

#: Number of rows computed at once: larger arrays would get new memory pages each time, which takes longer than
#: the computation.
_BLOCK: Final = 50


@dataclass(frozen=True)
class Known:
    """Known functions, of which every curve contains the same weighted sum with unknown weights.

    Attributes:
        functions: Each takes rows and returns its value at each row.
        mean: The prior mean of each weight.
        std: The prior standard deviation of each weight.
    """

    functions: Sequence[Callable[[Rows], Floats]] = ()
    mean: float = 0.0
    std: float = 0.0

    def at(self, rows: Rows) -> Floats:
        """The functions' values [rows, functions]."""
        return np.array([function(rows) for function in self.functions]).reshape(-1, len(rows)).T

    def expected(self, values: Floats) -> Floats:
        """The prior mean of the weighted sum, for values from `at`."""
        return np.asarray(self.mean * values.sum(1))

    def covariance(self, one: Floats, other: Floats) -> Floats:
        """The prior covariance of the weighted sums, for values from `at`."""
        return np.asarray(self.std**2 * one @ other.T)


def _blocks(rows: Rows) -> Iterator[Rows]:
    return (rows.between(start, start + _BLOCK) for start in range(0, len(rows), _BLOCK))


class CurveModel:
    """The Gaussian process given the losses that were seen.

    Args:
        theta: Logarithms of the scales; see `kernel`.
        groups: For each column of x, the index of its length scale.
        rows: The rows whose losses were seen.
        z: The warped losses there [rows].
        known: Known functions that the curves contain.

    Raises:
        LinAlgError: The covariance is not positive definite.
    """

    def __init__(
        self, theta: Floats, groups: NDArray[np.int64], rows: Rows, z: Floats, known: Known = Known()
    ) -> None:
        self.theta, self.groups, self.rows, self.z, self._known = theta, groups, rows, z, known
        self._values = known.at(rows)
        covariance = np.concatenate([self._with(block)[0] for block in _blocks(rows)])
        self._factor = cholesky(kernel.noisy(covariance, theta), lower=True, overwrite_a=True, check_finite=False)
        self._solve()

    def _solve(self) -> None:
        off = self.z - self._known.expected(self._values)
        self._alpha = cho_solve((self._factor, True), off, check_finite=False)

    @property
    def noise(self) -> float:
        """Standard deviation of a report around the noise-free curve."""
        return math.exp(self.theta[kernel.NOISE])

    def predict(self, at: Rows) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the noise-free value at each row."""
        if not len(at):
            return np.empty(0), np.empty(0)
        mean, std = zip(*(self._predict(block) for block in _blocks(at)), strict=True)
        return np.concatenate(mean), np.concatenate(std)

    def nearest(self, x: Floats) -> Floats:
        """Distance of each configuration [configurations, columns] to the nearest one seen, in length scales."""
        lengths = np.exp(self.theta[kernel.LENGTHS :])[self.groups]
        one, two = x / lengths, self.rows.x / lengths
        square = (one * one).sum(1)[:, None] + (two * two).sum(1) - 2 * one @ two.T
        return np.asarray(np.sqrt(np.maximum(square.min(1), 0.0)))

    def _predict(self, at: Rows) -> tuple[Floats, Floats]:
        covariance, values = self._with(at)
        explained = self._explained(covariance)
        left = kernel.variance(self.theta) - (explained * explained).sum(0)
        left += self._known.std**2 * (values * values).sum(1)
        mean = self._known.expected(values) + covariance @ self._alpha
        return mean, np.sqrt(np.maximum(left, 1e-10))

    def of_parameters(self, at: Rows) -> Floats:
        """The posterior mean of level(x) + shape(x, t), which depends on the parameters and the epoch only."""
        level, shape = np.exp(2 * self.theta[[kernel.LEVEL, kernel.SHAPE]])
        means = []
        for block in _blocks(at):
            found = kernel.kernels(self.theta, self.groups, block, self.rows)
            means.append((found.kx * (level + shape * found.kt)) @ self._alpha)
        return np.concatenate(means)

    def believe(self, at: Rows) -> None:
        """Add these rows as if each had been seen with its predicted loss.

        Raises:
            LinAlgError: The covariance with them is not positive definite.
        """
        covariance, values = self._with(at)
        explained = self._explained(covariance)
        among = kernel.noisy(kernel.kernels(self.theta, self.groups, at, at).covariance(self.theta), self.theta)
        among += self._known.covariance(values, values)
        corner = cholesky(among - explained.T @ explained, lower=True, check_finite=False)
        self._factor = np.block([[self._factor, np.zeros((len(self.rows), len(at)))], [explained.T, corner]])
        self.z = np.concatenate([self.z, self._known.expected(values) + covariance @ self._alpha])
        self.rows = self.rows.joined(at)
        self._values = np.concatenate([self._values, values])
        self._solve()

    def _with(self, at: Rows) -> tuple[Floats, Floats]:
        """The covariance of rows with those seen, and the values of the known functions there."""
        covariance = kernel.kernels(self.theta, self.groups, at, self.rows).covariance(self.theta)
        values = self._known.at(at)
        if self._known.functions:
            covariance += self._known.covariance(values, self._values)
        return covariance, values

    def _explained(self, covariance: Floats) -> Floats:
        return np.asarray(solve_triangular(self._factor, covariance.T, lower=True, check_finite=False))
