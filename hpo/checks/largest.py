"""Finds the largest config that a trial may draw, which decides whether a study fits into a device's memory, and
the smallest."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from hpo.config.paths import lookup, split_path
from hpo.config.schema_space import CategoricalParam, FloatParam, ParamSpec
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.search.valid_points import ValidPoints

#: Sections that decide about the size of a run.
_SIZES: Final = ("data", "loader", "model", "loss", "step")
#: With `where`, how many points are drawn to find the largest one, and how many draws each may take.
_POINTS: Final = 500
_TRIES: Final = 1_000


def largest_params(spec: StudySpec, space: SearchSpace) -> dict[str, Any]:
    """The high end of each searched number that makes a run larger."""
    return _extreme(spec, space, max)


def smallest_params(spec: StudySpec, space: SearchSpace) -> dict[str, Any]:
    """The low end of each searched number that makes a run larger."""
    return _extreme(spec, space, min)


def _extreme(spec: StudySpec, space: SearchSpace, best: Callable[..., Any]) -> dict[str, Any]:
    config = spec.base_config()
    chosen: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    for path, entry in space.params.items():
        if path not in space.active(chosen):
            continue
        keys = split_path(path)
        chosen[path] = space.as_stored(path, lookup(config, keys))
        most = _end(entry, best)
        if most is not None and keys[0] in _SIZES and keys[-1] != "seed":
            chosen[path] = sizes[path] = most
    return sizes if space.violated(chosen) is None else _allowed(space, list(sizes), best)


def _allowed(space: SearchSpace, sizes: Sequence[str], best: Callable[..., Any]) -> dict[str, Any]:
    """These parameters of the drawn point that satisfies `where` and has their largest or smallest product."""
    points = ValidPoints(space, random.Random(0))
    drawn = (points.found({}, _TRIES) for _ in range(_POINTS))
    found = [{path: point[path] for path in sizes if path in point} for point in drawn if point is not None]
    return best(found, key=lambda sizes: math.prod(map(float, sizes.values())), default={})  # type: ignore[no-any-return]


def _end(entry: ParamSpec, best: Callable[..., Any]) -> float | None:
    """The largest or smallest number of an entry; None if its choices are not all numbers."""
    if not isinstance(entry, CategoricalParam):
        end = best(entry.low, entry.high)
        return float(end) if isinstance(entry, FloatParam) else int(end)
    numeric = all(isinstance(item, int | float) and not isinstance(item, bool) for item in entry.choices)
    return best(entry.choices) if numeric else None
