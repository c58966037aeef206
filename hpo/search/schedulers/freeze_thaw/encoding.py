"""A search space as a unit cube and as the columns of the curve model; conditions, steps and choices included.

A point is a row of unit coordinates, one for each parameter, NaN where a parameter does not apply. `Encoding.snap`
brings coordinates to values that exist; `Encoding.features` gives the model's columns, where a parameter that does
not apply stands in the middle, so that two points without it differ in nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from hpo.config.conditions import Condition
from hpo.config.paths import same

Floats = NDArray[np.float64]
Conditions = Mapping[str, Mapping[str, Sequence[Any]]]

#: Points of a finite space that are listed, to find those not tried yet.
_MOST_LISTED: Final = 10_000
#: In place of a value, where a parameter does not apply.
_MISSING: Final = object()


class Axis(Protocol):
    """One parameter: its values along a unit interval."""

    @property
    def count(self) -> int | None:
        """How many values there are; None: a real range."""

    @property
    def ordered(self) -> bool:
        """Whether neighbours on the interval are alike."""

    def snap(self, units: Floats) -> Floats:
        """The coordinates of the values that these coordinates stand for."""

    def value(self, unit: float) -> Any:
        """The value at a coordinate."""

    def units(self, values: Sequence[Any]) -> Floats:
        """The coordinates of values; one outside the range is brought to its end, an unknown choice is NaN."""

    def features(self, units: Floats) -> Floats:
        """Columns [points, columns] of snapped coordinates without NaN."""


@dataclass(frozen=True)
class RealAxis:
    """A real range without steps."""

    low: float
    high: float
    log: bool

    @property
    def count(self) -> int | None:
        """None, or one where both ends are the same."""
        return 1 if self.low == self.high else None

    @property
    def ordered(self) -> bool:
        """True."""
        return True

    def snap(self, units: Floats) -> Floats:
        """Inside the interval; in its middle where both ends are the same."""
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
    """Numbers in steps, each as likely as another where the range is not logarithmic."""

    low: float
    high: float
    step: float
    log: bool
    whole: bool

    @cached_property
    def count(self) -> int | None:
        """Numbers in the range."""
        return round((self.high - self.low) / self.step) + 1

    @property
    def ordered(self) -> bool:
        """True."""
        return True

    def snap(self, units: Floats) -> Floats:
        """The middle of the part of the interval that its number has."""
        if not self.log:
            count = float(self.count or 1)
            return (np.minimum(np.floor(np.clip(units, 0.0, 1.0) * count), count - 1) + 0.5) / count
        numbers = np.clip(np.round(np.exp(self._lerp(np.clip(units, 0.0, 1.0)))), self.low, self.high)
        return (np.log(numbers) - self._wide[0]) / (self._wide[1] - self._wide[0])

    def value(self, unit: float) -> float:
        """See `Axis`."""
        if self.log:
            number = min(max(round(math.exp(float(self._lerp(np.array(unit))))), self.low), self.high)
            return int(number)
        count = self.count or 1
        index = min(int(min(max(unit, 0.0), 1.0) * count), count - 1)
        number = min(self.low + index * self.step, self.high)
        return round(number) if self.whole else number

    def units(self, values: Sequence[Any]) -> Floats:
        """See `Axis`."""
        clipped = np.clip(np.array(values, dtype=np.float64), self.low, self.high)
        if self.log:
            return (np.log(clipped) - self._wide[0]) / (self._wide[1] - self._wide[0])
        return (np.round((clipped - self.low) / self.step) + 0.5) / (self.count or 1)

    def features(self, units: Floats) -> Floats:
        """The number between both ends, 0 to 1 (its logarithm where the range is logarithmic)."""
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
    """Plain values or lists: in their order where all are numbers, else none is nearer than another."""

    choices: tuple[Any, ...]

    @property
    def count(self) -> int | None:
        """The choices."""
        return len(self.choices)

    @cached_property
    def ordered(self) -> bool:
        """Whether all choices are numbers."""
        return all(isinstance(each, int | float) and not isinstance(each, bool) for each in self.choices)

    def snap(self, units: Floats) -> Floats:
        """The middle of the part of the interval that its choice has."""
        count = len(self.choices)
        return (np.minimum(np.floor(np.clip(units, 0.0, 1.0) * count), count - 1) + 0.5) / count

    def value(self, unit: float) -> Any:
        """See `Axis`."""
        count = len(self.choices)
        return self._along[min(int(min(max(unit, 0.0), 1.0) * count), count - 1)]

    def units(self, values: Sequence[Any]) -> Floats:
        """See `Axis`."""
        return np.array([self._unit(value) for value in values])

    def _unit(self, value: Any) -> float:
        for index, choice in enumerate(self._along):
            if same(choice, value) or (isinstance(value, list) and choice == tuple(value)):
                return (index + 0.5) / len(self.choices)
        return math.nan

    def features(self, units: Floats) -> Floats:
        """The rank between 0 and 1, or a column for each choice: two choices are as far apart as two ends."""
        count = len(self.choices)
        indices = np.minimum((units * count).astype(np.int64), count - 1)
        if self.ordered:
            return (indices / (count - 1.0))[:, None]
        columns: Floats = np.eye(count)[indices] / math.sqrt(2)
        return columns

    @cached_property
    def _along(self) -> tuple[Any, ...]:
        return tuple(sorted(self.choices)) if self.ordered else self.choices


def counted(distribution: BaseDistribution | None, value: Any) -> Any:
    """A real number of a range with steps as how many steps it is above the low end; any other value as it is.

    What is written as 0.3 and what is computed as 0.1 + 2 · 0.1 are one value of such a range, and not equal.
    """
    if not isinstance(distribution, FloatDistribution) or distribution.step is None:
        return value
    return round((value - distribution.low) / distribution.step)


def axis_of(distribution: BaseDistribution) -> Axis:
    """The axis of one of Optuna's distributions."""
    if isinstance(distribution, CategoricalDistribution):
        return ChoiceAxis(tuple(distribution.choices))
    if isinstance(distribution, IntDistribution):
        return StepAxis(distribution.low, distribution.high, distribution.step, distribution.log, whole=True)
    if isinstance(distribution, FloatDistribution):
        if distribution.step is not None:
            return StepAxis(distribution.low, distribution.high, distribution.step, log=False, whole=False)
        return RealAxis(distribution.low, distribution.high, distribution.log)
    raise TypeError(f"a parameter's distribution is of the kind {type(distribution).__name__}")


class Encoding:
    """Points of a space as parameters, as unit coordinates, and as columns of the model.

    Args:
        space: Distributions by parameter.
        conditions: By parameter, the values of others under which it exists; a condition on what is not in the
            space counts as met.
        where: What each point satisfies.

    Attributes:
        names: The parameters, each after those that its conditions name.
        groups: For each column of the features, the index of its length scale: one a parameter.
        lengths: How many lengths there are.
    """

    def __init__(
        self, space: Mapping[str, BaseDistribution], conditions: Conditions, where: Sequence[Condition] = ()
    ) -> None:
        self._where = where
        self._conditions = {
            name: {other: tuple(values) for other, values in conditions.get(name, {}).items() if other in space}
            for name in space
        }
        self.names = _ordered(self._conditions)
        self.axes = [axis_of(space[name]) for name in self.names]
        asked = set[str]().union(*(condition.names for condition in where))
        self._asked = [index for index, name in enumerate(self.names) if name in asked]
        self._space = {name: space[name] for name in self.names}
        self._middles: list[Floats] = []
        groups: list[int] = []
        varying = 0
        for axis in self.axes:
            columns = 0 if axis.count == 1 else axis.features(axis.snap(np.array([0.5]))).shape[1]
            value = 0.5 if axis.ordered else math.sqrt(0.5) / max(columns, 1)
            self._middles.append(np.full(columns, value))
            groups += [varying] * columns
            varying += columns > 0
        self.groups = np.array(groups, dtype=np.int64)
        self.lengths = varying

    def __len__(self) -> int:
        return len(self.names)

    def snap(self, units: Floats) -> Floats:
        """Coordinates [points, parameters] of existing values; NaN where a parameter does not apply."""
        snapped = np.empty_like(units)
        for index, (name, axis) in enumerate(zip(self.names, self.axes, strict=True)):
            snapped[:, index] = axis.snap(units[:, index])
            for other, values in self._conditions[name].items():
                place = self.names.index(other)
                snapped[~self._holds(place, values, snapped[:, place]), index] = math.nan
        return snapped

    def features(self, points: Floats) -> Floats:
        """The model's columns of snapped points [points, parameters]."""
        parts = [np.empty((len(points), 0))]
        for index, (axis, middle) in enumerate(zip(self.axes, self._middles, strict=True)):
            if not len(middle):
                continue
            applies = ~np.isnan(points[:, index])
            part = np.tile(middle, (len(points), 1))
            part[applies] = axis.features(points[applies, index])
            parts.append(part)
        return np.concatenate(parts, axis=1)

    def params(self, point: Floats) -> dict[str, Any]:
        """The parameters of a snapped point; those that do not apply are missing."""
        named = zip(self.names, self.axes, point, strict=True)
        return {name: axis.value(float(unit)) for name, axis, unit in named if not math.isnan(unit)}

    def allows(self, params: Mapping[str, Any]) -> bool:
        """Whether parameters satisfy what each point does."""
        return all(condition.holds(params) for condition in self._where)

    def allowed(self, points: Floats) -> NDArray[np.bool_]:
        """Which of these snapped points do."""
        if not self._where:
            return np.ones(len(points), dtype=np.bool_)
        return np.array([self.allows(self._named(point)) for point in points], dtype=np.bool_)

    def _named(self, point: Floats) -> dict[str, Any]:
        """Those of a snapped point's parameters that `where` is about: to compute them takes most of its time."""
        return {
            self.names[index]: self.axes[index].value(float(point[index]))
            for index in self._asked
            if not math.isnan(point[index])
        }

    def point(self, params: Mapping[str, Any]) -> Floats:
        """Coordinates of parameters; NaN where one is missing or none of the choices."""
        return np.asarray(self.points([params])[0])

    def points(self, several: Sequence[Mapping[str, Any]]) -> Floats:
        """The same of several [points, parameters]."""
        found = np.full((len(several), len(self.names)), math.nan)
        for index, (name, axis) in enumerate(zip(self.names, self.axes, strict=True)):
            where = [row for row, params in enumerate(several) if name in params]
            if where:
                found[where, index] = axis.units([several[row][name] for row in where])
        return found

    def key(self, params: Mapping[str, Any]) -> Hashable:
        """The same for the same values of the space's parameters; no parameter has both true and 1."""
        values = [
            counted(each, params[name]) if name in params else _MISSING for name, each in self._space.items()
        ]
        return tuple([tuple(value) if type(value) is list else value for value in values])

    def every_point(self) -> Iterator[Floats]:
        """Each point that satisfies them once, where the space is finite and not too large to list; else none."""
        counts = [axis.count for axis in self.axes]
        if None in counts or math.prod(count or 1 for count in counts) > _MOST_LISTED:
            return
        cells = [(np.arange(count or 1) + 0.5) / (count or 1) for count in counts]
        # A number of a logarithmic range has a part of the interval of its own width.
        values = [
            axis.units(range(int(axis.low), int(axis.high) + 1))
            if isinstance(axis, StepAxis) and axis.log
            else cell
            for axis, cell in zip(self.axes, cells, strict=True)
        ]
        seen = set()
        for point in self.snap(np.array(list(itertools.product(*values))).reshape(-1, len(self.names))):
            key = point.tobytes()
            if key not in seen:
                seen.add(key)
                if self.allows(self._named(point)):
                    yield point

    def _holds(self, place: int, values: Sequence[Any], column: Floats) -> NDArray[np.bool_]:
        axis = self.axes[place]
        distinct, where = np.unique(column, return_inverse=True)
        met = [
            not math.isnan(unit) and any(same(axis.value(float(unit)), value) for value in values)
            for unit in distinct
        ]
        return np.array(met, dtype=np.bool_)[where]


def _ordered(conditions: Mapping[str, Mapping[str, Any]]) -> list[str]:
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for other in conditions[name]:
                visit(other)
            order.append(name)

    for name in conditions:
        visit(name)
    return order
