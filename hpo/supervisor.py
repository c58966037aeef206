"""The supervisor: starts workers, hears them, holds them to their limits, and passes on requests to stop."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Final

from hpo.devices import Slot
from hpo.failures import Failures
from hpo.limits import Limits, Running, death_of, kill_group, oom_kills
from hpo.notice import Notice
from hpo.recovery import LOST, STOPPED, Settled, Verdict
from hpo.study import OpenStudy
from hpo.upkeep import Upkeep
from hpo.worker import ADVANCED, BEAT, Message, Pulse, Started, Stop, WorkerOrder, work

#: Seconds between two looks at limits.
_TICK: Final = 1.0
#: Seconds that a worker has to put down a trial that broke a limit.
_GRACE: Final = 30.0
_HANG_UP: Final = b"h"
_SIGNALS: Final = {signal.SIGINT: b"!", signal.SIGTERM: b"!", signal.SIGHUP: _HANG_UP}


#: Called with who says it and what is said.
Reporter = Callable[[str, "Message | Settled | Notice"], None]


class Ending(Enum):
    """Why the supervisor's run ended."""

    DONE = "done"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"


@dataclass
class _Child:
    label: str
    slot: Slot
    process: ForkServerProcess
    channel: Connection[Stop, Message]
    pulse: Pulse
    struck_before: int
    running: Running | None = None
    killed_for: Verdict | None = None

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self, verdict: Verdict) -> None:
        """End it with all its processes."""
        self.killed_for = verdict
        kill_group(self.pid)


class Supervisor:
    """Runs a study with workers of its own until all its trials have come to their end.

    Args:
        opened: The study; this process owns no trial.
        slots: A device and threads for each worker.
        context: From `hpo.forkserver.start_fork_server`.
        report: Called with a worker's label and each message of its; an OSError of it means that nobody reads
            any more, which is a request to stop.
        timeout: Seconds until workers are asked to put their trials down; None for no limit.
        grace: Seconds that a worker has to put down a trial that broke a limit, before it is killed.
    """

    def __init__(
        self,
        opened: OpenStudy,
        slots: Sequence[Slot],
        context: ForkServerContext,
        report: Reporter,
        timeout: float | None = None,
        grace: float = _GRACE,
    ) -> None:
        self._opened = opened
        self._slots = list(slots)
        self._context = context
        self._reporter = report
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._grace = grace
        self._limits = Limits.of(opened.spec.study)
        self._upkeep = Upkeep(opened, self._tell)
        self._failures = Failures(opened, len(self._slots))
        self._children: list[_Child] = []
        self._ending = Ending.DONE
        self._asked = 0
        self._next_tick = 0.0
        self._wake, self._waker = socket.socketpair()

    def run(self) -> Ending:
        """Work until every trial has ended, the time is over, or a signal comes.

        Trials that run elsewhere are waited for: should their worker die, they go on here.

        Raises:
            StudyError: The study can't go on: its trials fail alike from the start, or workers keep dying.
        """
        with self._handled_signals():
            try:
                self._refill()
                while self._children or (self._ending is Ending.DONE and self._upkeep.is_more_to_come()):
                    self._wait()
            finally:
                self._kill_all()
        return self._ending

    def _refill(self) -> None:
        """Start workers where there is room for them and something to do."""
        taken = [child.label for child in self._children]
        free = [(f"worker-{n}", slot) for n, slot in enumerate(self._slots, 1) if f"worker-{n}" not in taken]
        if self._ending is Ending.DONE and free:
            for label, slot in free[: self._upkeep.claimable()]:
                self._start(label, slot)

    def _start(self, label: str, slot: Slot) -> None:
        ours, theirs = self._context.Pipe()
        log = self._opened.spec.output_dir / "logs" / f"{socket.gethostname()}-{label}.log"
        order = WorkerOrder(self._opened.spec, label, slot, log)
        pulse = self._context.RawArray("d", 2)
        # Not a daemon: those may not have DataLoader workers.
        process = self._context.Process(target=work, args=(order, theirs, pulse), name=label, daemon=False)
        struck = oom_kills()
        process.start()
        theirs.close()
        self._children.append(_Child(label, slot, process, ours, pulse, struck))

    # ---- what happens

    def _wait(self) -> None:
        """Wait for the next thing to happen, and deal with all that has."""
        sources: list[Any] = [self._wake, *(child.channel for child in self._children)]
        sources += [child.process.sentinel for child in self._children]
        now = time.monotonic()
        until = self._next_tick if self._deadline is None else min(self._next_tick, self._deadline)
        ready = connection.wait(sources, max(0.0, until - now))
        if self._wake in ready:
            self._on_signal(self._wake.recv(64))
        for child in list(self._children):
            if child.channel in ready:
                self._drain(child)
            if child.process.sentinel in ready:
                self._drain(child)
                self._on_end(child)
        if time.monotonic() >= self._next_tick:
            self._tick()

    def _tick(self) -> None:
        """Look after what nobody tells: limits, the deadline, workers elsewhere."""
        now = time.monotonic()
        self._next_tick = now + _TICK
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._ask_to_stop(Ending.TIMEOUT)
        for child in self._children:
            if child.running is not None:
                self._hold_to_limits(child, child.running, now)
        self._upkeep.look(now)
        self._refill()

    def _drain(self, child: _Child) -> None:
        try:
            while child.channel.poll():
                self._on_message(child, child.channel.recv())
        except (EOFError, OSError):
            pass  # closed at its end; the sentinel tells how it ended

    def _on_message(self, child: _Child, message: Message) -> None:
        child.running = None
        if isinstance(message, Started):
            child.running = Running.begin(message.number, message.spent_s)
        self._tell(child.label, message)
        self._failures.hear(message)

    def _on_end(self, child: _Child) -> None:
        self._children.remove(child)
        child.channel.close()
        child.process.join()
        if child.process.exitcode or child.running is not None:
            reason = death_of(child.process.exitcode, child.struck_before)
            verdict = child.killed_for or Verdict(LOST, reason)
            self._upkeep.settle(child.label, child.pid, verdict)
            # One that got on with its trial before it was taken from us (a machine that is lent) is no fault.
            if self._ending is Ending.DONE and not child.pulse[ADVANCED]:
                self._failures.died(verdict)
        self._refill()

    def _hold_to_limits(self, child: _Child, running: Running, now: float) -> None:
        if running.verdict is None:
            idle = now - max(running.since, child.pulse[BEAT])
            running.verdict = self._limits.broken(child.pid, spent_s=running.spent(now), idle_s=idle)
            if running.verdict is not None:
                running.kill_at = now + self._grace
                self._send(child, Stop(running.number, running.verdict))
        elif now >= running.kill_at and child.killed_for is None:
            child.kill(running.verdict)

    def _tell(self, label: str, message: Message | Settled | Notice) -> None:
        try:
            self._reporter(label, message)
        except OSError:  # the terminal has been closed, or what read our output has ended
            self._reporter = lambda *_: None
            self._interrupt()

    # ---- stopping

    def _send(self, child: _Child, stop: Stop) -> None:
        with contextlib.suppress(OSError):  # it is gone; the sentinel tells
            child.channel.send(stop)

    def _ask_to_stop(self, ending: Ending) -> None:
        self._ending = ending
        for child in self._children:
            self._send(child, Stop())

    def _on_signal(self, received: bytes) -> None:
        # A terminal that closes may send its hang-up twice; that is no second request.
        self._asked += len(received) - received.count(_HANG_UP)
        if self._asked > 1:
            self._ending = Ending.INTERRUPTED
            self._kill_all()
        else:
            self._interrupt()

    def _wake_up(self, number: int, _: object) -> None:
        self._waker.send(_SIGNALS[signal.Signals(number)])

    def _interrupt(self) -> None:
        if self._ending is not Ending.INTERRUPTED:
            self._ask_to_stop(Ending.INTERRUPTED)
            self._tell("", Notice("stopping: each worker finishes its batch and checkpoints; once more: at once"))

    def _kill_all(self) -> None:
        """End every worker left, with its children, and give their trials back."""
        children, self._children = self._children, []
        for child in children:
            child.kill(child.killed_for or Verdict(STOPPED, "its worker was stopped at once"))
        for child in children:
            self._drain(child)
            child.process.join()
            child.channel.close()
            assert child.killed_for is not None
            self._upkeep.settle(child.label, child.pid, child.killed_for)

    @contextlib.contextmanager
    def _handled_signals(self) -> Iterator[None]:
        """Turn signals into bytes on a socket for the time of the run; handlers exist in the main thread only.

        One that is ignored stays so: `nohup` asks for that.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        kept = {
            number: signal.signal(number, lambda got, _: self._waker.send(_SIGNALS[signal.Signals(got)]))
            for number in heard
        }
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)
            self._wake.close()
            self._waker.close()
