"""Fits the scales of the curve model to the losses seen."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cholesky
from scipy.linalg.lapack import dpotri
from scipy.optimize import minimize

from hpo.search.axes import Floats
from hpo.search.schedulers.freeze_thaw import kernel
from hpo.search.schedulers.freeze_thaw.kernel import Rows

#: Mean and standard deviation of theta.
Prior = tuple[Floats, Floats]

#: Steps of L-BFGS in one fit; a later fit may start from the result.
_STEPS: Final = 12
#: Maximum distance of a scale from the prior's mean, in the prior's standard deviations.
_WIDEST: Final = 4.0
#: The value of the function where the covariance can't be decomposed.
_IMPOSSIBLE: Final = 1e10


def negative_log_posterior(
    theta: Floats, prior: Prior, groups: NDArray[np.int64], rows: Rows, z: Floats, fixed: Floats | None = None
) -> tuple[float, Floats]:
    """-ln p(z | theta) - ln p(theta) without constants, and its gradient.

    Args:
        theta: See `kernel`.
        prior: Mean and standard deviation of theta.
        groups: For each column of x, the index of its length.
        rows: The rows whose losses were seen.
        z: The warped losses there [rows].
        fixed: A further covariance [rows, rows] that does not depend on theta; None: there is none.
    """
    mean, std = prior
    found = kernel.kernels(theta, groups, rows, rows)
    covariance = kernel.noisy(found.covariance(theta), theta)
    if fixed is not None:
        covariance += fixed
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


def fitted(
    start: Floats, prior: Prior, groups: NDArray[np.int64], rows: Rows, z: Floats, fixed: Floats | None = None
) -> Floats:
    """The theta of the maximum a posteriori near ``start``; the prior's means where none is found."""
    mean, std = prior
    bounds = list(zip(mean - _WIDEST * std, mean + _WIDEST * std, strict=True))
    found = minimize(
        negative_log_posterior,
        np.clip(start, mean - _WIDEST * std, mean + _WIDEST * std),
        args=(prior, groups, rows, z, fixed),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": _STEPS, "maxfun": 2 * _STEPS},
    )
    return np.asarray(found.x) if np.isfinite(found.x).all() else mean
