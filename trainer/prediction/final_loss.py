"""Predicts the last value of a learning curve, with its uncertainty; needs only NumPy."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from trainer.checks import check_mode
from trainer.prediction.curve_families import FAMILIES, Array, Design, design

#: The most epochs that are fitted; a longer history is thinned evenly.
_MOST_POINTS: Final = 64
#: Prior standard deviation of a shape's fall over the run, in ranges of the losses seen.
_AMPLITUDE: Final = 3.0
#: Power of the evidence; below 1 because no real curve follows a shape exactly.
_TEMPER: Final = 0.7
#: Smallest prior scale of the walk, in ranges of the losses seen.
_FINEST: Final = 1e-3
#: A point is a spike if it is this many median steps away from both neighbours. A first point is a cold start if
#: it is this many ranges of all the others away from the second.
_SPIKE, _COLD_START = 5.0, 20.0
#: Limits of the further fall: shares of the falls by the logarithmic and by the linear trend.
_LOG_SHARE, _LINE_SHARE = 0.8, 1 / 3
#: The share of the way back to its best value that a curve takes at the beginning of a run; falls to 0 at its end.
_COMEBACK: Final = 0.6
#: Standard deviations from the mean to the upper end near the end of a run; fewer before, as then most of the
#: remaining change is a fall.
_UPPER: Final = 0.5
#: Standard deviations between the ends of a normal distribution's 80 % interval.
_NORMAL_WIDTH: Final = 2.5631


@dataclass(frozen=True)
class Prediction:
    """A predicted final loss.

    Attributes:
        mean: The value, in units of the loss.
        std: Standard deviation of the normal distribution whose 80 % interval is as wide; finite, at least 0.
        lower: Lower end of the interval that holds about 80 % of the true values.
        upper: Its upper end. The mean is between the ends, but not in their middle.
        family: Family of the weightiest shapes: ``"exponential"``, ``"power"``, ``"log-power"`` or ``"constant"``;
            where no fit earned trust, ``"last"``, the last value repeated, or ``"best"``, between it and the best.
        quality: Weight that decaying shapes earned against a constant level, 0 to 1 (before anything is seen it
            would be 0.5); 0 for ``"last"`` and ``"best"``.
    """

    mean: float
    std: float
    lower: float
    upper: float
    family: str
    quality: float

    @property
    def neg_log10(self) -> float | None:
        """``-log10(mean)``; None for a loss that is not positive."""
        return -math.log10(self.mean) if self.mean > 0 else None


@dataclass(frozen=True)
class _Forecast:
    """The change from the last value to the final one, in ranges of the losses seen."""

    mean: float
    lower: float
    upper: float
    family: str
    quality: float


def predict_final_loss(
    history: Sequence[float] | Array, max_epochs: int, *, min_epochs: int = 10, mode: Literal["min", "max"] = "min"
) -> Prediction | None:
    """Extrapolate a learning curve to its last epoch.

    Decaying shapes of several families, each with a random walk and noise around it
    (`trainer.prediction.curve_families`), are averaged by how well they explain the curve: Bayesian model
    averaging (Hoeting, Madigan, Raftery & Volinsky 1999, Statistical Science 14) of conjugate normal and
    inverse-gamma models, in closed form. A constant level with such a walk is among them, so a fit must earn its
    weight; and the prediction passes four gates:

    - A loss is not predicted to rise.
    - A loss that was better before its last value returns some of the way to its best value.
    - It falls no further than a curve that continues its recent trend: on the axis of log-epochs since half the
      epochs seen, and on that of epochs over the last five, where a slope that runs out towards the end (as a
      schedule's does) leaves a third of the line. Of more than 64 epochs, evenly spread ones are fitted, and these
      are the last five of them.
    - A loss that has always been positive stays so.

    Scaling or shifting the curve scales or shifts the prediction in the same way, except for a single epoch or a
    constant curve, which have no scale: their standard deviation is the last value's magnitude divided by the
    number of epochs.

    Args:
        history: Loss of each finished epoch, the first epoch first. Values that are not finite are left out, but
            their epochs count.
        max_epochs: Number of the epoch to predict, counted from 1. For a history that has reached it, the
            prediction is its last finite value.
        min_epochs: The fewest epochs for a prediction.
        mode: ``"min"`` for a loss; ``"max"`` for a metric that should rise, predicted as a loss of opposite sign.

    Returns:
        The prediction; None before ``min_epochs`` or if no value is finite.

    Raises:
        ValueError: ``mode`` is neither.
    """
    check_mode(mode)
    values = np.asarray(history, dtype=np.float64)
    finite = np.flatnonzero(np.isfinite(values))
    if len(values) < min_epochs or not len(finite):
        return None
    if mode == "min":
        return _predict(values[finite], finite + 1, max_epochs)
    found = _predict(-values[finite], finite + 1, max_epochs)
    return Prediction(-found.mean, found.std, -found.upper, -found.lower, found.family, found.quality)


def _predict(losses: Array, epochs: npt.NDArray[np.intp], final: int) -> Prediction:
    """The prediction from finite losses [n] at ``epochs`` [n], with n at least 1."""
    last = float(losses[-1])
    if epochs[-1] >= final:
        return Prediction(last, 0.0, last, last, "last", 0.0)
    positive = bool(losses.min() > 0)
    losses, epochs = _thinned(*_warm(losses, epochs))
    # Divided by the magnitude first, so that no difference overflows.
    magnitude = float(np.abs(losses).max()) or 1.0
    z = losses / magnitude - last / magnitude
    spread = float(z.max() - z.min())
    if spread == 0:
        wide = _NORMAL_WIDTH / 2 / len(losses) * abs(last) / magnitude
        return _answer(last, _Forecast(0.0, -wide, wide, "last", 0.0), 1.0, magnitude, positive)
    room = last / magnitude / spread if positive else math.inf
    return _answer(last, _forecast(z / spread, epochs, final, room), spread, magnitude, positive)


def _answer(last: float, change: _Forecast, spread: float, magnitude: float, positive: bool) -> Prediction:
    """The forecast in units of the loss, limited to the range of a float."""
    floor, ceiling = 0.0 if positive else -sys.float_info.max, sys.float_info.max
    # The product ``spread * magnitude`` alone may overflow a float.
    mean = min(max(last + change.mean * spread * magnitude, floor), ceiling)
    lower = min(max(last + change.lower * spread * magnitude, floor), mean)
    upper = max(min(last + change.upper * spread * magnitude, ceiling), mean)
    std = upper / _NORMAL_WIDTH - lower / _NORMAL_WIDTH
    return Prediction(mean, std, lower, upper, change.family, change.quality)


def _warm(losses: Array, epochs: npt.NDArray[np.intp]) -> tuple[Array, npt.NDArray[np.intp]]:
    """Leave out the first epochs if they are so far off that the others would look flat."""
    while len(losses) > 4:
        # Halves, so that nothing overflows.
        rest = losses[1:] / 2
        moves = min(float(rest.max() - rest.min()), sys.float_info.max / 20)
        if not moves or abs(losses[0] / 2 - rest[0]) <= _COLD_START * moves:
            break  # if the others are constant, only the start gives a scale
        losses, epochs = losses[1:], epochs[1:]
    return losses, epochs


def _thinned(losses: Array, epochs: npt.NDArray[np.intp]) -> tuple[Array, npt.NDArray[np.intp]]:
    """Select at most `_MOST_POINTS` epochs, among them the first and the last."""
    if len(losses) <= _MOST_POINTS:
        return losses, epochs
    chosen = np.linspace(0, len(losses) - 1, _MOST_POINTS).round().astype(np.intp)
    return losses[chosen], epochs[chosen]


def _forecast(z: Array, epochs: npt.NDArray[np.intp], final: int, room: float) -> _Forecast:
    """The forecast as an average over shapes and kernels.

    Args:
        z: Losses minus the last one, in units of their range, [n]; n at least 2.
        epochs: Their epochs, [n].
        final: The epoch to predict.
        room: The most that the loss can fall, in units of the range.
    """
    z = _without_spikes(z)
    deepest = min(_deepest(z, epochs, final), room)
    plan = design(tuple(epochs.tolist()), final)
    weight, decaying, means, variances = _posterior(plan, z, _walk_scale(z, epochs, final))
    means = np.maximum(means, -deepest)
    centre = float((weight * means).sum())
    std = math.sqrt(float((weight * (variances + (means - centre) ** 2)).sum()))
    centre = min(centre, 0.0)
    lower = min(centre - std, -deepest)
    upper = centre + _UPPER * math.sqrt(int(epochs[-1]) / final) * std
    again = -_COMEBACK * (1 - int(epochs[-1]) / final) * _to_best(z)
    if again <= centre:
        return _Forecast(again, min(lower, again), upper, "best" if again < 0 else "last", 0.0)
    # A shape that would have to rise has the amplitude 0, and so counts as the constant.
    by_family = np.bincount(plan.family, weights=(weight * decaying).sum(axis=0), minlength=len(FAMILIES))
    quality = min(float(by_family.sum()), 1.0)
    by_family[-1] = 1 - quality
    return _Forecast(centre, lower, upper, FAMILIES[int(by_family.argmax())], quality)


def _posterior(plan: Design, z: Array, scale: float) -> tuple[Array, npt.NDArray[np.bool_], Array, Array]:
    """For each kernel and shape: weight, whether it decays, mean and variance at the final epoch, each [K, F].

    Priors: the amplitude of a shape is normal around 0, the variance of its walk is inverse-gamma with one degree
    of freedom around ``scale`` squared, and the level has none. A negative amplitude is replaced by 0.
    """
    prior = (scale / _AMPLITUDE) ** 2
    weighed = plan.precision @ z
    precision = prior + plan.information
    amplitude = np.maximum(weighed @ plan.shapes.T / precision, 0)
    squares = np.maximum((weighed @ z)[:, None] - precision * amplitude**2, 0) + scale**2
    evidence = np.log(precision / prior) + len(z) * np.log(squares) + plan.log_determinant[:, None]
    logarithm = _TEMPER * (plan.log_prior - evidence / 2)
    weight = np.exp(logarithm - logarithm.max())
    means = (plan.weights @ z)[:, None] + amplitude * plan.remainder
    variances = squares / len(z) * (plan.variance[:, None] + plan.remainder**2 / precision)
    return weight / weight.sum(), amplitude > 0, means, variances


def _walk_scale(z: Array, epochs: npt.NDArray[np.intp], final: int) -> float:
    """The walk's standard deviation per unit of its clock, estimated from the median step between epochs."""
    step = _median(np.abs(np.diff(z)) / np.sqrt(np.diff(epochs)))
    # 1.48: a normal distribution's standard deviation ÷ its median magnitude; see the clock of `_kriging`.
    return max(1.48 * step * math.sqrt(final / math.log(final)), _FINEST)


def _without_spikes(z: Array) -> Array:
    """Replace each point far outside of both its neighbours by the nearer one (Hampel 1974, JASA 69)."""
    if len(z) < 4:
        return z
    before, here, after = z[:-2], z[1:-1], z[2:]
    nearest = np.clip(here, np.minimum(before, after), np.maximum(before, after))
    cleaned = z.copy()
    cleaned[1:-1] = np.where(np.abs(here - nearest) > _SPIKE * _median(np.abs(np.diff(z))), nearest, here)
    return cleaned


def _deepest(z: Array, epochs: npt.NDArray[np.intp], final: int) -> float:
    """The most that a curve falls if it continues its recent trend; see `predict_final_loss`."""
    now = int(epochs[-1])
    half = min(int(np.searchsorted(epochs, now - now // 2)), len(z) - 2)
    doubling = math.log(final / now) / math.log(now / int(epochs[half]))
    recent = max(len(z) - 6, 0)
    stretch = (final - now) / (now - int(epochs[recent]))
    fallen, lately = max(float(z[half] - z[-1]), 0.0), max(float(z[recent] - z[-1]), 0.0)
    return min(_LOG_SHARE * doubling * fallen, _LINE_SHARE * stretch * lately)


def _to_best(z: Array) -> float:
    """The distance from the last value to the best one, at most the sum of all falls of the curve; at least 0."""
    fallen = -float(np.minimum(np.diff(z), 0).sum())
    return min(float(z[-1] - z.min()), fallen)


def _median(values: Array) -> float:
    """The median of [n] values; for few values several times as fast as NumPy's."""
    ordered = np.sort(values)
    middle = len(ordered) // 2
    return float(ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)
