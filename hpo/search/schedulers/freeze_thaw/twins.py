"""Finds trials with exactly equal losses: the parameters in which they differ have no effect, so one is enough."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from hpo.search.schedulers.seen import Curve

#: Number of first losses that twins must share, no two of them equal: a constant start shows nothing.
_SAME: Final = 3


def twins(curves: Sequence[Curve]) -> set[int]:
    """The numbers of the trials that a twin represents.

    Twins have had exactly the same losses, as far as both have come. The twin that has come furthest represents
    the others, unless it was stopped early or failed.
    """
    alike: dict[tuple[float, ...], list[Curve]] = {}
    for curve in curves:
        start = tuple(curve.losses[:_SAME])
        if len(set(start)) == _SAME and math.isfinite(sum(start)):
            alike.setdefault(start, []).append(curve)
    return {number for group in alike.values() if len(group) > 1 for number in _stood_for(group)}


def _stood_for(curves: Sequence[Curve]) -> Iterator[int]:
    others: list[Curve] = []
    for curve in sorted(curves, key=lambda each: (-each.done, each.number)):
        if any(_begins(other, curve) for other in others):
            yield curve.number
        elif curve.seen.state != "ended" or curve.seen.whole or not math.isfinite(curve.last):
            others.append(curve)


def _begins(whole: Curve, part: Curve) -> bool:
    count = len(part.steps)
    return whole.steps[:count] == part.steps and whole.losses[:count] == part.losses
