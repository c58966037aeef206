"""The bridge between a Trainer and its trial: reports and pruning."""

from __future__ import annotations

import math
from collections.abc import Callable

import optuna

from hpo.search.schedulers.scheduler import Scheduler
from hpo.storage.attributes import PRUNED_ATTR
from hpo.storage.optuna_private import id_of_trial
from hpo.storage.outage import DatabaseError
from hpo.trial.reports import LateReports, Reports
from trainer.callback import Callback, TrainerView
from trainer.state import DIVERGED, INTERRUPTED, PRUNED


class PrunerCallback(Callback):
    """Reports the metric of each epoch to the trial, then ends it where the scheduler says so.

    On resume the storage is brought to the checkpoint's history: what it lacks is sent, what differs is
    rewritten. A step that the storage already held below its last one was asked about then, and is not again;
    a decision to prune is stored before it is acted on, so it holds for a trial that was lost in between: that
    one trains up to the epoch it was pruned at, and ends.

    Args:
        trial: The running trial.
        metric: The metric to report, at step = number of finished epochs.
        scheduler: The study's; it is asked after each epoch.
        background: Report beside the training. A decision is then acted on one epoch late, or at the run's end.
        leave: Called where the database fails for good: the run then ends with this epoch and its checkpoint.
            None: the error is raised.

    Raises:
        optuna.TrialPruned: From ``on_epoch_end``; from ``on_fit_start`` where a decision made before is due; from
            ``on_fit_end`` for a late one about the last epoch.
    """

    priority = 85

    def __init__(
        self,
        trial: optuna.Trial,
        metric: str,
        scheduler: Scheduler,
        *,
        background: bool = False,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self.trial = trial
        self.metric = metric
        self.reads = (metric,)
        self._reports = (LateReports if background else Reports)(trial, scheduler)
        self._leave = leave
        self._asked = 0
        self._decided: int | None = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Bring the storage to the history."""
        frozen = self.trial.storage.get_trial(id_of_trial(self.trial))
        stored = frozen.intermediate_values
        for step, metrics in enumerate(trainer.state.history, start=1):
            value = metrics.get(self.metric)
            if value is None:  # validation was skipped
                continue
            if step not in stored or not _same(stored[step], value):
                self._reports.store(step, value)
        self._asked = max(stored, default=0) - 1
        self._decided = frozen.user_attrs.get(PRUNED_ATTR)
        if self._decided is not None:  # a late decision was reported past
            self._decided = max(self._decided, *stored)
        if self._decided is not None and trainer.state.epoch >= self._decided:
            self._prune(trainer)

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Report, and ask unless the run has diverged."""
        state = trainer.state
        value = state.metric(self.metric)
        if value is None:
            return
        # With a decision the checkpoint lay before the epoch of it: the trial gets there again, and ends.
        ask = self._decided is None and state.stop_reason != DIVERGED and state.epoch > self._asked
        try:
            decided = self._reports.send(state.epoch, value, ask=ask)
        except DatabaseError:
            if self._leave is None:
                raise
            self._leave()
            state.stop(INTERRUPTED)
            return
        if decided or (self._decided is not None and state.epoch >= self._decided):
            self._prune(trainer)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:  # noqa: ARG002 - the hook's signature
        """Store what is under way; the error outranks a decision to prune."""
        self._reports.finish()

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Store what is under way; the last epoch may have been one to prune at."""
        if self._reports.finish():
            self._prune(trainer)

    def teardown(self, trainer: TrainerView) -> None:  # noqa: ARG002 - the hook's signature
        """End the thread, if there is one."""
        self._reports.close()

    def _prune(self, trainer: TrainerView) -> None:
        trainer.state.stop(PRUNED)
        raise optuna.TrialPruned(f"pruned after epoch {trainer.state.epoch}")


def _same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))
