"""Maps each parameter of a search space to an axis of the unit cube, for each kind of Optuna's distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from hpo.config.paths import same

Floats = NDArray[np.float64]


class Axis(Protocol):
    """One parameter, with its values laid out along the unit interval; a place there is a *coordinate*."""

    @property
    def count(self) -> int | None:
        """Number of values; None for a real range."""

    @property
    def ordered(self) -> bool:
        """Whether values that are close on the interval are similar."""

    def snap(self, units: Floats) -> Floats:
        """Move each coordinate to the exact coordinate of the value that it stands for."""

    def value(self, unit: float) -> Any:
        """The value at a coordinate."""

    def units(self, values: Sequence[Any]) -> Floats:
        """The coordinates of values; a number outside the range is clipped to it, an unknown choice is NaN."""

    def features(self, units: Floats) -> Floats:
        """The model's input columns [points, columns] for snapped coordinates, none of them NaN."""


@dataclass(frozen=True)
class RealAxis:
    """A real range without steps."""

    low: float
    high: float
    log: bool

    @property
    def count(self) -> int | None:
        """None, or 1 where both ends of the range are equal."""
        return 1 if self.low == self.high else None

    @property
    def ordered(self) -> bool:
        """True."""
        return True

    def snap(self, units: Floats) -> Floats:
        """Clip to the interval; 0.5 where both ends of the range are equal."""
        return np.full_like(units, 0.5) if self.low == self.high else np.clip(units, 0.0, 1.0)

    def value(self, unit: float) -> float:
        """See `Axis`."""
        low, high = self._ends
        place = low + min(max(unit, 0.0), 1.0) * (high - low)
        return min(max(math.exp(place) if self.log else place, self.low), self.high)

    def units(self, values: Sequence[Any]) -> Floats:
        """See `Axis`."""
        low, high = self._ends
        if high == low:
            return np.full(len(values), 0.5)
        clipped = np.clip(np.array(values, dtype=np.float64), self.low, self.high)
        return ((np.log(clipped) if self.log else clipped) - low) / (high - low)

    def features(self, units: Floats) -> Floats:
        """The coordinate."""
        return units[:, None]

    @property
    def _ends(self) -> tuple[float, float]:
        return (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)


@dataclass(frozen=True)
class StepAxis:
    """A range of numbers with a step; unless it is logarithmic, each number has an equal part of the interval."""

    low: float
    high: float
    step: float
    log: bool
    whole: bool

    @cached_property
    def count(self) -> int:
        """How many numbers the range has."""
        return round((self.high - self.low) / self.step) + 1

    @property
    def ordered(self) -> bool:
        """True."""
        return True

    def snap(self, units: Floats) -> Floats:
        """The coordinate of the number; on a linear scale the middle of the number's part of the interval."""
        if not self.log:
            return _middles(units, self.count)
        numbers = np.clip(np.round(np.exp(self._lerp(np.clip(units, 0.0, 1.0)))), self.low, self.high)
        return (np.log(numbers) - self._wide[0]) / (self._wide[1] - self._wide[0])

    def value(self, unit: float) -> float:
        """See `Axis`."""
        if self.log:
            number = min(max(round(math.exp(float(self._lerp(np.array(unit))))), self.low), self.high)
            return int(number)
        number = min(self.low + _part(unit, self.count) * self.step, self.high)
        return round(number) if self.whole else number

    def units(self, values: Sequence[Any]) -> Floats:
        """See `Axis`."""
        clipped = np.clip(np.array(values, dtype=np.float64), self.low, self.high)
        if self.log:
            return (np.log(clipped) - self._wide[0]) / (self._wide[1] - self._wide[0])
        return (np.round((clipped - self.low) / self.step) + 0.5) / self.count

    def features(self, units: Floats) -> Floats:
        """The number scaled so that the range is 0 to 1 (its logarithm where the range is logarithmic)."""
        low, high = self.units([self.low, self.high])
        return np.asarray((units - low) / (high - low))[:, None]

    @property
    def _wide(self) -> tuple[float, float]:
        return math.log(self.low - 0.5), math.log(self.high + 0.5)

    def _lerp(self, units: Floats) -> Floats:
        low, high = self._wide
        return low + units * (high - low)


@dataclass(frozen=True)
class ChoiceAxis:
    """Choices: sorted where all are numbers, else unordered, so that all are equally far apart."""

    choices: tuple[Any, ...]

    @property
    def count(self) -> int:
        """The number of choices."""
        return len(self.choices)

    @cached_property
    def ordered(self) -> bool:
        """Whether all choices are numbers."""
        return all(isinstance(each, int | float) and not isinstance(each, bool) for each in self.choices)

    def snap(self, units: Floats) -> Floats:
        """The middle of the choice's part of the interval."""
        return _middles(units, self.count)

    def value(self, unit: float) -> Any:
        """See `Axis`."""
        return self._along[_part(unit, self.count)]

    def units(self, values: Sequence[Any]) -> Floats:
        """See `Axis`."""
        return np.array([self._unit(value) for value in values])

    def _unit(self, value: Any) -> float:
        for index, choice in enumerate(self._along):
            if same(choice, value):
                return (index + 0.5) / self.count
        return math.nan

    def features(self, units: Floats) -> Floats:
        """The rank scaled to 0 to 1; for unordered choices one column each, so that any two are at distance 1."""
        indices = np.minimum((units * self.count).astype(np.int64), self.count - 1)
        if self.ordered:
            return (indices / (self.count - 1.0))[:, None]
        columns: Floats = np.eye(self.count)[indices] / math.sqrt(2)
        return columns

    @cached_property
    def _along(self) -> tuple[Any, ...]:
        return tuple(sorted(self.choices)) if self.ordered else self.choices


def _part(unit: float, count: int) -> int:
    """The index of the part that holds a coordinate, where the interval has ``count`` equal parts."""
    return min(int(min(max(unit, 0.0), 1.0) * count), count - 1)


def _middles(units: Floats, count: int) -> Floats:
    """For each coordinate, the middle of its part, where the interval has ``count`` equal parts."""
    return (np.minimum(np.floor(np.clip(units, 0.0, 1.0) * count), count - 1) + 0.5) / count


def counted(distribution: BaseDistribution | None, value: Any) -> Any:
    """For a real range with a step, the number of steps above the low end; any other value unchanged.

    0.3 and 0.1 + 2 · 0.1 are the same value of such a range, but are not equal as floating-point numbers.
    """
    if not isinstance(distribution, FloatDistribution) or distribution.step is None:
        return value
    return round((value - distribution.low) / distribution.step)


def most_points(space: Mapping[str, BaseDistribution]) -> float:
    """Upper bound of a space's number of points, infinite with a real range; conditions may exclude some."""
    return math.prod(axis_of(each).count or math.inf for each in space.values())


def axis_of(distribution: BaseDistribution) -> Axis:
    """The axis for one of Optuna's distributions."""
    if isinstance(distribution, CategoricalDistribution):
        return ChoiceAxis(tuple(distribution.choices))
    if isinstance(distribution, IntDistribution):
        return StepAxis(distribution.low, distribution.high, distribution.step, distribution.log, whole=True)
    if isinstance(distribution, FloatDistribution):
        if distribution.step is not None:
            return StepAxis(distribution.low, distribution.high, distribution.step, log=False, whole=False)
        return RealAxis(distribution.low, distribution.high, distribution.log)
    raise TypeError(f"a parameter's distribution is of the kind {type(distribution).__name__}")
