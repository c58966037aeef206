"""Computes a fork's parameters: its parent's, with some of them moved to a neighbouring value or drawn anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from hpo.config.conditions import Condition
from hpo.search.axes import axis_of

#: What a number is multiplied by (Jaderberg et al., Population Based Training of Neural Networks, 2017).
_UP: Final = 1.2
_DOWN: Final = 0.8
#: A number on a linear scale moves by at least this part of its range: a fifth of a value near 0 is no move.
_LEAST: Final = 0.05
_TRIES: Final = 100


def perturbed(
    params: Mapping[str, Any],
    space: Mapping[str, BaseDistribution],
    paths: Sequence[str],
    rng: np.random.Generator,
    *,
    resample: float,
    where: Sequence[Condition] = (),
) -> dict[str, Any]:
    """The parent's parameters, in which those of ``paths`` have other values of the space.

    If the result violates a condition, the parameters are moved again, up to 100 times; then they stay unchanged.

    Args:
        params: The parent's parameters.
        space: The distribution of each parameter.
        paths: The parameters that may change; all others stay.
        rng: The source of randomness.
        resample: Probability that a parameter is drawn anew, instead of moved to a neighbouring value.
        where: Conditions that each point satisfies.
    """
    for _ in range(_TRIES):
        new = _moved_once(params, space, paths, rng, resample)
        if all(condition.holds(new) for condition in where):
            return new
    return dict(params)


def _moved_once(
    params: Mapping[str, Any],
    space: Mapping[str, BaseDistribution],
    paths: Sequence[str],
    rng: np.random.Generator,
    resample: float,
) -> dict[str, Any]:
    new = dict(params)
    for path in paths:
        if path in params and not space[path].single():
            again, up = rng.random() < resample, rng.random() < 0.5
            new[path] = _drawn(space[path], rng) if again else moved(space[path], params[path], up=up)
    return new


def moved(distribution: BaseDistribution, value: Any, *, up: bool) -> Any:
    """A neighbouring value, or one in the other direction where there is none in this one.

    A number on a logarithmic scale is multiplied by 1.2 or 0.8. One on a linear scale moves by a fifth of itself,
    but at least by a twentieth of its range. The result is clipped to the range and rounded to the parameter's
    step, at least one step away. A choice becomes the one before or after it: by size among numbers, else in the
    order of the list.
    """
    if isinstance(distribution, CategoricalDistribution):
        return _next_choice(distribution, value, up=up)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    found = _along(distribution, value, up=up)
    return _along(distribution, value, up=not up) if found == value else found


def _along(distribution: FloatDistribution | IntDistribution, value: float, *, up: bool) -> float:
    low, high, step = distribution.low, distribution.high, distribution.step
    if distribution.log:
        goal = value * (_UP if up else _DOWN)
    else:
        by = max((_UP - 1 if up else 1 - _DOWN) * abs(value), _LEAST * (high - low))
        goal = value + by if up else value - by
    if step is None:
        return float(min(max(goal, low), high))
    last, here = round((high - low) / step), round((value - low) / step)
    there = round((goal - low) / step)
    there = max(there, here + 1) if up else min(there, here - 1)
    at = min(low + min(max(there, 0), last) * step, high)  # 6 · 0.1 is more than 0.6
    return int(at) if isinstance(distribution, IntDistribution) else float(at)


def _next_choice(distribution: CategoricalDistribution, value: Any, *, up: bool) -> Any:
    axis, count = axis_of(distribution), len(distribution.choices)
    at, by = int(float(axis.units([value])[0]) * count), 1 if up else -1
    after = at + by if 0 <= at + by < count else at - by
    return axis.value((after + 0.5) / count)


def _drawn(distribution: BaseDistribution, rng: np.random.Generator) -> Any:
    axis = axis_of(distribution)
    return axis.value(float(axis.snap(rng.random(1))[0]))
