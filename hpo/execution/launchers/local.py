"""A worker as its supervisor sees it: what it says, what it is doing, and whether that goes on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Final

from hpo.execution.limits import Limits, death_of, kill_group
from hpo.execution.messages import (
    ADVANCED,
    BEAT,
    PROCESS,
    EpochsEnded,
    Leaving,
    Message,
    Pulse,
    Ready,
    Started,
    Stop,
)
from hpo.storage.ledger import process_start
from hpo.storage.recovery import LOST, STOPPED, Verdict
from hpo.trial.resources import Slot

#: Seconds that a killed process may take to be gone, and between two looks at it.
_PATIENCE: Final = 5.0
_LOOK: Final = 0.002
_AT_ONCE = Verdict(STOPPED, "its worker was stopped at once")


@dataclass
class Running:
    """A trial in a worker.

    Attributes:
        number: The trial.
        spent_s: Seconds that it has taken, over all attempts, until ``since``.
        since: The monotonic clock from which on its time counts.
        verdict: How it is to end, once a limit is broken.
        kill_at: The monotonic clock when patience with that ends.
    """

    number: int
    spent_s: float
    since: float
    verdict: Verdict | None = None
    kill_at: float = 0.0


@dataclass
class Child:
    """A worker process.

    Attributes:
        label: Its name in the ledger and in logs.
        slot: Its device and threads.
        process: The process, started.
        channel: Messages from it, and `Stop` to it.
        pulse: Memory shared with it.
        struck_before: `hpo.execution.limits.oom_kills` when it was started.
        running: The trial it has, by what it has said so far.
        ready: Whether it has loaded the study's modules and data.
        since: The monotonic clock when it was started.
    """

    label: str
    slot: Slot
    process: ForkServerProcess
    channel: Connection[Stop, Message]
    pulse: Pulse
    struck_before: int
    running: Running | None = None
    ready: bool = False
    since: float = field(default_factory=time.monotonic)
    _gone_by: float | None = None
    _killed_for: tuple[Running | None, Verdict] | None = None

    @property
    def pid(self) -> int:
        """Its process id, and its group's."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def trial_pid(self) -> int:
        """Process id of the process that runs its trial, and that one's group's; 0 where there is none."""
        return int(self.pulse[PROCESS])

    @property
    def advanced(self) -> bool:
        """Whether it has finished an epoch of its latest trial."""
        return bool(self.pulse[ADVANCED])

    def messages(self) -> Iterator[Message]:
        """What it has said since it was last heard."""
        with contextlib.suppress(EOFError, OSError):  # closed at its end; the process's end tells how
            while self.channel.poll():
                message = self.channel.recv()
                if not isinstance(message, EpochsEnded):  # those are said inside a trial, all others around it
                    self.running = None
                if isinstance(message, Ready):
                    self.ready = True
                elif isinstance(message, Started):
                    self.running = Running(message.number, message.spent_s, time.monotonic())
                elif isinstance(message, Leaving):
                    self._gone_by = time.monotonic() + message.within_s
                yield message

    def tell(self, stop: Stop) -> None:
        """Ask it to stop; one that is gone needs no telling."""
        with contextlib.suppress(OSError):
            self.channel.send(stop)

    def hold_to(self, limits: Limits, grace: float, now: float) -> bool:
        """End what has gone beyond a limit, politely first; True if it was killed for that just now.

        Args:
            limits: What a trial may use.
            grace: Seconds between the request and the kill.
            now: The monotonic clock.
        """
        if self.running is None:
            return self._hold_idle(limits, now)
        running = self.running
        if running.verdict is None:
            spent = running.spent_s + now - running.since
            idle = now - max(running.since, self.pulse[BEAT])
            running.verdict = limits.broken(self.pid, spent_s=spent, idle_s=idle)
            if running.verdict is not None:
                running.kill_at = now + grace
                self.tell(Stop(running.number, running.verdict))
        return running.verdict is not None and now >= running.kill_at and self.kill(running.verdict)

    def _hold_idle(self, limits: Limits, now: float) -> bool:
        """As `hold_to`, without a trial: while it loads modules and data, and when it is about to end."""
        if self._gone_by is not None:
            return now > self._gone_by and self.kill()
        broken = None if self.ready else limits.broken(self.pid, spent_s=0.0, idle_s=now - self.since)
        if broken is None:
            return False
        return self.kill(Verdict(LOST, f"while it loaded the study's modules and data, {broken.reason}"))

    def excuse(self, now: float) -> None:
        """Count no time until now against its trial: it could not get on."""
        if self.running is not None and self.running.verdict is None:
            # Time before the trouble counts; the last batch tells when that was.
            before = max(self.running.since, min(now, self.pulse[BEAT])) - self.running.since
            self.running.spent_s += before
            self.running.since = now

    def kill(self, verdict: Verdict = _AT_ONCE) -> bool:
        """End it with all its processes, for a reason; True if that had not been done before."""
        first = self._killed_for is None
        if self._killed_for is None:
            self._killed_for = (self.running, verdict)
        kill_group(self.pid)
        self._end_trial_process()
        return first

    def _end_trial_process(self) -> None:
        """Kill the process of its trial with all that it started, and wait for its end: it holds the lease."""
        if not self.trial_pid:
            return
        kill_group(self.trial_pid, only_group=True)
        deadline = time.monotonic() + _PATIENCE
        while process_start(self.trial_pid) is not None and time.monotonic() < deadline:
            time.sleep(_LOOK)

    def bury(self) -> Verdict | None:
        """Clean up after it has ended: what it left running, and our end of the channel.

        Returns:
            The verdict over what it held; None where it ended in order, and held nothing.
        """
        kill_group(self.pid, only_group=True)
        self._end_trial_process()
        self.process.join()
        self.channel.close()
        if self._killed_for is not None:
            running, verdict = self._killed_for
            # It may have ended that trial after all, and taken another, which is not to blame.
            return verdict if running is self.running or not verdict.final else _AT_ONCE
        if not self.process.exitcode and self.running is None:
            return None
        return Verdict(LOST, death_of(self.process.exitcode, self.struck_before))
