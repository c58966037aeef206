"""Rungs: the epochs at which trials pause, and who of those that came there is promoted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, Protocol, TypeVar

#: A rung this near the horizon is left out: a trial that has come so far trains to its end.
_NEAR: Final = 0.8


class Climber(Protocol):
    """A trial on its way up the rungs."""

    @property
    def number(self) -> int:
        """Its number."""

    @property
    def done(self) -> int:
        """Epochs that it has finished."""

    @property
    def resumable(self) -> bool:
        """Whether it may be promoted now."""

    def at(self, epoch: int) -> float:
        """Its loss at an epoch."""


C = TypeVar("C", bound=Climber)


def ladder(horizon: int, factor: float, first: int = 1) -> list[int]:
    """Epochs ``first``, ``first · factor`` …, each at least one later, and the horizon at the end.

    A factor of 3 makes 1, 3, 9, 27, 50 of 50; the last rung below the horizon is left out where it is near it.
    """
    rungs = [min(first, horizon)]
    while rungs[-1] < horizon:
        rungs.append(min(max(rungs[-1] + 1, math.ceil(rungs[-1] * factor)), horizon))
    if len(rungs) > 1 and rungs[-2] > _NEAR * horizon:
        del rungs[-2]
    return rungs


def promotion(
    climbers: Sequence[C], rungs: Sequence[int], factor: int, *, may: Callable[[C], bool] = lambda _: True
) -> tuple[C, int] | None:
    """Whom asynchronous successive halving promotes, and to which rung; None: no trial has earned it.

    The highest rung first: of those that have come to it, the best ``1 / factor`` are promoted to the next (Li et
    al., A System for Massively Parallel Hyperparameter Tuning, 2020).

    Args:
        climbers: All trials, those that are above the first rung or have ended included.
        rungs: Ascending.
        factor: One of so many is promoted.
        may: Which of them may be promoted now, besides being resumable.
    """
    for rung, after in reversed(list(pairwise(rungs))):
        there = [climber for climber in climbers if climber.done >= rung]
        best = sorted(there, key=lambda climber: (climber.at(rung), climber.number))[: len(there) // factor]
        for climber in best:
            if climber.done < after and climber.resumable and may(climber):
                return climber, after
    return None
