"""Rungs: the epochs at which trials pause, and the choice of the trials that are promoted from a rung."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from hpo.search.axes import Floats
from hpo.search.schedulers.columns import NONE, PAUSED, Flags, Integers
from hpo.search.schedulers.curves import affordable, as_granted, horizon_by
from hpo.search.schedulers.scheduler import Resume, Standing, Why
from hpo.search.schedulers.seen import Curve

#: A rung above this share of the horizon is left out: a trial that has come so far trains to its end.
_NEAR: Final = 0.8


@dataclass(frozen=True, eq=False)
class Climbers:
    """The trials that halving compares, in any state, as arrays with one entry per trial.

    Attributes:
        number: The trial's number.
        done: Epochs that the trial has finished.
        whole: Whether it has trained to its end.
        resumable: Whether it may be promoted now.
        violating: Whether it violates a bound; it then ranks behind all trials that do not.
        at: For an epoch, returns the loss of each trial that has come so far, and anything for the others.
    """

    number: Integers
    done: Integers
    whole: Flags
    resumable: Flags
    violating: Flags
    at: Callable[[int], Floats]

    def only(self, those: Flags) -> Climbers:
        """The trials with a True flag."""
        return Climbers(
            self.number[those],
            self.done[those],
            self.whole[those],
            self.resumable[those],
            self.violating[those],
            lambda epoch: self.at(epoch)[those],
        )

    def horizon(self, standing: Standing) -> int:
        """As `hpo.search.schedulers.curves.horizon_of`."""
        if standing.horizon is not None:
            return standing.horizon
        whole, paused = (self.done[those].max(initial=0) for those in (self.whole, self.resumable))
        return horizon_by(standing, whole, paused, self.done.max(initial=0))

    def until(self, standing: Standing, goal: int) -> int | None:
        """As `hpo.search.schedulers.curves.until`."""
        return as_granted(standing, self.horizon(standing), goal, seen=bool(self.whole.any()))


def climbers_of(standing: Standing) -> Climbers:
    """Every trial, except those of earlier studies, whose losses may be on another level."""
    every = standing.columns
    # Arrays of very many trials take time, so steps that would change nothing are left out.
    bounded, forked = not every.feasible.all(), bool(every.inherited.any())
    violating = ~every.feasible
    hopeless = violating & ~every.mends
    diverged = bool(every.diverged.any())

    def at(epoch: int) -> Floats:
        values = every.read_at(epoch)
        known = np.isfinite(values)
        if bounded:
            known &= ~hopeless
        if diverged:
            known &= ~(every.diverged & (epoch > every.last))
        return np.where(known, values if standing.minimize else -values, math.inf)

    paused = every.state == PAUSED
    done = np.maximum(every.last, 0)
    done = np.where(paused, every.epochs if forked else np.maximum(done, every.until), done)
    if diverged:  # within an epoch: the trial counts as if it had reported that after the epoch
        done = np.where(every.diverged & (every.finite | (every.last == NONE)), every.epochs + 1, done)
    resumable = paused & every.finite
    if bounded:
        resumable &= ~hopeless
    found = Climbers(every.number, done, every.whole, resumable, violating, at)
    return found.only(~every.foreign) if every.foreign.any() else found


def climbing(curves: Sequence[Curve]) -> Climbers:
    """The trials of these curves."""
    return Climbers(
        np.array([curve.number for curve in curves], dtype=np.int64),
        np.array([curve.done for curve in curves], dtype=np.int64),
        np.array([curve.seen.whole for curve in curves], dtype=np.bool_),
        np.array([curve.resumable for curve in curves], dtype=np.bool_),
        np.array([not curve.seen.feasible for curve in curves], dtype=np.bool_),
        lambda epoch: np.array([curve.at(epoch) for curve in curves], dtype=np.float64),
    )


def check_ladder(factor: int, first_rung: int) -> None:
    """Refuse arguments that make no rungs.

    Raises:
        ValueError: One of the arguments is out of range.
    """
    if factor < 2:
        raise ValueError(f"factor is {factor}: give at least 2, of which one is promoted")
    if first_rung < 1:
        raise ValueError(f"first_rung is {first_rung}: give at least 1 epoch")


def ladder(horizon: int, factor: float, first: int = 1) -> list[int]:
    """The rungs ``first``, ``first · factor``, … and the horizon at the end; the factor is above 1.

    A horizon of 50 and a factor of 3 make 1, 3, 9, 27, 50. The last rung below the horizon is left out where it is
    above 80 % of the horizon.
    """
    rungs = [min(first, horizon)]
    while rungs[-1] < horizon:
        rungs.append(min(math.ceil(rungs[-1] * factor), horizon))
    if len(rungs) > 1 and rungs[-2] > _NEAR * horizon:
        del rungs[-2]
    return rungs


def short_of(climbers: Climbers, first: int | Integers) -> tuple[int, int] | None:
    """Find a trial that has paused before its first rung, because its grant was shorter than that.

    Args:
        climbers: The trials.
        first: The first rung, for all trials or for each.

    Returns:
        The index of the earliest such trial among the climbers, and its first rung; None where there is none.
    """
    rungs = np.broadcast_to(first, climbers.done.shape)
    found = np.flatnonzero(climbers.resumable & (climbers.done < rungs))
    if not len(found):
        return None
    place = found[climbers.number[found].argmin()]
    return int(place), int(rungs[place])


def promotion(
    climbers: Climbers, rungs: Sequence[int], factor: int, among: Flags | None = None
) -> tuple[int, int] | None:
    """The trial that asynchronous successive halving promotes, and to which rung; None: no trial has earned it.

    The highest rung comes first. Of the trials that have come to a rung, the best ``1 / factor`` are promoted to
    the next rung (Li et al., A System for Massively Parallel Hyperparameter Tuning, 2020).

    Args:
        climbers: The trials.
        rungs: The rungs, ascending.
        factor: The best ``1 / factor`` of the trials at a rung are promoted.
        among: Which trials count; None: all.

    Returns:
        The trial's index among the climbers, and the rung.
    """
    number, done = climbers.number, climbers.done
    for rung, after in reversed(list(pairwise(rungs))):
        there = done >= rung if among is None else (done >= rung) & among
        places = int(np.count_nonzero(there)) // factor
        waiting = np.flatnonzero(there & (done < after) & climbers.resumable)
        if not places or not len(waiting):
            continue
        losses, violating = climbers.at(rung), climbers.violating
        within = waiting[~violating[waiting]]
        waiting = within if len(within) else waiting
        least = losses[waiting].min()
        equal = waiting[losses[waiting] == least]
        best = equal[number[equal].argmin()]
        ahead = (losses < least) | ((losses == least) & (number < number[best]))
        ahead = ahead & ~violating if len(within) else ahead | ~violating
        if np.count_nonzero(there & ahead) < places:
            return int(best), after
    return None


def resumed(standing: Standing, climbers: Climbers, place: int, rung: int, kind: str) -> Resume:
    """A grant for the trial at an index among the climbers: to a rung, or as far as the budget allows."""
    goal = climbers.until(standing, affordable(standing, int(climbers.done[place]), rung))
    return Resume(int(climbers.number[place]), goal, Why(kind))
