"""Extrapolation of a loss curve to its last epoch; numpy only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[np.float64]

# Decay over the whole observed window: from hardly bent to gone within its first point.
_SLOWEST, _FASTEST = 1e-3, 50.0
_GRID: Final = 48
_REFINEMENTS: Final = 6


@dataclass(frozen=True)
class Prediction:
    """A predicted final loss.

    Attributes:
        mean: The value, in units of the loss.
        family: ``"exponential"``, or ``"last"`` where the curve is no decay and its last value was repeated.
    """

    mean: float
    family: str

    @property
    def neg_log10(self) -> float | None:
        """``-log10(mean)``; None for a loss that is not positive."""
        return -math.log10(self.mean) if self.mean > 0 else None


def predict_final_loss(history: Sequence[float], max_epochs: int, *, min_epochs: int = 10) -> Prediction | None:
    """Extrapolate a loss curve to its last epoch with ``a * exp(-b * t) + c``, a and b positive.

    For a given rate b the best a and c are a linear regression (variable projection: Golub & Pereyra 1973,
    SIAM J. Numer. Anal. 10), so only b is searched, on a grid refined around its minimum. A loss that has always
    been positive is taken to stay so: its c is 0 or more. A curve that does not fall towards an asymptote is
    answered with its last finite value.

    Args:
        history: Loss of each finished epoch, the first epoch first; non-finite ones are left out of the fit.
        max_epochs: Number of the epoch to predict, counted from 1.
        min_epochs: No answer before this many epochs.

    Returns:
        The prediction; None before ``min_epochs`` or where no value is finite.
    """
    losses = np.asarray(history, dtype=np.float64)
    if len(losses) < min_epochs:
        return None
    epochs = np.arange(1, len(losses) + 1, dtype=np.float64)
    finite = np.isfinite(losses)
    if not finite.any():
        return None
    last = float(losses[finite][-1])
    mean = _extrapolate(epochs[finite], losses[finite], max_epochs) if finite.sum() >= 4 else None
    return Prediction(last, "last") if mean is None else Prediction(mean, "exponential")


def _extrapolate(epochs: _Array, losses: _Array, final: int) -> float | None:
    """The fitted curve's value at ``final``; None where no decay fits."""
    span = float(epochs[-1] - epochs[0])
    scale = float(np.abs(losses).max())
    if scale == 0 or not span:
        return None
    times, values = (epochs - epochs[0]) / span, losses / scale
    rates = np.geomspace(_SLOWEST, _FASTEST, _GRID)
    for _ in range(_REFINEMENTS):
        amplitudes, offsets, errors = _fit(times, values, rates)
        best = int(np.argmin(errors))
        rate, amplitude, offset = rates[best], amplitudes[best], offsets[best]
        rates = np.geomspace(rates[max(best - 1, 0)], rates[min(best + 1, _GRID - 1)], _GRID)
    if amplitude <= 0:
        return None
    time = (final - epochs[0]) / span
    predicted = float((amplitude * np.exp(-rate * time) + offset) * scale)
    return predicted if math.isfinite(predicted) else None


def _fit(times: _Array, values: _Array, rates: _Array) -> tuple[_Array, _Array, _Array]:
    """Least-squares a and c, and the squared error, for each rate; arrays of [rates]."""
    basis = np.exp(-np.outer(rates, times))
    centred = basis - basis.mean(axis=1, keepdims=True)
    target = values - values.mean()
    spread = np.maximum((centred**2).sum(axis=1), np.finfo(np.float64).tiny)
    amplitudes = centred @ target / spread
    offsets = values.mean() - amplitudes * basis.mean(axis=1)
    if values.min() > 0:
        # Where the line falls below zero, the best with c = 0.
        below = offsets < 0
        amplitudes = np.where(below, basis @ values / (basis**2).sum(axis=1), amplitudes)
        offsets = np.where(below, 0.0, offsets)
    residuals = values - amplitudes[:, None] * basis - offsets[:, None]
    return amplitudes, offsets, (residuals**2).sum(axis=1)
