"""Pruners as schedulers that only stop."""

from __future__ import annotations

import optuna
from optuna.pruners import NopPruner

from hpo.search.schedulers.scheduler import Decision, New, Next, Standing


class PrunerScheduler:
    """Stops a trial where the study's pruner says so; a free worker takes what waits, else a new trial."""

    def decide(self, trial: optuna.Trial, step: int) -> Decision:  # noqa: ARG002 - a pruner asks the trial itself
        """STOP where the pruner prunes the trial; see `Scheduler`."""
        if isinstance(trial.study.pruner, NopPruner) or not trial.should_prune():
            return Decision.CONTINUE
        return Decision.STOP

    def first(self, standing: Standing) -> None:
        """None: no trial pauses; see `Scheduler`."""

    def next(self, standing: Standing) -> Next:  # noqa: ARG002 - the same for any
        """Always `New`; see `Scheduler`."""
        return New()
