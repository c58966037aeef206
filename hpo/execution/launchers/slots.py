"""Base class of launchers with a slot for each worker: keeps labels, free slots and living workers."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from hpo.execution.launchers.launcher import Said, Worker, WorkerEnded
from hpo.execution.messages import Order, Stop, WorkerOrder
from hpo.trial.resources import Slot


class SlotWorker(Worker, Protocol):
    """A worker that reports its own changes."""

    def changes(self) -> Iterator[Said | WorkerEnded]:
        """Its messages since the last call, and its end."""


W = TypeVar("W", bound=SlotWorker)


class SlotLauncher(ABC, Generic[W]):
    """A launcher except for `wait`; see `hpo.execution.launchers.launcher.Launcher`.

    Args:
        slots: A device and threads for each worker.
        folder: For the workers' logs: what each prints outside of trials.
        first: Number of the first worker; other agents of the study use other numbers.

    Attributes:
        labelled: The slots by the label of their worker.
    """

    def __init__(self, slots: Sequence[Slot], folder: Path, first: int = 1) -> None:
        self.slots = slots
        self.labelled = {f"worker-{number}": slot for number, slot in enumerate(slots, first)}
        self._folder = folder
        self._workers: list[W] = []

    @property
    def room(self) -> int:
        """How many more workers can be placed now."""
        return len(self.slots) - len(self._workers)

    def place(self, order: Order, count: int) -> Iterator[W]:
        """Start workers as far as there is room, each when the iterator comes to it.

        Args:
            order: What they do.
            count: How many at most.

        Raises:
            StudyError: A worker can't be started.
        """
        taken = {worker.label for worker in self._workers}
        for label, slot in [each for each in self.labelled.items() if each[0] not in taken][:count]:
            own = WorkerOrder(
                order.spec, order.scheduler, label, slot, self.logs(label), agent=order.agent, pooler=order.pooler
            )
            worker = self._start(own)
            self._workers.append(worker)
            yield worker

    @abstractmethod
    def _start(self, order: WorkerOrder) -> W:
        """Start one worker."""

    def changes(self) -> Iterator[Said | WorkerEnded]:
        """What has changed since the last call, without waiting; each worker's changes are in order."""
        for worker in list(self._workers):
            for change in worker.changes():
                if isinstance(change, WorkerEnded):
                    self._workers.remove(worker)
                yield change

    def drain(self) -> None:
        """Ask every worker to requeue its trial, and to end."""
        for worker in self._workers:
            worker.ask(Stop())

    def logs(self, label: str) -> Path:
        """The file with what the worker of this name prints outside of trials."""
        return self._folder / f"{socket.gethostname()}-{label}.log"
