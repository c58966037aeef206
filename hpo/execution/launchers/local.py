"""Workers as processes on this machine, forked from a fork server that has imported what they need."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

from hpo.execution.launchers.forkserver import not_started, start_fork_server
from hpo.execution.launchers.launcher import Said, WorkerEnded
from hpo.execution.launchers.slots import SlotLauncher
from hpo.execution.launchers.start import work
from hpo.execution.limits import death_of, kill_group, oom_kills
from hpo.execution.messages import Command, Message, WorkerOrder, received
from hpo.execution.pulse import (
    ADVANCED,
    BEAT,
    BEATEN,
    DECIDING,
    ENDING,
    EXCUSED,
    PROCESS,
    PULSE_LENGTH,
    Held,
    Pulse,
    held_by,
)
from hpo.storage.machine import process_start
from hpo.trial.mainless import MainlessContext, leave_alone
from hpo.trial.resources import Slot

#: Seconds that a killed process may take to be gone, and between two checks whether it is.
_PATIENCE: Final = 5.0
_LOOK: Final = 0.002


@dataclass
class LocalWorker:
    """A worker's process.

    Attributes:
        label: Its name in the ledger and in logs.
        process: The process, started.
        channel: Messages from it, and commands to it.
        pulse: Memory shared with it.
        struck_before: The value of `hpo.execution.limits.oom_kills` when it was started.
    """

    label: str
    process: ForkServerProcess
    channel: Connection[Command, Message]
    pulse: Pulse
    struck_before: int
    _patience_ends: float | None = None
    _killed: dict[int, float | None] | None = None

    @property
    def pid(self) -> int:
        """Its process id, and its group's."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def trial_pid(self) -> int:
        """Id of its trial process, and of that one's process group; 0 if there is none."""
        return int(self.pulse[PROCESS])

    @property
    def beat(self) -> float:
        """The monotonic clock when it last finished a batch, or took a trial."""
        return self.pulse[BEAT]

    @property
    def is_deciding(self) -> bool:
        """Whether its trial is at the end of its grant and waits for a decision."""
        return bool(self.pulse[DECIDING])

    @property
    def advanced(self) -> bool:
        """Whether it has finished an epoch of its latest trial."""
        return bool(self.pulse[ADVANCED])

    @property
    def held(self) -> Held | None:
        """The lease that its trial process shows; None if it shows none."""
        return held_by(self.pulse)

    def show_beaten(self, at: float) -> None:
        """Show its trial process when the supervisor has beaten for that lease."""
        self.pulse[BEATEN] = at

    def show_excused(self, seconds: float) -> None:
        """Show its trial process that this many more seconds do not count as its trial's."""
        self.pulse[EXCUSED] += seconds

    def ask(self, command: Command) -> None:
        """Send it a command; does nothing if it has ended."""
        with contextlib.suppress(OSError):
            self.channel.send(command)

    def kill(self) -> None:
        """Kill it with all its processes and wait for their end, for at most `_PATIENCE` over all calls.

        A process in an uninterruptible sleep, say on a file server that is away, lives on until it wakes.
        """
        kill_group(self.pid, only_group=self.process.exitcode is not None)
        if self._patience_ends is None:
            self._patience_ends = time.monotonic() + _PATIENCE
        self._end_trial_processes(self._patience_ends)
        self.process.join(max(0.0, self._patience_ends - time.monotonic()))
        if self.process.exitcode is None:
            leave_alone(self.process)

    def changes(self) -> Iterator[Said | WorkerEnded]:
        """Its messages since the last call, and its end."""
        has_ended = self.process.exitcode is not None  # read first: then all its messages are in the channel
        for message in received(self.channel):
            yield Said(self, message)
        if has_ended:
            yield self._bury()

    def _bury(self) -> WorkerEnded:
        """Clean up after its end: kill what it left running, and close our end of the channel."""
        kill_group(self.pid, only_group=True)
        self._end_trial_processes(time.monotonic() + _PATIENCE)
        self.process.join()
        self.channel.close()
        exitcode = self.process.exitcode
        return WorkerEnded(self, death_of(exitcode, self.struck_before), in_order=not exitcode)

    def _end_trial_processes(self, deadline: float) -> None:
        """Kill its trial processes with all that they started, and wait for their end: they may hold the lease."""
        if self._killed is None:
            pids = [pid for pid in (self.trial_pid, int(self.pulse[ENDING])) if pid]
            self._killed = {pid: process_start(pid) for pid in pids}
        else:  # the ids of processes that are gone may belong to others by now
            pids = self._trial_processes_left()
        for pid in pids:
            kill_group(pid, only_group=True)
        while self._trial_processes_left() and time.monotonic() < deadline:
            time.sleep(_LOOK)

    def _trial_processes_left(self) -> list[int]:
        killed = self._killed or {}
        return [pid for pid, start in killed.items() if start is not None and process_start(pid) == start]


class LocalLauncher(SlotLauncher[LocalWorker]):
    """Starts worker processes; see `hpo.execution.launchers.launcher.Launcher`.

    Args:
        slots: A device and threads for each worker.
        folder: For the workers' logs: what each prints outside of trials.
        first: Number of the first worker.
    """

    def __init__(self, slots: Sequence[Slot], folder: Path, first: int = 1) -> None:
        super().__init__(slots, folder, first)
        self._context = MainlessContext()

    def _start(self, order: WorkerOrder) -> LocalWorker:
        ours, theirs = self._context.Pipe()
        pulse = self._context.RawArray("d", PULSE_LENGTH)
        # Not a daemon: daemons may not start DataLoader workers.
        process = self._context.Process(target=work, args=(order, theirs, pulse), name=order.label, daemon=False)
        struck = oom_kills()
        try:
            start_fork_server(order.spec)  # if it has died; `start` would start one without our settings
            process.start()
        except (OSError, EOFError) as error:  # no processes left, or the fork server is gone
            raise not_started("a worker", error, struck, "then the same command resumes the study") from error
        theirs.close()
        return LocalWorker(order.label, process, ours, pulse, struck)

    def wait(self, seconds: float, wake: socket.socket) -> bool:
        """Wait at most ``seconds`` for changes; returns whether there is something to read from ``wake``."""
        sources: list[Any] = [wake, *(worker.channel for worker in self._workers)]
        sources += [worker.process.sentinel for worker in self._workers]
        return wake in connection.wait(sources, seconds)
