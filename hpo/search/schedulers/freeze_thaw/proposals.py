"""Generates new points: evenly drawn ones and ones near the best, then refined by small random moves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

import numpy as np

from hpo.search.axes import Floats
from hpo.search.schedulers.freeze_thaw.encoding import Encoding

#: Number of points drawn evenly, and near the best, for one decision.
_EVEN: Final = 200
_NEAR: Final = 150
#: How many of the best known points, and of the best new points, are moved, and how often in each round.
_PARENTS: Final = 6
_REFINED: Final = 3
_MOVES: Final = 16
#: Standard deviations of the moves, one for each round.
_ROUNDS: Final = (0.15, 0.07, 0.03, 0.015)
#: Draws from the even sequence before the untried points of a finite space are searched.
_DRAWS: Final = 16
#: The step from one of these draws to the next in the even sequence. It is larger than any trial's number, so that
#: no draw is another trial's point, and a prime larger than any number of dimensions has, so that all coordinates
#: change.
_STRIDE: Final = 1_000_003
#: Digits of the even sequence with a smaller weight are left out.
_DIGITS: Final = 1e-9
#: The probability that a move of an unordered choice draws it anew.
_SWAP: Final = 0.3


#: Maximum number of rounds in which points are drawn until enough of them are allowed.
_ROUNDS_OF_DRAWS: Final = 25
#: Standard deviations of moves from a point that is not allowed, and the number of moves with each.
_AWAY: Final = (0.02, 0.05, 0.1, 0.2, 0.4)
_AROUND: Final = 64


class Proposals:
    """Points that no trial of the study has, and that satisfy the space's conditions.

    Args:
        encoding: The search space.
        tried: `Encoding.key` of each trial's parameters.
        rng: The source of all randomness.
    """

    def __init__(self, encoding: Encoding, tried: set[Hashable], rng: np.random.Generator) -> None:
        self._encoding, self._tried, self._rng = encoding, tried, rng
        self._kept = np.array([axis.count != 1 for axis in encoding.axes], dtype=np.bool_)
        self._unordered = np.array([not axis.ordered for axis in encoding.axes], dtype=np.bool_)

    def spread(self, index: int, seed: int) -> dict[str, Any] | None:
        """The point at this index of the study's even sequence, or else one far along it; untried and allowed.

        The next index belongs to another trial, whose point may not be stored yet. None where every point of the
        space is tried.
        """
        for later in range(_DRAWS):
            units = even_point(index + later * _STRIDE, len(self._encoding), seed)
            params = self._encoding.params(self._encoding.snap(units[None])[0])
            if self._encoding.allows(params) and self._is_untried(params):
                return params
        return self.any_left()

    def _is_untried(self, params: dict[str, Any]) -> bool:
        return self._encoding.key(params) not in self._tried

    def any_left(self) -> dict[str, Any] | None:
        """A random untried point; None where there is none."""
        every = self._encoding.every_point()
        for point in self._rng.permutation(every):
            params = self._encoding.params(point)
            if self._is_untried(params) and self._encoding.allows(params):
                return params
        if len(every):  # all were looked at
            return None
        drawn = self._even(_EVEN)
        found = self._best_untried(drawn, np.zeros(len(drawn)))
        return None if found is None else found[0]

    def _even(self, count: int) -> Floats:
        """``count`` snapped points that are allowed, drawn evenly; fewer where few points are allowed."""
        found = np.empty((0, len(self._encoding)))
        for _ in range(_ROUNDS_OF_DRAWS):
            drawn = self._encoding.snap(self._rng.random((count, len(self._encoding))))
            found = np.concatenate([found, drawn[self._encoding.allowed(drawn)]])[:count]
            if len(found) == count:
                break
        return found

    def candidates(self, parents: Floats) -> Floats:
        """Snapped points [candidates, parameters]: evenly drawn ones, and ones near the first, best parents."""
        even = self._even(_EVEN)
        base = parents[:_PARENTS]
        picks = base[self._rng.integers(len(base), size=_NEAR)]
        near = self._moved(picks, 10 ** self._rng.uniform(-2, -0.5, size=(_NEAR, 1)))
        near = self._encoding.snap(near)
        return np.concatenate([even, near[self._encoding.allowed(near)]])

    def refined(
        self, points: Floats, worth: Floats, value: Callable[[Floats], Floats]
    ) -> tuple[dict[str, Any], Floats, float] | None:
        """The best untried point among these allowed ones, or near them: parameters, coordinates and worth."""
        order = np.argsort(-worth, kind="stable")
        near, gains = points[order[:_REFINED]], worth[order[:_REFINED]]
        best = self._best_untried(points, worth)
        for scale in _ROUNDS:
            moved = self._encoding.snap(self._moved(np.repeat(near, _MOVES, axis=0), scale))
            moved = moved[self._encoding.allowed(moved)]
            near, gains = np.concatenate([near, moved]), np.concatenate([gains, value(moved)])
            order = np.argsort(-gains, kind="stable")
            found = self._best_untried(near, gains)
            if found is not None and (best is None or found[2] > best[2]):
                best = found
            near, gains = near[order[:_REFINED]], gains[order[:_REFINED]]
        return best

    def _best_untried(self, points: Floats, worth: Floats) -> tuple[dict[str, Any], Floats, float] | None:
        for index in np.argsort(-worth, kind="stable"):
            params = self._encoding.params(points[index])
            if self._is_untried(params):
                return params, points[index], float(worth[index])
        return None

    def _moved(self, points: Floats, scale: float | Floats) -> Floats:
        """The points with about half of their coordinates moved; a parameter that did not apply gets a value."""
        shape, rng = points.shape, self._rng
        filled = np.where(np.isnan(points), rng.random(shape), points)
        mask = rng.random(shape) < 0.5
        varying = np.nonzero(self._kept)[0]
        if len(varying):
            mask[np.arange(len(points)), rng.choice(varying, size=len(points))] = True
        near = filled + mask * scale * rng.normal(size=shape)
        near = np.clip(np.where(near < 0, -near, np.where(near > 1, 2 - near, near)), 0.0, 1.0)
        swap = mask & (rng.random(shape) < _SWAP)
        return np.where(self._unordered, np.where(swap, rng.random(shape), filled), near)

    def nearest(self, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """The nearest allowed, untried point that random moves find, small moves first; None without one."""
        here = self._encoding.point(params)[None]
        features = self._encoding.features(here)
        for scale in _AWAY:
            moved = self._encoding.snap(self._moved(np.repeat(here, _AROUND, axis=0), scale))
            moved = moved[self._encoding.allowed(moved)]
            far = np.linalg.norm(self._encoding.features(moved) - features, axis=1)
            if (found := self._best_untried(moved, -far)) is not None:
                return found[0]
        return None


def nearest_valid(encoding: Encoding, params: Mapping[str, Any], seed: int) -> dict[str, Any] | None:
    """The point nearest to this one that satisfies the space's conditions; None where none is found near it."""
    return Proposals(encoding, set(), np.random.default_rng(seed)).nearest(params)


def even_point(index: int, count: int, seed: int) -> Floats:
    """A point of a scrambled Halton sequence, which fills the unit cube of ``count`` dimensions evenly.

    Each digit of each dimension has its own random permutation (Owen, A randomized Halton algorithm in R, 2017).
    """
    rng = np.random.default_rng(seed)
    units = np.empty(count)
    for dimension, base in enumerate(_primes(count)):
        left, weight, unit = index, 1.0 / base, 0.0
        while weight > _DIGITS:
            unit += weight * float(rng.permutation(base)[left % base])
            left, weight = left // base, weight / base
        units[dimension] = unit
    return units


def _primes(count: int) -> list[int]:
    found: list[int] = []
    number = 2
    while len(found) < count:
        if all(number % prime for prime in found):
            found.append(number)
        number += 1
    return found
