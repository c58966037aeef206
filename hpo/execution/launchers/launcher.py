"""The interface of a launcher, which places workers, reports what changes about them, and ends them.

A supervisor uses only this interface; processes, pipes and shared memory stay inside the launcher. `local` starts
worker processes on this machine. A supervisor with its launcher is an agent. What places agents on other machines,
an engine, has the same methods but no messages, because agents work together through the study's storage.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpo.execution.messages import Command, Message, Order
from hpo.execution.pulse import Held
from hpo.trial.resources import Slot


class Worker(Protocol):
    """A worker that a launcher has placed; its properties can also be read after its end."""

    @property
    def label(self) -> str:
        """Its name in the ledger and in logs; no two living workers have the same."""

    @property
    def pid(self) -> int:
        """Id of the worker's process; its memory and that of its child processes is the worker's."""

    @property
    def trial_pid(self) -> int:
        """Id of the process that holds its trial; 0 if there is none."""

    @property
    def beat(self) -> float:
        """The monotonic clock when it last finished a batch, or took a trial."""

    @property
    def is_deciding(self) -> bool:
        """Whether its trial is at the end of its grant and waits for a decision."""

    @property
    def advanced(self) -> bool:
        """Whether it has finished an epoch of its latest trial."""

    @property
    def held(self) -> Held | None:
        """The lease that its trial process shows; None if it shows none."""

    def show_beaten(self, at: float) -> None:
        """Show its trial process when the supervisor has beaten for that lease, by the monotonic clock."""

    def show_excused(self, seconds: float) -> None:
        """Show its trial process that this many more seconds do not count as its trial's."""

    def ask(self, command: Command) -> None:
        """Send it a command; does nothing if it has ended."""

    def kill(self) -> None:
        """Kill it with all processes that it started, and wait for their end, which `Launcher.changes` reports."""


@dataclass(frozen=True)
class Said:
    """A worker has sent a message."""

    worker: Worker
    message: Message


@dataclass(frozen=True)
class WorkerEnded:
    """A worker has ended: nothing that it started is left, and it sends no more messages.

    Attributes:
        worker: The worker.
        cause: Why, for people.
        in_order: It ended by itself, without an error.
    """

    worker: Worker
    cause: str
    in_order: bool


class Launcher(Protocol):
    """Places workers.

    Attributes:
        slots: What each worker may use; there is room for one worker in each.
    """

    slots: Sequence[Slot]

    @property
    def room(self) -> int:
        """How many more workers can be placed now."""

    def place(self, order: Order, count: int) -> Iterator[Worker]:
        """Start workers as far as there is room, each when the iterator comes to it.

        Args:
            order: What they do.
            count: How many at most.

        Raises:
            StudyError: A worker can't be started.
        """

    def wait(self, seconds: float, wake: socket.socket) -> bool:
        """Wait until there are changes, ``seconds`` have passed, or there is something to read from ``wake``.

        Returns:
            Whether there is something to read from ``wake``.
        """

    def changes(self) -> Iterator[Said | WorkerEnded]:
        """What has changed since the last call, without waiting; each worker's changes are in order."""

    def drain(self) -> None:
        """Ask every worker to requeue its trial and to end."""

    def logs(self, label: str) -> Path:
        """The file with what the worker of this name prints outside of trials."""
