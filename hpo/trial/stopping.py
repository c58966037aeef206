"""How a running trial learns that it is to end: asked by its supervisor, or robbed of its lease."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from hpo.errors import LeaseLostError
from hpo.storage.ledger import Lease
from hpo.storage.recovery import Verdict
from trainer.callback import Callback, TrainerView
from trainer.state import INTERRUPTED, TrainState


class StopRequest:
    """What others want of a worker. Any thread may set it; the trial looks after each batch.

    A verdict or a lost lease is about one trial: it does nothing to the next one, should the trial end first.
    """

    def __init__(self) -> None:
        self._leave = threading.Event()
        self._verdicts: dict[int, Verdict] = {}
        self._lost: set[Lease] = set()

    def leave(self) -> None:
        """Ask the worker to put its trial down and to take no other."""
        self._leave.set()

    @property
    def leaving(self) -> bool:
        """Whether the worker is to take no other trial."""
        return self._leave.is_set()

    def end(self, number: int, verdict: Verdict) -> None:
        """Ask that trial ``number`` ends with a verdict."""
        self._verdicts[number] = verdict

    def verdict(self, number: int) -> Verdict | None:
        """How trial ``number`` is to end, if somebody has said so."""
        return self._verdicts.get(number)

    def lose(self, lease: Lease) -> None:
        """Say that a lease is lost."""
        self._lost.add(lease)

    def stops(self, number: int, lease: Lease) -> bool:
        """Whether trial ``number`` is to stop now.

        Raises:
            LeaseLostError: Another attempt has it.
        """
        if lease in self._lost:
            raise LeaseLostError(f"trial {number} has been taken from this worker")
        return self._leave.is_set() or number in self._verdicts


class Watch(Callback):
    """Ends the run after the running batch once that is asked, and shows that it goes on.

    Args:
        request: What others want.
        number: The trial.
        lease: This worker's attempt at it.
        pulse: Called with the run's state before the first batch, after each one, of training or validation, and
            when an epoch's metrics are complete.

    Raises:
        LeaseLostError: From the hook after a training batch, when another attempt has the trial.
    """

    priority = 0

    def __init__(
        self, request: StopRequest, number: int, lease: Lease, pulse: Callable[[TrainState], None]
    ) -> None:
        self._request = request
        self._number = number
        self._lease = lease
        self._pulse = pulse

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Show where the run goes on from."""
        self._pulse(trainer.state)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Show life, and look whether the run is to end."""
        self._pulse(trainer.state)
        if self._request.stops(self._number, self._lease):
            trainer.state.stop(INTERRUPTED, now=True)

    def on_validation_batch_end(self, trainer: TrainerView) -> None:
        """Show life."""
        self._pulse(trainer.state)

    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - the hook's
        """Show the epoch; its predictions are in the metrics by now."""
        self._pulse(trainer.state)
