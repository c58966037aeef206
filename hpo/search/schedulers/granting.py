"""The base class of schedulers that only decide where grants end."""

from __future__ import annotations

from typing import ClassVar

import optuna

from hpo.search.schedulers.scheduler import Decision


class GrantScheduler:
    """Decides where grants end, and never pauses or stops a trial before that."""

    forks: ClassVar[bool] = False
    reads_trials: ClassVar[bool] = True

    def watches(self, study: optuna.Study) -> bool:  # noqa: ARG002 - the same for any
        """False; see `Scheduler`."""
        return False

    def decide(self, trial: optuna.Trial, step: int) -> Decision:  # noqa: ARG002 - nothing stops below a rung
        """CONTINUE; see `Scheduler`."""
        return Decision.CONTINUE
