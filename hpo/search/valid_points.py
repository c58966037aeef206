"""Draws points that satisfy a study's `where` evenly, and estimates which share of all points does."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from optuna.distributions import BaseDistribution

from hpo.config.paths import show
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.errors import StudyError
from hpo.search.axes import Axis, axis_of

#: Points drawn to estimate the share that satisfies `where`; then further ones at most, to find a single valid
#: point in a check, and in a draw.
SAMPLE: Final = 2_000
_LOOKED: Final = 20_000
_DRAWS: Final = 100_000
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


class ValidPoints:
    """Draws the points of a space that satisfy its conditions, each with the same probability.

    Args:
        space: The space.
        rng: The source of randomness.
    """

    def __init__(self, space: SearchSpace, rng: random.Random) -> None:
        self._space, self._rng = space, rng
        self._axes: dict[str, Axis] = {path: axis_of(each) for path, each in space.distributions.items()}

    def any(self, given: Mapping[str, Any] = _NONE) -> dict[str, Any]:
        """An evenly drawn point that satisfies the conditions and has the given values.

        Where a choice decides which parameters a point has, the choices are equally likely, not the points.

        Args:
            given: Values of some parameters; those that the point does not have are ignored.

        Raises:
            StudyError: No such point is found in 100,000 draws.
        """
        found = self.found(given, _DRAWS)
        if found is None:
            fixed = ", ".join(f"{path}={show(value)}" for path, value in given.items())
            beside = f" with {fixed}" if fixed else ""
            raise StudyError(
                f"none of {_DRAWS:,} points{beside} satisfies `where`\n"
                "  fix: loosen a condition or widen the search space, under a new name for the study"
            )
        return found

    def found(self, given: Mapping[str, Any], draws: int = SAMPLE) -> dict[str, Any] | None:
        """The same, or None where ``draws`` draws find none."""
        for _ in range(draws):
            point = self.drawn(given)
            if self._space.violated(point) is None:
                return point
        return None

    def drawn(self, given: Mapping[str, Any] = _NONE) -> dict[str, Any]:
        """One point, whether or not it satisfies the conditions."""

        def value(path: str, _: BaseDistribution) -> Any:
            return given[path] if path in given else self._axes[path].value(self._rng.random())

        return self._space.draw(value)

    def share(self) -> float:
        """The share of evenly drawn points that satisfy the conditions."""
        held = sum(self._space.violated(self.drawn()) is None for _ in range(SAMPLE))
        return held / SAMPLE


def check_where(spec: StudySpec, space: SearchSpace) -> float:
    """Refuse conditions that can't be computed, or that hardly any point satisfies.

    Returns:
        The share of evenly drawn points that satisfy the conditions; 1 where there are no conditions.

    Raises:
        InputError: A condition can't be computed, or no drawn point satisfies them all.
    """
    if not space.where:
        return 1.0
    points = ValidPoints(space, random.Random(spec.study.sampler.seed))
    for _ in range(SAMPLE):
        _check_computed(spec, space, points.drawn())
    share = points.share()
    if share == 0 and points.found(_NONE, _LOOKED) is None:
        raise spec.error(
            f"none of {SAMPLE + _LOOKED:,} points of the search space satisfies this",
            path="where" if spec.config.where else space.where[0].place,
            value="; ".join(condition.text for condition in space.where),
            fix="loosen a condition, or change the ranges so that it holds more often: two real numbers are never "
            "equal, so compare them with `<=`, or give them a `step`",
        )
    return share


def _check_computed(spec: StudySpec, space: SearchSpace, point: Mapping[str, Any]) -> None:
    for condition in space.where:
        try:
            condition.computed(point)
        except ArithmeticError:  # such a point does not satisfy it
            continue
        except TypeError as error:
            values = ", ".join(f"{name} = {show(point[name])}" for name in sorted(condition.names))
            raise spec.error(
                f"can't be computed where {values}: {error}",
                path=condition.place,
                value=condition.text,
                fix="compare like with like: `model.a == null or …` leaves out a choice that is no number",
            ) from error
