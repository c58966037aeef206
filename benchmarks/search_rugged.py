"""Tasks for search.py: rugged landscapes over mixed and conditional spaces, with learning curves of many shapes.

A configuration has an end and a pace, both rugged functions of its parameters; the shape says how its losses
come to the end. ``power``: as a power of the epoch. ``noisy``: the same, with much noise. ``saturating``: an
accuracy of .99 at most, without noise, as a loss. ``diverging``: learning rates above an edge, which depends on
the other parameters, end in infinity within ten epochs. ``grokking``: nothing is learnt until late, and then all
at once. ``overfitting``: losses rise again after an epoch that depends on the pace. ``plateau``: the first loss
is the last one. ``needle``: nearly all of the space is equal. ``failing``, a kind of its own: as ``power``, and
three trials in ten fail at an epoch by chance, whatever their parameters.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from search_tasks import Params, Trained, named_rng

from hpo.search.schedulers.freeze_thaw.encoding import Conditions, Encoding

Floats = NDArray[np.float64]

_MIXED: Final[Mapping[str, BaseDistribution]] = {
    "lr": FloatDistribution(1e-5, 1.0, log=True),
    "decay": FloatDistribution(1e-8, 1e-1, log=True),
    "units": IntDistribution(8, 512, log=True),
    "layers": IntDistribution(1, 6),
    "dropout": FloatDistribution(0.0, 0.8),
    "activation": CategoricalDistribution(["relu", "tanh", "gelu", None]),
}
_BRANCHED: Final[Mapping[str, BaseDistribution]] = {
    "lr": FloatDistribution(1e-5, 1.0, log=True),
    "optimizer": CategoricalDistribution(["sgd", "adam", "lion"]),
    "momentum": FloatDistribution(0.0, 0.99),
    "beta": FloatDistribution(0.5, 0.999),
    "layers": IntDistribution(1, 6),
    "schedule": CategoricalDistribution([True, False]),
    "factor": FloatDistribution(0.1, 0.99),
}
_BRANCHES: Final[Conditions] = {
    "momentum": {"optimizer": ["sgd"]},
    "beta": {"optimizer": ["adam", "lion"]},
    "factor": {"schedule": [True]},
}
#: Points that a landscape's scale is taken from, and that a task's best and median losses are.
_EVEN = 4000
#: The share of trials that fail in ``failing``.
_FAILURES: Final = 0.3
#: Noise of an epoch's loss, in distances of the median from the best, where it is not the usual .02.
_NOISE: Final = {"noisy": 0.25, "saturating": 0.0, "plateau": 0.0}


class Landscape:
    """A rugged function over a space, about 0 at its best and 1 at its median.

    A sum over the parameters of weighted distances from an optimum, or of an effect of each choice, and over pairs
    of parameters of their distances' mean with a ripple.
    """

    def __init__(
        self, rng: np.random.Generator, encoding: Encoding, space: Mapping[str, BaseDistribution]
    ) -> None:
        count = len(encoding)
        self._optima, self._weights = rng.uniform(0.1, 0.9, count), rng.exponential(1.0, count) + 0.1
        self._absent = rng.uniform(0.0, 0.5, count)
        self._effects: list[Floats | None] = []
        for name in encoding.names:
            choices = space[name]
            effects = None
            if isinstance(choices, CategoricalDistribution):
                effects = rng.uniform(0.15, 1.0, len(choices.choices))
                effects[rng.integers(len(effects))] = 0.0
            self._effects.append(effects)
        self._pairs = [tuple(rng.choice(count, 2, replace=False)) for _ in range(count)]
        self._paired = rng.exponential(0.5, count)
        even = self._heights(encoding.snap(rng.random((_EVEN, count))))
        self._least, self._scale = float(even.min()), float(np.median(even) - even.min())

    def __call__(self, points: Floats) -> Floats:
        """The heights at rows of unit coordinates, at most 3."""
        return np.minimum((self._heights(points) - self._least) / self._scale, 3.0)

    def _heights(self, points: Floats) -> Floats:
        far = np.column_stack([self._distances(index, points[:, index]) for index in range(points.shape[1])])
        heights = far @ self._weights
        for (one, other), weight in zip(self._pairs, self._paired, strict=True):
            ripple = 0.15 * (1 - np.cos(6 * (far[:, one] - far[:, other])))
            heights = heights + weight * (np.sqrt(far[:, one] * far[:, other]) + ripple)
        return np.asarray(heights)

    def _distances(self, index: int, at: Floats) -> Floats:
        effects, there = self._effects[index], np.nan_to_num(at)
        if effects is not None:
            found = effects[np.minimum((there * len(effects)).astype(int), len(effects) - 1)]
        else:
            off = np.abs(there - self._optima[index])
            found = 4 * off**2 / (1 + 2 * off)
        return np.where(np.isnan(at), self._absent[index], found)


class Rugged:
    """See the module."""

    horizon = 50

    def __init__(self, shape: str, instance: int) -> None:
        self.name, self._shape = f"rugged-{shape}-{instance}", shape
        branched = instance % 4 in (1, 2)
        self.space, self.conditions = (_BRANCHED, _BRANCHES) if branched else (_MIXED, {})
        self._encoding = Encoding(self.space, self.conditions)
        rng = named_rng("rugged", shape, instance)
        self._end, self._pace = (Landscape(rng, self._encoding, self.space) for _ in range(2))
        even = self._encoding.snap(rng.random((_EVEN, len(self._encoding))))
        losses = self._losses(even)
        sound = np.isfinite(losses[:, -1])
        self.best, self.median = float(losses[sound].min()), float(np.median(losses[sound, -1]))

    def train(self, params: Params, seed: int) -> Trained:
        """See `search_tasks.Task`."""
        (true,) = self._losses(self._encoding.point(params)[None])
        noise = named_rng(self.name, seed, sorted(params.items())).normal(size=self.horizon)
        seen = true + _NOISE.get(self._shape, 0.02) * (self.median - self.best) * noise
        if self._shape == "failing":
            true, seen = _failing(true, seen, named_rng(self.name, seed, "failure", sorted(params.items())))
        lost = not np.isfinite(true).all()  # it can't be the best
        return Trained(seen, np.full(self.horizon, np.inf) if lost else true, 1.0)

    def _losses(self, points: Floats) -> Floats:
        """The losses [rows, epochs] at rows of unit coordinates."""
        epochs, end, pace = (
            np.arange(1.0, self.horizon + 1),
            self._end(points)[:, None],
            self._pace(points)[:, None],
        )
        if self._shape == "diverging":
            rate = points[:, [self._encoding.names.index("lr")]]
            return _diverging(epochs, end, pace, rate)
        return _SHAPES[self._shape](epochs, np.maximum(end, 0.0), np.maximum(pace, 0.0))


def _power(epochs: Floats, end: Floats, pace: Floats) -> Floats:
    return np.asarray(0.2 + 0.3 * end + 1.6 * (1 + epochs) ** -(0.3 + 0.6 * np.minimum(pace, 2.0)))


def _failing(true: Floats, seen: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    at = int(rng.integers(len(true))) if rng.random() < _FAILURES else len(true)
    ended = np.arange(len(true)) >= at
    return np.where(ended, np.inf, true), np.where(ended, np.inf, seen)


def _saturating(epochs: Floats, end: Floats, pace: Floats) -> Floats:
    accuracy = 1.02 - 0.12 * end - (1 + epochs) ** -(0.4 + 0.6 * np.minimum(pace, 2.0))
    return np.asarray(1 - np.clip(accuracy, 0.0, 0.99))


def _diverging(epochs: Floats, end: Floats, pace: Floats, rate: Floats) -> Floats:
    edge = 0.5 + 0.15 * (np.clip(pace, 0.0, 2.0) - 1)
    losses = 0.2 + 1.2 * np.abs(edge - rate) + 0.2 * end + 1.4 * (1 + epochs) ** -(0.3 + rate)
    last = 1 + 8 * np.maximum(0.0, 1 - 3 * (rate - edge))
    return np.where((rate > edge) & (epochs > last), np.inf, losses)


def _grokking(epochs: Floats, end: Floats, pace: Floats) -> Floats:  # noqa: ARG001 - the late have the worse end
    late = len(epochs) * (0.35 + 0.3 * end)
    return np.where(epochs < late, 1.0 - 0.02 * epochs / len(epochs), 0.1 + 0.2 * end)


def _overfitting(epochs: Floats, end: Floats, pace: Floats) -> Floats:
    turn, at = 0.08 + 0.3 * np.minimum(pace, 2.5), epochs / len(epochs)
    return 0.2 + 0.3 * end + np.where(at < turn, (1 - at / turn) ** 2, 0.8 * (at - turn))


def _plateau(epochs: Floats, end: Floats, pace: Floats) -> Floats:  # noqa: ARG001
    return 0.2 + 0.3 * end + 0.0 * epochs


def _needle(epochs: Floats, end: Floats, pace: Floats) -> Floats:  # noqa: ARG001
    depth = np.maximum(0.0, 1 - end / 0.25)
    return np.asarray(1 + 0.2 * epochs**-0.5 - 0.4 * ((depth > 0) + depth) * (1 - epochs**-0.8))


_SHAPES: Final[Mapping[str, Callable[[Floats, Floats, Floats], Floats]]] = {
    "power": _power,
    "noisy": _power,
    "saturating": _saturating,
    "grokking": _grokking,
    "overfitting": _overfitting,
    "plateau": _plateau,
    "needle": _needle,
    "failing": _power,
}
SHAPES: Final = (*(shape for shape in _SHAPES if shape != "failing"), "diverging")
