"""`PrunerScheduler`: the scheduler of a study without one, which stops trials as the study's pruner says."""

from __future__ import annotations

from typing import ClassVar

import optuna
from optuna.pruners import NopPruner

from hpo.search.schedulers.columns import PAUSED
from hpo.search.schedulers.scheduler import Decision, New, Next, Resume, Standing


class PrunerScheduler:
    """Stops a trial where the study's pruner says so; a free worker gets a waiting trial, else a new one.

    A trial that ``study.epochs`` has cut short resumes before a new trial starts, once there are epochs again.
    """

    forks: ClassVar[bool] = False
    reads_trials: ClassVar[bool] = False

    def watches(self, study: optuna.Study) -> bool:
        """True, unless the study has no pruner; see `Scheduler`."""
        return not isinstance(study.pruner, NopPruner)

    def decide(self, trial: optuna.Trial, step: int) -> Decision:  # noqa: ARG002 - a pruner asks the trial itself
        """STOP where the pruner prunes the trial; see `Scheduler`."""
        return Decision.STOP if self.watches(trial.study) and trial.should_prune() else Decision.CONTINUE

    def first(self, standing: Standing) -> None:
        """None: no trial pauses; see `Scheduler`."""

    def next(self, standing: Standing) -> Next:
        """The earliest paused trial, which the budget of epochs had cut short, else `New`; see `Scheduler`."""
        if standing.n_epochs is None and not standing.granted:  # no trial was ever cut, so none need be read
            return New()
        every = standing.columns
        paused = every.number[(every.state == PAUSED) & ~every.imported]
        return Resume(int(paused.min())) if len(paused) else New()
