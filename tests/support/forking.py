"""Schedulers that fork a trial once, for tests of what a fork is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from hpo.search.schedulers.granting import GrantScheduler
from hpo.search.schedulers.scheduler import Fork, New, Next, Resume, Standing, Wait, Why

RATE: Final = "optimizer.lr"


@dataclass(frozen=True)
class ForkOnce(GrantScheduler):
    """Two trials of two epochs, then a fork of the first in the place of the second; then the first trains on."""

    forks: ClassVar[bool] = True
    changes: tuple[tuple[str, Any], ...] = ((RATE, 0.02),)

    def first(self, standing: Standing) -> int:
        return 2

    def next(self, standing: Standing) -> Next:
        if standing.here is not None:
            return Wait()
        if len(standing.own) < 2:
            return New(until=2, why=Why("initial"))
        if len(standing.own) == 2:
            params = {**standing.own[0].params, **dict(self.changes)}
            return Fork(0, 2, params, None, Why("fork"), replaces=1)
        return Resume(0, None, Why("survivor")) if standing.paused else Wait()


@dataclass(frozen=True)
class ForkLate(ForkOnce):
    """Two trials of two epochs and two more; a fork of the first after two epochs replaces the second, if lost."""

    def next(self, standing: Standing) -> Next:
        if standing.here is not None:
            return Wait()
        if len(standing.own) < 2:
            return New(until=2, why=Why("initial"))
        for trial in standing.paused:
            if trial.epochs == 2:
                return Resume(trial.number, 4, Why("survivor"))
        if len(standing.own) == 2 and standing.own[1].state == "ended":
            return Fork(0, 2, standing.own[0].params, None, Why("fork"), replaces=1)
        return Wait()
