"""`Asha`: asynchronous successive halving, which pauses trials at rungs and promotes the best of each rung."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hpo.search.schedulers.curves import affordable
from hpo.search.schedulers.granting import GrantScheduler
from hpo.search.schedulers.rungs import check_ladder, climbers_of, ladder, promotion, resumed, short_of
from hpo.search.schedulers.scheduler import New, Next, Standing, Wait, Why


@dataclass(frozen=True)
class Asha(GrantScheduler):
    """Trials pause at rungs; of those that came to a rung, the best ``1 / factor`` are promoted to the next.

    A free worker promotes whom it can, the highest rung first, else it starts a new trial, whose parameters the
    study's sampler draws. Li et al., A System for Massively Parallel Hyperparameter Tuning (2020), Algorithm 2.

    Kinds of its grants: ``"breadth"`` (a new trial, or one that is short of its first rung) and ``"promotion"``.

    Attributes:
        factor: One of so many is promoted, and the next rung is so many times as far.
        first_rung: Epochs of the first rung.

    Raises:
        ValueError: An argument is out of range.
    """

    reads_trials: ClassVar[bool] = False

    factor: int = 3
    first_rung: int = 1

    def __post_init__(self) -> None:
        check_ladder(self.factor, self.first_rung)

    def first(self, standing: Standing) -> int | None:
        """The first rung."""
        climbers = climbers_of(standing)
        return climbers.until(standing, ladder(climbers.horizon(standing), self.factor, self.first_rung)[0])

    def next(self, standing: Standing) -> Next:
        """A promotion, else a new trial; see `Scheduler`."""
        if standing.epochs_left == 0:
            return Wait()
        climbers = climbers_of(standing)
        rungs = ladder(climbers.horizon(standing), self.factor, self.first_rung)
        if found := short_of(climbers, rungs[0]):
            return resumed(standing, climbers, *found, "breadth")
        if found := promotion(climbers, rungs, self.factor):
            return resumed(standing, climbers, *found, "promotion")
        if standing.new_left == 0:
            return Wait()
        return New(None, climbers.until(standing, affordable(standing, 0, rungs[0])), Why("breadth"))
