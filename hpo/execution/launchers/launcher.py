"""What a launcher is: it places workers, reports what changes about them, and ends them.

A supervisor knows this and no more; processes, pipes and shared memory stay inside a launcher. `local` starts
worker processes on this machine. A supervisor with its launcher is an agent: what places agents on other machines
has the same verbs and needs no messages, because agents work together through the study's storage.
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
    """A worker that a launcher has placed; it can be read after its end, too."""

    @property
    def label(self) -> str:
        """Its name in the ledger and in logs; no two workers that live have the same."""

    @property
    def pid(self) -> int:
        """The process whose memory, with that of the processes below it, is the worker's."""

    @property
    def trial_pid(self) -> int:
        """The process that holds its trial; 0 where there is none."""

    @property
    def beat(self) -> float:
        """The monotonic clock when it last finished a batch, or took a trial."""

    @property
    def is_deciding(self) -> bool:
        """Whether its trial waits for a decision, where its grant ends."""

    @property
    def advanced(self) -> bool:
        """Whether it has finished an epoch of its latest trial."""

    @property
    def held(self) -> Held | None:
        """What the process that holds its trial shows of that; None where it shows none."""

    def show_beaten(self, at: float) -> None:
        """Show that process that its supervisor has beaten for what it holds, by the monotonic clock."""

    def show_excused(self, seconds: float) -> None:
        """Show that process that so many more seconds do not count as its trial's."""

    def ask(self, command: Command) -> None:
        """Ask it to stop, or to drop its trial; one that has ended needs no asking."""

    def kill(self) -> None:
        """End it with all that it has started, and wait for that; `Launcher.changes` reports the end."""


@dataclass(frozen=True)
class Said:
    """A worker has sent a message."""

    worker: Worker
    message: Message


@dataclass(frozen=True)
class WorkerEnded:
    """A worker has ended; nothing that it started is left, and nothing more comes from it.

    Attributes:
        worker: The worker.
        cause: Why, for people.
        in_order: It ended by itself, as it should.
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
            order: What they are to do.
            count: How many at most.

        Raises:
            StudyError: A worker can't be started.
        """

    def wait(self, seconds: float, wake: socket.socket) -> bool:
        """Wait until there are changes, the time is over, or there is something to read from ``wake``.

        Returns:
            Whether there is something to read from ``wake``.
        """

    def changes(self) -> Iterator[Said | WorkerEnded]:
        """What has changed since this was last asked, without waiting; each worker's changes in their order."""

    def drain(self) -> None:
        """Ask every worker to requeue its trial, and to end."""

    def logs(self, label: str) -> Path:
        """The file with what the worker of this name prints outside of trials."""
