"""Encodes the points of a search space as coordinates of the unit cube, and as input columns of the curve model.

A point is a row of unit coordinates, one for each parameter, NaN where a parameter does not apply. `Encoding.snap`
moves coordinates to values that exist. `Encoding.features` gives the model's columns: there a parameter that does
not apply is equally far from each of its values, and two points without the parameter do not differ in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution

from hpo.config.conditions import Condition
from hpo.config.paths import same
from hpo.search.axes import Axis, Floats, StepAxis, axis_of, counted, most_points

Conditions = Mapping[str, Mapping[str, Sequence[Any]]]

#: A finite space of at most this many points is listed, to find untried ones.
_MOST_LISTED: Final = 10_000
#: In place of a value, where a parameter does not apply.
_MISSING: Final = object()


class Encoding:
    """Points of a space as parameters, as unit coordinates, and as columns of the model.

    Args:
        space: Distributions by parameter; a parameter comes after those that its conditions name.
        conditions: By parameter, the values of other parameters under which it exists; a condition on a parameter
            that is not in the space counts as met.
        where: Conditions that each point satisfies.

    Attributes:
        names: The parameters.
        groups: For each column of the features, the index of its length scale; there is one for each parameter
            with more than one value.
        lengths: How many length scales there are.
    """

    def __init__(
        self, space: Mapping[str, BaseDistribution], conditions: Conditions, where: Sequence[Condition] = ()
    ) -> None:
        self._where = where
        self._conditions = {
            name: {other: tuple(values) for other, values in conditions.get(name, {}).items() if other in space}
            for name in space
        }
        self.names = list(space)
        self.axes = [axis_of(each) for each in space.values()]
        asked = set[str]().union(*(condition.names for condition in where))
        self._asked = [index for index, name in enumerate(self.names) if name in asked]
        self._space = space
        self._columns = [
            _columns(axis, conditional=bool(self._conditions[name]))
            for name, axis in zip(self.names, self.axes, strict=True)
        ]
        groups: list[int] = []
        varying = 0
        for _, missing in self._columns:
            groups += [varying] * len(missing)
            varying += len(missing) > 0
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
        for index, (columns_of, missing) in enumerate(self._columns):
            applies = ~np.isnan(points[:, index])
            part = np.tile(missing, (len(points), 1))
            part[applies] = columns_of(points[applies, index])
            parts.append(part)
        return np.concatenate(parts, axis=1)

    def params(self, point: Floats) -> dict[str, Any]:
        """The parameters of a snapped point; those that do not apply are missing."""
        named = zip(self.names, self.axes, point, strict=True)
        return {name: axis.value(float(unit)) for name, axis, unit in named if not math.isnan(unit)}

    def allows(self, params: Mapping[str, Any]) -> bool:
        """Whether parameters satisfy ``where``."""
        return all(condition.holds(params) for condition in self._where)

    def allowed(self, points: Floats) -> NDArray[np.bool_]:
        """Which of these snapped points satisfy ``where``."""
        if not self._where:
            return np.ones(len(points), dtype=np.bool_)
        return np.array([self.allows(self._named(point)) for point in points], dtype=np.bool_)

    def _named(self, point: Floats) -> dict[str, Any]:
        """The parameters of a snapped point that ``where`` uses; computing others would take most of the time."""
        return {
            self.names[index]: self.axes[index].value(float(point[index]))
            for index in self._asked
            if not math.isnan(point[index])
        }

    def point(self, params: Mapping[str, Any]) -> Floats:
        """Coordinates of parameters; NaN where a parameter is missing or its value is not a choice."""
        return np.asarray(self.points([params])[0])

    def points(self, several: Sequence[Mapping[str, Any]]) -> Floats:
        """The coordinates of several points [points, parameters]; see `point`."""
        found = np.full((len(several), len(self.names)), math.nan)
        for index, (name, axis) in enumerate(zip(self.names, self.axes, strict=True)):
            where = [row for row, params in enumerate(several) if name in params]
            if where:
                found[where, index] = axis.units([several[row][name] for row in where])
        return found

    def key(self, params: Mapping[str, Any]) -> Hashable:
        """A key that is the same for equal values of the space's parameters (none has both true and 1)."""
        return tuple(
            [counted(each, params[name]) if name in params else _MISSING for name, each in self._space.items()]
        )

    def every_point(self) -> Floats:
        """Each point once, allowed or not, where the space is finite and not too large to list; else empty."""
        if most_points(self._space) > _MOST_LISTED:
            return np.empty((0, len(self.names)))
        counts = [axis.count or 1 for axis in self.axes]
        cells = [(np.arange(count) + 0.5) / count for count in counts]
        # The numbers of a logarithmic range have parts of different widths, so cells don't match them.
        values = [
            axis.units(range(int(axis.low), int(axis.high) + 1))
            if isinstance(axis, StepAxis) and axis.log
            else cell
            for axis, cell in zip(self.axes, cells, strict=True)
        ]
        points = self.snap(np.array(list(itertools.product(*values))).reshape(-1, len(self.names)))
        return np.array(list({point.tobytes(): point for point in points}.values()))

    def _holds(self, place: int, values: Sequence[Any], column: Floats) -> NDArray[np.bool_]:
        axis = self.axes[place]
        distinct, where = np.unique(column, return_inverse=True)
        met = [
            not math.isnan(unit) and any(same(axis.value(float(unit)), value) for value in values)
            for unit in distinct
        ]
        return np.array(met, dtype=np.bool_)[where]


def _columns(axis: Axis, *, conditional: bool) -> tuple[Callable[[Floats], Floats], Floats]:
    """A function that computes the model's columns of a parameter, and the columns where it does not apply.

    The numbers of a conditional parameter lie on a half circle around the point where it does not apply, after
    Swersky et al., Raiders of the Lost Architecture: Kernels for Bayesian Optimization in Conditional Parameter
    Spaces (2013). If that point were in the middle of a line, losses seen without the parameter would count as
    evidence for the values near the middle.
    """
    if axis.count == 1:
        return (lambda units: np.empty((len(units), 0))), np.empty(0)
    if not axis.ordered:
        count = axis.count or 1
        return axis.features, np.full(count, math.sqrt(0.5) / count)
    if conditional:
        return (lambda units: _half_circle(axis.features(units))), np.zeros(2)
    return axis.features, np.full(1, 0.5)


def _half_circle(column: Floats) -> Floats:
    """Maps a column from 0 to 1 to a half circle from (½, 0) to (-½, 0), so that its ends stay at distance 1."""
    return np.concatenate([np.cos(np.pi * column), np.sin(np.pi * column)], axis=1) / 2
