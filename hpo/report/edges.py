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

#: The outermost part of a range of real numbers that counts as its end.
_OUTERMOST: Final = 0.05
#: How likely it may be that as many values lie there if they lay anywhere.
_CHANCE: Final = 0.05
_FEWEST: Final = 2


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

    An end of a range of real numbers is its outermost 5 %, counted in its logarithm where it is searched so; of
    whole numbers, steps and ordered choices it is the last value. It lists ends where so many values would
    lie in at most 5 % of the cases if they lay anywhere: with a range of two values that takes all of five.
    """
    names = dict.fromkeys(name for trial in best for name in trial.params)
    return [found for name in names for found in _edges_of(name, [t for t in best if name in t.params])]


def _edges_of(name: str, best: Sequence[FrozenTrial]) -> Iterator[Edge]:
    for end in ("lower", "upper"):
        there, share, limit = [], 0.0, 0.0
        for trial in best:
            found = _place(trial.distributions[name], trial.params[name])
            if found is None:
                continue
            position, share, ends = found
            near = position <= share if end == "lower" else position >= 1 - share
            if near:
                there.append(trial.number)
                limit = ends[end == "upper"]
        if len(there) >= _FEWEST and _tail(len(there), len(best), share) <= _CHANCE:
            categorical = isinstance(best[0].distributions[name], CategoricalDistribution)
            yield Edge(name, end, limit, there, len(best), categorical)


def _place(distribution: BaseDistribution, value: Any) -> tuple[float, float, tuple[float, float]] | None:
    """Where a value lies from 0 to 1, what share of the range is an end, and the ends; None without an order."""
    if distribution.single():
        return None
    if isinstance(distribution, CategoricalDistribution):
        if not all(type(choice) in (int, float) for choice in distribution.choices):
            return None
        order: list[Any] = sorted(distribution.choices)
        return _at(order.index(value), len(order)), 1 / len(order), (order[0], order[-1])
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high = float(distribution.low), float(distribution.high)
    if distribution.step is not None:  # a whole number always has one
        count = round((high - low) / distribution.step) + 1
        if count * _OUTERMOST < 1:  # steps so wide that an end is one value
            return _at(round((value - low) / distribution.step), count), 1 / count, (low, high)
    log = math.log if distribution.log else float
    return (log(value) - log(low)) / (log(high) - log(low)), _OUTERMOST, (low, high)


def _at(index: int, count: int) -> float:
    """The middle of the index-th of so many equal parts of the range from 0 to 1."""
    return (index + 0.5) / count


def _tail(successes: int, trials: int, share: float) -> float:
    """The probability of at least so many successes (of a binomial distribution)."""
    return sum(
        math.comb(trials, count) * share**count * (1 - share) ** (trials - count)
        for count in range(successes, trials + 1)
    )
