"""The bridge from a Trainer to its session at the end of an epoch: reports, and the scheduler's decisions."""

from __future__ import annotations

from hpo.trial.session import Session
from trainer.callback import Callback, TrainerView
from trainer.state import DIVERGED


class PrunerCallback(Callback):
    """Reports the metrics of each epoch to the session, then ends the run if the session says so.

    A trial that pauses ends its run after this epoch's checkpoint, unless the epoch is its last, or another
    callback ends the run with it. On resume the stored values are made equal to the checkpoint's history; see
    `hpo.trial.reports.Reports`. If the database fails permanently, the run ends after this epoch's checkpoint.

    Args:
        session: The trial's session.

    Raises:
        optuna.TrialPruned: From ``on_epoch_end``; from ``on_fit_start`` for a decision of an earlier attempt; from
            ``on_fit_end`` for a late decision about the last epoch.
    """

    priority = 85

    def __init__(self, session: Session) -> None:
        self._session = session
        self.reads = (session.metric,)

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Make the stored values equal to the history."""
        self._session.max_epochs = trainer.state.max_epochs
        self._session.resume(trainer.state.history, inside=trainer.state.batch_index > 0)
        self._follow(trainer)

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Report the epoch, and follow the decision."""
        state, session = trainer.state, self._session
        state.metric(session.metric)  # raises if nothing records it
        session.max_epochs = state.max_epochs
        if state.stop_reason == DIVERGED:
            session.diverge()
        session.take_report(state.epoch, state.metrics)
        self._follow(trainer)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:  # noqa: ARG002 - as below
        """Finish storing; the error outranks a decision to prune."""
        self._session.finish()

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Finish storing; the trial may be pruned by its last epoch."""
        if self._session.finish():
            self._follow(trainer)

    def teardown(self, trainer: TrainerView) -> None:  # noqa: ARG002 - the hook's signature
        """End the thread that reports, if there is one."""
        self._session.reports.close()

    def _follow(self, trainer: TrainerView) -> None:
        if self._session.stop_reason is not None:
            trainer.state.stop(self._session.stop_reason)
        self._session.raise_pruned()
