"""The supervisor: starts workers, hears them, replaces those that die, and passes on requests to stop."""

from __future__ import annotations

import contextlib
import os
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

from optuna.trial import TrialState

from hpo.devices import Slot
from hpo.errors import StudyError
from hpo.objective import TrialReport
from hpo.outcome import Outcome
from hpo.study import OpenStudy
from hpo.worker import STOP, Message, Started, WorkerOrder, work

#: This many trials that fail alike before any has succeeded stop the study.
_ALIKE: Final = 3
#: This many deaths for each worker, without a trial finished in between, stop the study.
_DEATHS: Final = 3
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Reporter = Callable[[str, Message], None]


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
    channel: Connection[str, Message]
    busy: bool = False


class Supervisor:
    """Runs a study with workers of its own until nothing is left to do.

    Args:
        opened: The study; this process owns no trial.
        slots: A device and threads for each worker.
        context: From `hpo.forkserver.start_fork_server`.
        report: Called with a worker's label and each message of its.
        timeout: Seconds until workers are asked to put their trials down; None for no limit.
    """

    def __init__(
        self,
        opened: OpenStudy,
        slots: Sequence[Slot],
        context: ForkServerContext,
        report: Reporter,
        timeout: float | None = None,
    ) -> None:
        self._opened = opened
        self._slots = list(slots)
        self._context = context
        self._report = report
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._children: list[_Child] = []
        self._ending = Ending.DONE
        self._failures: list[str] = []
        self._succeeded = False
        self._deaths = 0
        self._signalled = 0
        self._wake, self._waker = socket.socketpair()

    def run(self) -> Ending:
        """Work until the study's budget is used up, the time is over, or a signal comes.

        Raises:
            StudyError: The study can't go on: its trials fail alike from the start, or workers keep dying.
        """
        with self._handled_signals():
            try:
                self._fill(self._slots)
                while self._children:
                    self._wait()
                    if not self._children and self._ending is Ending.DONE and self._waiting():
                        self._fill(self._slots[: self._waiting()])
            finally:
                self._kill()
        return self._ending

    def _waiting(self) -> int:
        return self._opened.count(TrialState.WAITING)

    def _fill(self, slots: Sequence[Slot]) -> None:
        for index, slot in enumerate(slots, start=1):
            self._start(f"worker-{index}", slot)

    def _start(self, label: str, slot: Slot) -> None:
        ours, theirs = self._context.Pipe()
        log = self._opened.spec.output_dir / "logs" / f"{socket.gethostname()}-{label}.log"
        order = WorkerOrder(self._opened.spec, label, slot, log)
        # Not a daemon: those may not have DataLoader workers.
        process = self._context.Process(target=work, args=(order, theirs), name=label, daemon=False)
        process.start()
        theirs.close()
        self._children.append(_Child(label, slot, process, ours))

    # ---- what happens

    def _wait(self) -> None:
        sources: list[Any] = [self._wake, *(child.channel for child in self._children)]
        sources += [child.process.sentinel for child in self._children]
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        ready = connection.wait(sources, left)
        if self._wake in ready:
            self._on_signal(self._wake.recv(64))
        elif not ready:
            self._deadline = None
            self._ask_to_stop(Ending.TIMEOUT)
        for child in list(self._children):
            if child.channel in ready:
                self._drain(child)
            if child.process.sentinel in ready:
                self._drain(child)
                self._on_end(child)

    def _drain(self, child: _Child) -> None:
        try:
            while child.channel.poll():
                self._on_message(child, child.channel.recv())
        except (EOFError, OSError):
            pass  # closed at its end; the sentinel tells how it ended

    def _on_message(self, child: _Child, message: Message) -> None:
        child.busy = isinstance(message, Started)
        self._report(child.label, message)
        if isinstance(message, TrialReport) and message.outcome is not None:
            self._deaths = 0
            self._judge(message)

    def _judge(self, report: TrialReport) -> None:
        """Stop a study whose first trials all fail in the same way."""
        if report.outcome not in {Outcome.ERROR, Outcome.OUT_OF_MEMORY}:
            self._succeeded = True
        if self._succeeded:
            return
        self._failures.append(report.reason)
        if len(self._failures) >= _ALIKE and len(set(self._failures)) == 1:
            raise StudyError(
                f"the first {_ALIKE} trials failed alike:\n  {report.reason}\n"
                f"  fix: see the log of trial {report.number} in {self._opened.spec.output_dir / 'trials'}"
            )

    def _on_end(self, child: _Child) -> None:
        self._children.remove(child)
        child.channel.close()
        child.process.join()
        if child.process.exitcode == 0 and not child.busy:
            return
        self._opened.requeue_dead()
        if self._ending is not Ending.DONE:
            return
        self._deaths += 1
        if self._deaths >= _DEATHS * len(self._slots):
            log = self._opened.spec.output_dir / "logs"
            raise StudyError(f"{self._deaths} workers died without a trial finished in between\n  fix: see {log}")
        self._start(child.label, child.slot)

    # ---- stopping

    def _ask_to_stop(self, ending: Ending) -> None:
        self._ending = ending
        for child in self._children:
            with contextlib.suppress(OSError):
                child.channel.send(STOP)

    def _on_signal(self, received: bytes) -> None:
        self._signalled += len(received)
        if self._signalled == 1:
            self._ask_to_stop(Ending.INTERRUPTED)
        else:
            self._ending = Ending.INTERRUPTED
            self._kill()

    def _kill(self) -> None:
        """End every worker left, with its children, and give their trials back."""
        for child in self._children:
            try:
                os.killpg(child.process.pid or 0, signal.SIGKILL)
            except ProcessLookupError:
                child.process.kill()  # it has not made its group yet
        for child in self._children:
            child.process.join()
            child.channel.close()
        if self._children:
            self._children = []
            self._opened.requeue_dead()

    @contextlib.contextmanager
    def _handled_signals(self) -> Iterator[None]:
        """Turn signals into bytes on a socket for the time of the run; handlers exist in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kept = {number: signal.signal(number, lambda *_: self._waker.send(b"!")) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)
            self._wake.close()
            self._waker.close()
