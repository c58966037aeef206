"""Trials with the same losses: what their parameters differ in has no effect, and one of them is enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from hpo.search.schedulers.curves import Curve

#: Reports that two trials have the same, each another value: a metric that starts constant says nothing yet.
_SAME: Final = 3


def twins(curves: Sequence[Curve]) -> set[int]:
    """The numbers of the trials that another one stands for.

    Both have had exactly the same losses as far as both have come. The one that has come further stands for the
    others, unless it has ended before its time.
    """
    stands: dict[tuple[float, ...], list[Curve]] = {}
    found = set()
    for curve in sorted(curves, key=lambda each: (-each.done, each.number)):
        start = tuple(curve.losses[:_SAME])
        if len(set(start)) < _SAME or not math.isfinite(sum(start)):
            continue
        others = stands.setdefault(start, [])
        if any(_begins(other, curve) for other in others):
            found.add(curve.number)
        elif curve.seen.state != "ended" or curve.seen.whole or not math.isfinite(curve.last):
            others.append(curve)
    return found


def _begins(whole: Curve, part: Curve) -> bool:
    count = len(part.steps)
    return whole.steps[:count] == part.steps and whole.losses[:count] == part.losses
