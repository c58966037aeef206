"""Pruners as schedulers that only stop."""

from __future__ import annotations

from typing import ClassVar

import optuna
from optuna.pruners import NopPruner

from hpo.search.schedulers.columns import PAUSED
from hpo.search.schedulers.scheduler import Decision, New, Next, Resume, Standing


class PrunerScheduler:
    """Stops a trial where the study's pruner says so; a free worker takes what waits, else a new trial.

    Where ``study.epochs`` has cut a trial short, that one resumes before a new trial, as soon as epochs are left.
    """

    forks: ClassVar[bool] = False
    reads_trials: ClassVar[bool] = False

    def watches(self, study: optuna.Study) -> bool:
        """Unless the study has no pruner; see `Scheduler`."""
        return not isinstance(study.pruner, NopPruner)

    def decide(self, trial: optuna.Trial, step: int) -> Decision:  # noqa: ARG002 - a pruner asks the trial itself
        """STOP where the pruner prunes the trial; see `Scheduler`."""
        return Decision.STOP if self.watches(trial.study) and trial.should_prune() else Decision.CONTINUE

    def first(self, standing: Standing) -> None:
        """None: no trial pauses; see `Scheduler`."""

    def next(self, standing: Standing) -> Next:
        """The earliest trial that was cut to the epochs which were left, else `New`; see `Scheduler`."""
        if standing.n_epochs is None and not standing.granted:  # none was ever cut: nothing is read
            return New()
        every = standing.columns
        paused = every.number[(every.state == PAUSED) & ~every.imported]
        return Resume(int(paused.min())) if len(paused) else New()
