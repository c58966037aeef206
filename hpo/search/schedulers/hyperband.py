"""Asynchronous Hyperband: successive halving with promotion in brackets that differ in their first rung."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpo.search.schedulers.curves import affordable, curves_of, horizon_of, until
from hpo.search.schedulers.granting import GrantScheduler
from hpo.search.schedulers.rungs import ladder, promotion
from hpo.search.schedulers.scheduler import New, Next, Resume, Standing, Wait, Why


@dataclass(frozen=True)
class Hyperband(GrantScheduler):
    """A trial belongs to a bracket by its number, and is promoted among the trials of its bracket.

    Bracket k starts at rung k of those of `Asha`; a trial's bracket is drawn with the shares that give each
    bracket about the same epochs (Li et al., Hyperband, 2018; asynchronous as Klein et al., Model-based
    Asynchronous Hyperparameter and Neural Architecture Search, 2020).

    Kinds of its grants: ``"breadth"`` (a new trial) and ``"promotion"``.

    Attributes:
        factor: One of so many is promoted, and the next rung is so many times as far.
        first_rung: Epochs of the first rung of the widest bracket.
    """

    factor: int = 3
    first_rung: int = 1

    def first(self, standing: Standing) -> int | None:
        """The first rung of the bracket that the next new trial has."""
        curves = curves_of(standing)
        rungs = ladder(horizon_of(standing, curves), self.factor, self.first_rung)
        return until(standing, curves, rungs[self.bracket(standing, _upcoming(standing), len(rungs))])

    def next(self, standing: Standing) -> Next:
        """A promotion in the widest bracket that has one, else a new trial; see `Scheduler`."""
        if standing.epochs_left == 0:
            return Wait()
        curves = curves_of(standing)
        rungs = ladder(horizon_of(standing, curves), self.factor, self.first_rung)
        brackets = [self.bracket(standing, curve.number, len(rungs)) for curve in curves]
        for bracket in range(len(rungs) - 1):
            inside = [curve for curve, its in zip(curves, brackets, strict=True) if its == bracket]
            if found := promotion(inside, rungs[bracket:], self.factor):
                curve, rung = found
                goal = until(standing, curves, affordable(standing, curve.done, rung))
                return Resume(curve.number, goal, Why("promotion"))
        if standing.new_left == 0:
            return Wait()
        start = rungs[self.bracket(standing, _upcoming(standing), len(rungs))]
        return New(None, until(standing, curves, affordable(standing, 0, start)), Why("breadth"))

    def bracket(self, standing: Standing, number: int, rungs: int) -> int:
        """The bracket of a trial: an index of the first of its rungs."""
        trials = [np.ceil(rungs / (rungs - k)) * float(self.factor) ** (rungs - 1 - k) for k in range(rungs)]
        rng = np.random.default_rng((standing.seed, number))
        return int(rng.choice(rungs, p=np.array(trials) / sum(trials)))


def _upcoming(standing: Standing) -> int:
    return max((trial.number for trial in standing.trials), default=-1) + 1
