"""Asynchronous Hyperband: successive halving with promotion in brackets that differ in their first rung."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hpo.search.schedulers.curves import affordable, horizon_by
from hpo.search.schedulers.granting import GrantScheduler
from hpo.search.schedulers.rungs import (
    Climbers,
    check_ladder,
    climbers_of,
    ladder,
    promotion,
    resumed,
    short_of,
)
from hpo.search.schedulers.scheduler import New, Next, Standing, Wait, Why


@dataclass(frozen=True)
class Hyperband(GrantScheduler):
    """A trial belongs to a bracket by its number, and is promoted among the trials of its bracket.

    Bracket k starts at rung k of those of `Asha`; a trial's bracket is drawn with the shares that give each
    bracket about the same epochs (Li et al., Hyperband, 2018; asynchronous as Klein et al., Model-based
    Asynchronous Hyperparameter and Neural Architecture Search, 2020).

    Where no length is known, there are the brackets of the first guess at it, however far trials come; a trial
    whose first rung is past the length that turns out trains to its end.

    Kinds of its grants: ``"breadth"`` (a new trial, or one that is short of its first rung) and ``"promotion"``.

    Attributes:
        factor: One of so many is promoted, and the next rung is so many times as far.
        first_rung: Epochs of the first rung of the widest bracket.

    Raises:
        ValueError: An argument is out of range.
    """

    reads_trials: ClassVar[bool] = False

    factor: int = 3
    first_rung: int = 1

    def __post_init__(self) -> None:
        check_ladder(self.factor, self.first_rung)

    def first(self, standing: Standing) -> int | None:
        """The first rung of the next new trial's bracket."""
        climbers = climbers_of(standing)
        rungs = self._rungs(standing, climbers)
        return climbers.until(standing, rungs[self.bracket(standing, _upcoming(standing), len(rungs))])

    def next(self, standing: Standing) -> Next:
        """A promotion in the widest bracket that has one, else a new trial; see `Scheduler`."""
        if standing.epochs_left == 0:
            return Wait()
        climbers = climbers_of(standing)
        rungs = self._rungs(standing, climbers)
        drawn = _drawn(standing.seed, self._brackets(standing), self.factor, _upcoming(standing))
        brackets = np.minimum(np.array(drawn, dtype=np.int64), len(rungs) - 1)[climbers.number]
        # Such as a trial that a person has enqueued: it was granted the first rung of the next new trial.
        if found := short_of(climbers, np.array(rungs, dtype=np.int64)[brackets]):
            return resumed(standing, climbers, *found, "breadth")
        for bracket in range(len(rungs) - 1):
            if found := promotion(climbers, rungs[bracket:], self.factor, brackets == bracket):
                return resumed(standing, climbers, *found, "promotion")
        if standing.new_left == 0:
            return Wait()
        start = rungs[self.bracket(standing, _upcoming(standing), len(rungs))]
        return New(None, climbers.until(standing, affordable(standing, 0, start)), Why("breadth"))

    def bracket(self, standing: Standing, number: int, rungs: int) -> int:
        """The bracket of a trial: the index of its first rung, below the number of ``rungs``."""
        return min(_drawn(standing.seed, self._brackets(standing), self.factor, number + 1)[number], rungs - 1)

    def _rungs(self, standing: Standing, climbers: Climbers) -> list[int]:
        horizon = climbers.horizon(standing)
        return self._ladder(horizon if climbers.whole.any() else self._guessed(standing, horizon))

    def _brackets(self, standing: Standing) -> int:
        """How many brackets there are; by the first guess where no length is known, so that no trial moves."""
        return len(self._ladder(self._guessed(standing, horizon_by(standing, 0, 0, 0))))

    def _guessed(self, standing: Standing, horizon: int) -> int:
        """The horizon, with room for at least two rungs where it is not known."""
        return horizon if standing.horizon is not None else max(horizon, self.first_rung * self.factor)

    def _ladder(self, horizon: int) -> list[int]:
        return ladder(horizon, self.factor, self.first_rung)


def _drawn(seed: int, rungs: int, factor: int, count: int) -> list[int]:
    """The brackets of at least ``count`` trials, from trial 0 on."""
    known = _known(seed, rungs, factor)
    if len(known) < count:
        trials = [rungs / (rungs - k) * float(factor) ** (rungs - 1 - k) for k in range(rungs)]
        ends = np.cumsum(np.array(trials) / sum(trials))
        ends /= ends[-1]
        draws = [np.random.default_rng((seed, number)).random() for number in range(len(known), count)]
        known.extend(ends.searchsorted(draws, side="right").tolist())  # as `Generator.choice` does
    return known


# Each is drawn once in a process: a draw takes a hundredth of a millisecond, and a decision needs all of them.
@functools.lru_cache(maxsize=8)
def _known(seed: int, rungs: int, factor: int) -> list[int]:  # noqa: ARG001 - what the list is of
    return []


def _upcoming(standing: Standing) -> int:
    return int(standing.columns.number.max(initial=-1)) + 1
