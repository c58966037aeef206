"""Edges: parameters whose best values lie at an end of their range, so that better ones may lie outside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial
from scipy.special import bdtrc

#: The outermost part of a range of real numbers that counts as its end.
_OUTERMOST: Final = 0.05
#: How likely it may be that as many values lie there if they lay anywhere.
_CHANCE: Final = 0.05
_FEWEST: Final = 2
#: By which a value that was counted in steps may miss the last one.
_ROUNDING: Final = 1e-9


@dataclass(frozen=True)
class Edge:
    """A parameter whose best values lie at an end of its range.

    Attributes:
        parameter: Its dotted path.
        end: ``"lower"`` or ``"upper"``.
        limit: The value at that end.
        trials: The trials whose value lies there.
        of: How many of the best trials have the parameter.
        categorical: Whether it has choices in place of a range.
    """

    parameter: str
    end: str
    limit: float
    trials: Sequence[int]
    of: int
    categorical: bool

    @property
    def said(self) -> str:
        """What it is, and what to do."""
        what = "list of choices" if self.categorical else "range"
        found = (
            f"`{self.parameter}` of {len(self.trials)} of the best {self.of} trials lies at the {self.end} end "
            f"of its {what} ({self.limit:.6g})"
        )
        key = "choices" if self.categorical else "high" if self.end == "upper" else "low"
        change = "add a" if self.categorical else "raise it to a" if self.end == "upper" else "lower it to a"
        side = "larger" if self.end == "upper" else "smaller"
        return f"{found}: widen it, if a {side} value makes sense ({change} {side} value in `{key}`)"


def edges(best: Sequence[FrozenTrial]) -> list[Edge]:
    """The parameters of these trials that gather at an end of their range.

    An end of a range is its outermost 5 %, counted in its logarithm where it is searched so, or its last value
    where that is drawn more often: of whole numbers, steps and ordered choices. It lists ends where so many values
    would lie in at most 5 % of the cases if they were drawn at random: with a range of two values that takes all
    of five.
    """
    names = dict.fromkeys(name for trial in best for name in trial.params)
    return [found for name in names for found in _edges_of(name, [t for t in best if name in t.params])]


def _edges_of(name: str, best: Sequence[FrozenTrial]) -> Iterator[Edge]:
    for end in ("lower", "upper"):
        there, share, limit = [], 0.0, 0.0
        for trial in best:
            distribution = trial.distributions[name]
            ends = _ends(distribution)
            if ends is None:
                continue
            last = ends[end == "upper"]
            share = max(_OUTERMOST, _reach(distribution, last, end))
            if _reach(distribution, trial.params[name], end) <= share + _ROUNDING:
                there.append(trial.number)
                limit = last
        # The probability of at least so many there, of a binomial distribution.
        if len(there) >= _FEWEST and bdtrc(len(there) - 1, len(best), share) <= _CHANCE:
            categorical = isinstance(best[0].distributions[name], CategoricalDistribution)
            yield Edge(name, end, limit, there, len(best), categorical)


def _ends(distribution: BaseDistribution) -> tuple[float, float] | None:
    """The lowest and the highest value; None where there is but one, or no order."""
    if distribution.single():
        return None
    if isinstance(distribution, CategoricalDistribution):
        if not all(type(choice) in (int, float) for choice in distribution.choices):
            return None
        return min(distribution.choices), max(distribution.choices)  # type: ignore[type-var, return-value]
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return distribution.low, distribution.high


def _reach(distribution: BaseDistribution, value: Any, end: str) -> float:
    """The share of the range between an end and a value, the value included: how likely a draw is to lie there."""
    below, above = _part(distribution, value)
    return above if end == "lower" else 1 - below


def _part(distribution: BaseDistribution, value: Any) -> tuple[float, float]:
    """The part of the range, from 0 to 1, that is drawn as this value: a point among real numbers."""
    if isinstance(distribution, CategoricalDistribution):
        order: list[Any] = sorted(distribution.choices)
        index = order.index(value)
        return index / len(order), (index + 1) / len(order)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    half = (distribution.step or 0) / 2  # a whole number always has a step
    scale = math.log if distribution.log else float
    low, high = scale(distribution.low - half), scale(distribution.high + half)
    below, above = ((scale(edge) - low) / (high - low) for edge in (value - half, value + half))
    return below, above
