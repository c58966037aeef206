"""Shapes of learning curves, and the part of the algebra of their fit that does not depend on the losses.

Model: ``loss(epoch) = c + a * phi(epoch) + walk(epoch) + noise``. phi is one of a grid of decaying shapes, each
scaled to fall from 1 at the first epoch to 0 at the last one; the walk is a lasting deviation from the shape; the
noise is independent in each epoch. For a known ratio of noise to walk, all quantities except the losses follow
from the epochs by linear algebra, computed here once and cached.

Sources: exponential and power laws with an asymptote, log-power: Domhan, Springenberg & Hutter 2015, IJCAI,
"Speeding up automatic hyperparameter optimization of deep neural networks by extrapolation of learning curves";
survey of such shapes: Viering & Loog 2023, IEEE TPAMI 45, "The shape of learning curves"; power laws in practice:
Hestness et al. 2017 (arXiv 1712.00409), Kaplan et al. 2020 (arXiv 2001.08361). The unknown level c with a
correlated rest is ordinary kriging, that is, generalised least squares: Cressie 1993, "Statistics for spatial
data", section 3.2.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: Names of the families of shapes, in order.
FAMILIES: Final = ("exponential", "power", "log-power", "constant")
#: Rates of exponential decay, in e-foldings over the whole run.
_EXPONENTIAL_RATES: Final = (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 32.0, 50.0)
#: Exponents of power laws of the epoch, without their minus sign.
_POWERS: Final = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
#: (share of the run after which half is gone, steepness on the axis of log-epochs).
_LOG_POWERS: Final = tuple((half, steepness) for half in (0.1, 0.25, 0.5) for steepness in (2.0, 4.0))
#: (whether the walk's clock is the log of the epoch, variance of the noise ÷ that of the walk's mean step).
_KERNELS: Final = ((False, 0.1), (False, 1.0), (True, 0.1), (True, 1.0))
#: Noise of about the size of rounding errors, so that no kernel is singular.
_JITTER: Final = 1e-9


@dataclass(frozen=True)
class Design:
    """The quantities for a fit at given epochs, with K kernels, F shapes and n epochs.

    Attributes:
        family: Each shape's index in ``FAMILIES``, [F]; the last shape is the constant, whose phi is 0.
        log_prior: Logarithm of each shape's prior weight, [F].
        shapes: phi at the epochs, [F, n].
        precision: Inverse covariance of walk and noise with the unknown level projected out, [K, n, n].
        information: ``phi' precision phi``, [K, F].
        log_determinant: Log-determinant of the covariance plus logarithm of the level's information, [K].
        weights: Kriging weights of the last epoch, which add up to 1, [K, n].
        variance: Kriging variance of the last epoch, [K].
        remainder: phi at the last epoch less its kriging from the epochs seen, [K, F].
    """

    family: npt.NDArray[np.intp]
    log_prior: Array
    shapes: Array
    precision: Array
    information: Array
    log_determinant: Array
    weights: Array
    variance: Array
    remainder: Array


# Each entry has 4 [n, n] matrices: at most 0.2 MB for the predictor's 64 epochs or fewer.
@lru_cache(maxsize=128)
def design(epochs: tuple[int, ...], final: int) -> Design:
    """The design for losses at ``epochs`` (rising, from 1, below ``final``) and a prediction at ``final``."""
    times = np.array(epochs, dtype=np.float64)
    axis = np.concatenate([[1.0], times, [float(final)]])
    families, curves = zip(*_decays(axis, final), strict=True)
    shapes = np.vstack([_scaled(np.array(curves)), np.zeros(len(times))])
    precision, log_determinant, weights, variance = _kriging(times, final)
    return Design(
        family=np.array([FAMILIES.index(family) for family in (*families, "constant")]),
        # The constant weighs as much as all others together.
        log_prior=np.log([1 / len(families)] * len(families) + [1.0]),
        shapes=shapes,
        precision=precision,
        information=((shapes @ precision) * shapes).sum(axis=2),
        log_determinant=log_determinant,
        weights=weights,
        variance=variance,
        remainder=-weights @ shapes.T,
    )


def _scaled(curves: Array) -> Array:
    """Scale curves [F, 1 + n + 1] to 1 at the first and 0 at the last epoch, and return those between, [F, n]."""
    scaled: Array = (curves[:, 1:-1] - curves[:, -1:]) / (curves[:, :1] - curves[:, -1:])
    return scaled


def _decays(axis: Array, final: int) -> Iterator[tuple[str, Array]]:
    """Family and values of each decaying shape at the epochs of ``axis``."""
    for rate in _EXPONENTIAL_RATES:
        yield "exponential", np.exp(-rate * axis / final)
    for power in _POWERS:
        yield "power", axis**-power
    for half, steepness in _LOG_POWERS:
        yield "log-power", 1 / (1 + (axis / (half * final)) ** steepness)


def _kriging(times: Array, final: int) -> tuple[Array, Array, Array, Array]:
    """Precision [K, n, n], log-determinant [K], weights [K, n] and variance [K]; see `Design`.

    The walk's variance over the whole run is ``log(final)`` on either clock.
    """
    total = math.log(final)
    step = total / (final - 1)
    noise = np.array([share * step for _, share in _KERNELS])
    clocks = np.array([np.log(times) if log_clock else (times - 1) * step for log_clock, _ in _KERNELS])
    walk = np.minimum(clocks[:, :, None], clocks[:, None, :])
    covariance = walk + (noise + _JITTER)[:, None, None] * np.eye(len(times))
    inverse = np.linalg.inv(covariance)
    level = inverse.sum(axis=2)
    information = level.sum(axis=1)
    pull = (inverse @ clocks[:, :, None])[:, :, 0]
    left = 1 - (level * clocks).sum(axis=1)
    weights = pull + level * (left / information)[:, None]
    variance = total + noise - (clocks * pull).sum(axis=1) + left**2 / information
    log_determinant = np.linalg.slogdet(covariance)[1] + np.log(information)
    precision = inverse - level[:, :, None] * level[:, None, :] / information[:, None, None]
    return precision, log_determinant, weights, variance
