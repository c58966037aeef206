"""A scheduler that pauses every trial, for tests; worker processes import it from here."""

from __future__ import annotations

from dataclasses import dataclass

import optuna

from hpo.search.schedulers.pruner import PrunerScheduler
from hpo.search.schedulers.scheduler import Decision, New, Next, Resume, Standing, Wait


@dataclass(frozen=True)
class PauseAll(PrunerScheduler):
    """Pauses every trial after an epoch, and resumes them when all are there, the latest first.

    A pruner may stop a trial before and after.

    Attributes:
        epoch: After which epoch.
        resumed: How many are resumed at most.
    """

    epoch: int = 2
    resumed: int | None = None

    def watches(self, study: optuna.Study) -> bool:
        """Always."""
        return True

    def decide(self, trial: optuna.Trial, step: int) -> Decision:
        """PAUSE after that epoch."""
        if (decision := super().decide(trial, step)) is not Decision.CONTINUE:
            return decision
        return Decision.PAUSE if step == self.epoch else Decision.CONTINUE

    def next(self, standing: Standing) -> Next:
        """New trials first; none is resumed before all have come so far."""
        if standing.new_left != 0:
            return New()
        if any(trial.epochs <= self.epoch for trial in standing.running):
            return Wait()
        beyond = sum(trial.epochs > self.epoch for trial in standing.own)
        if standing.paused and (self.resumed is None or beyond < self.resumed):
            return Resume(standing.paused[-1].number)
        return Wait()
