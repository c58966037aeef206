"""Asynchronous successive halving with promotion."""

from __future__ import annotations

from dataclasses import dataclass

from hpo.search.schedulers.curves import affordable, curves_of, horizon_of, until
from hpo.search.schedulers.granting import GrantScheduler
from hpo.search.schedulers.rungs import ladder, promotion
from hpo.search.schedulers.scheduler import New, Next, Resume, Standing, Wait, Why


@dataclass(frozen=True)
class Asha(GrantScheduler):
    """Trials pause at rungs; of those that came to a rung, the best ``1 / factor`` are promoted to the next.

    A free worker promotes whom it can, the highest rung first, else it starts a new trial, whose parameters the
    study's sampler draws. Li et al., A System for Massively Parallel Hyperparameter Tuning (2020), Algorithm 2.

    Kinds of its grants: ``"breadth"`` (a new trial) and ``"promotion"``.

    Attributes:
        factor: One of so many is promoted, and the next rung is so many times as far.
        first_rung: Epochs of the first rung.
    """

    factor: int = 3
    first_rung: int = 1

    def first(self, standing: Standing) -> int | None:
        """The first rung."""
        curves = curves_of(standing)
        return until(standing, curves, ladder(horizon_of(standing, curves), self.factor, self.first_rung)[0])

    def next(self, standing: Standing) -> Next:
        """A promotion, else a new trial; see `Scheduler`."""
        if standing.epochs_left == 0:
            return Wait()
        curves = curves_of(standing)
        rungs = ladder(horizon_of(standing, curves), self.factor, self.first_rung)
        if found := promotion(curves, rungs, self.factor):
            curve, rung = found
            goal = until(standing, curves, affordable(standing, curve.done, rung))
            return Resume(curve.number, goal, Why("promotion"))
        if standing.new_left == 0:
            return Wait()
        return New(None, until(standing, curves, affordable(standing, 0, rungs[0])), Why("breadth"))
