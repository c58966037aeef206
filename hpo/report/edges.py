"""Finds parameters whose best values are at an end of their range, so that better ones may be outside it."""

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
#: An edge is reported if random values would be there as often with at most this probability.
_CHANCE: Final = 0.05
_FEWEST: Final = 2
#: The rounding error of a value that was computed in steps.
_ROUNDING: Final = 1e-9


@dataclass(frozen=True)
class Edge:
    """A parameter whose best values are at an end of its range.

    Attributes:
        parameter: Its dotted path.
        end: ``"lower"`` or ``"upper"``.
        limit: The value at that end.
        trials: The numbers of the trials whose value is there.
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
        """A sentence for people, with what to do."""
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
    """The parameters whose values in these trials gather at an end of their range.

    An end of a range is its outermost 5 % (of the logarithm, if it is searched on a log scale), or its last value
    if that is drawn more often, as with whole numbers, steps and ordered choices. An end is listed if random draws
    would have so many values there in at most 5 % of all cases: with two values, that takes all of five trials.
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
        # The probability of at least this many values there, by the binomial distribution.
        if len(there) >= _FEWEST and bdtrc(len(there) - 1, len(best), share) <= _CHANCE:
            categorical = isinstance(best[0].distributions[name], CategoricalDistribution)
            yield Edge(name, end, limit, there, len(best), categorical)


def _ends(distribution: BaseDistribution) -> tuple[float, float] | None:
    """The lowest and the highest value; None if there is only one, or no order."""
    if distribution.single():
        return None
    if isinstance(distribution, CategoricalDistribution):
        if not all(type(choice) in (int, float) for choice in distribution.choices):
            return None
        return min(distribution.choices), max(distribution.choices)  # type: ignore[type-var, return-value]
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return distribution.low, distribution.high


def _reach(distribution: BaseDistribution, value: Any, end: str) -> float:
    """The share of the range from an end up to and including a value: the probability of a draw there."""
    below, above = _part(distribution, value)
    return above if end == "lower" else 1 - below


def _part(distribution: BaseDistribution, value: Any) -> tuple[float, float]:
    """The part of the range, from 0 to 1, that is drawn as this value; a single point for real numbers."""
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
