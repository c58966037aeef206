"""The bridge from a Trainer to its session for requests to stop, which it checks after each batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpo.trial.process_forks import end_fork
from hpo.trial.session import Session
from trainer.callback import Callback, TrainerView
from trainer.state import INTERRUPTED


class Watch(Callback):
    """Ends the run after the running batch if that was requested, and shows that training advances.

    A process that user code has forked from the training process is ended at its first hook, before it writes.

    Args:
        session: The trial's session.

    Raises:
        LeaseLostError: From the hook after a training batch, when another attempt has the trial.
    """

    priority = 0

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Show life, and end the run if that was requested."""
        if self._session.should_stop:
            trainer.state.stop(INTERRUPTED, now=True)

    def on_validation_batch_end(self, trainer: TrainerView) -> None:  # noqa: ARG002 - as below
        """Show life."""
        self._session.show_life()

    def on_fit_start(self, trainer: TrainerView) -> None:  # noqa: ARG002 - the hook's signature
        """End a fork that was made while the trainer was built."""
        end_fork(self._session.process)

    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        """End a fork before it logs."""
        end_fork(self._session.process)

    def on_epoch_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """End a fork before it reports."""
        end_fork(self._session.process)

    def on_save_checkpoint(self, trainer: TrainerView, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """End a fork before it writes."""
        end_fork(self._session.process)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:  # noqa: ARG002
        """End a fork that raised."""
        end_fork(self._session.process, error)

    def on_fit_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """End a fork before what follows a run."""
        end_fork(self._session.process)
