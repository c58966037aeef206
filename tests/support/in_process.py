"""Workers that are threads of this process: the code that runs trials, on a real storage, without a process.

For tests in which no process is the point. One worker trains at a time, since a trial has its process's random
numbers, threads and output to itself. A thread can't be killed: it is asked, and waited for. So what needs an end
by force (a trial that hangs, one that ends its process) is tested with `LocalLauncher`.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from typing import Any, TextIO, TypeVar

import pytest

from hpo.checks.checks import check_study
from hpo.config.spec import StudySpec
from hpo.execution.checking import Checked
from hpo.execution.launchers.launcher import Said, WorkerEnded
from hpo.execution.launchers.slots import SlotLauncher
from hpo.execution.messages import Command, Leaving, Message, Ready, WorkerOrder, received, send
from hpo.execution.pulse import ADVANCED, BEAT, BEATEN, DECIDING, EXCUSED, PROCESS, PULSE_LENGTH, Held, held_by
from hpo.execution.trial_process import TrialProcess, WhyOver, fail, pass_on
from hpo.search.schedulers.scheduler import Wait
from hpo.storage.ledger import Lease, Owner, running_trials
from hpo.study.folders import redirect_output
from hpo.study.open_study import OpenStudy, load_study
from hpo.study.taking import Taker
from hpo.trial.builder import Builder
from hpo.trial.resources import study_slots
from hpo.trial.stopping import StopRequest

#: Held by the worker that opens its study. It reads Python's source, and two threads that do so, by `ast.parse` or
#: by `inspect.signature`, may end in `SystemError: AST constructor recursion depth mismatch`, a fault of CPython.
_LOADING = threading.Lock()
#: Held by the worker that trains.
_TURN = threading.Lock()
#: Seconds after which a worker that waits for its turn looks whether it is asked to leave.
_LOOK = 0.02

T = TypeVar("T")


class InProcessWorker:
    """A worker's thread, started."""

    def __init__(self, order: WorkerOrder) -> None:
        self.label = order.label
        self.pid = os.getpid()
        self.channel: Connection[Any, Message]
        self.channel, theirs = Pipe()
        self._order = order
        self._pulse = [0.0] * PULSE_LENGTH
        self._request = StopRequest()
        self._end: WorkerEnded | None = None
        self._thread = threading.Thread(target=self._live, args=(theirs,), name=order.label, daemon=True)
        self._thread.start()

    @property
    def trial_pid(self) -> int:
        return int(self._pulse[PROCESS])

    @property
    def beat(self) -> float:
        return self._pulse[BEAT]

    @property
    def is_deciding(self) -> bool:
        return bool(self._pulse[DECIDING])

    @property
    def advanced(self) -> bool:
        return bool(self._pulse[ADVANCED])

    @property
    def held(self) -> Held | None:
        return held_by(self._pulse)

    def show_beaten(self, at: float) -> None:
        self._pulse[BEATEN] = at

    def show_excused(self, seconds: float) -> None:
        self._pulse[EXCUSED] += seconds

    def ask(self, command: Command) -> None:
        pass_on(command, self._request)

    def kill(self) -> None:
        self._request.leave()
        self._thread.join()

    def changes(self) -> Iterator[Said | WorkerEnded]:
        end = self._end
        for message in received(self.channel):
            yield Said(self, message)
        if end is not None:
            self._thread.join()
            self.channel.close()
            yield end

    def _live(self, channel: Connection[Message, Any]) -> None:
        try:
            cause, in_order = self._work(channel)
        except Exception as error:  # noqa: BLE001 - the supervisor hears of it, whatever it is
            fail(channel, error)
            cause, in_order = f"its thread ended with {type(error).__name__}: {error}", False
        send(channel, Leaving())
        self._end = WorkerEnded(self, cause, in_order)
        channel.close()

    def _work(self, channel: Connection[Message, Any]) -> tuple[str, bool]:
        """What `hpo.execution.worker` does, with each trial in this thread; how it ended, and whether in order."""
        order, ended = self._order, WhyOver.ASKED
        order.log.parent.mkdir(parents=True, exist_ok=True)
        owner = Owner.current(worker=self.label, device=order.slot.label)
        with _LOADING:
            loaded = load_study(order.spec, owner)
        with replace(loaded, scheduler=order.scheduler) as opened:
            builder = self._in_turn(self._loaded)
            if builder is not None:
                send(channel, Ready())
                ended = WhyOver.TRIAL
            while builder is not None and ended is WhyOver.TRIAL:
                ended = self._in_turn(lambda: self._next(opened, builder, channel)) or WhyOver.ASKED
                self._pulse[PROCESS] = 0.0
            self._give_back(opened)
        return f"its thread ended: {ended.value}", ended is not WhyOver.FAILED

    def _next(self, opened: OpenStudy, builder: Builder, channel: Connection[Message, Any]) -> WhyOver | None:
        """Take a trial and train it; None where there is none left, or it is asked to leave."""
        taker = Taker(opened)
        taken: Lease | Wait | None = Wait()
        self._pulse[PROCESS] = self.pid
        while isinstance(taken, Wait):
            if self._request.leaving:
                return None
            taken = taker.take()
            if taken is None:
                return None
            if isinstance(taken, Wait):
                self._request.wait(_LOOK)
        trial = TrialProcess(self._order, opened, builder, channel, self._pulse, self._request)
        return trial.run(taken, partial(taker.extended, taken.trial_id)).ended

    def _loaded(self) -> Builder:
        builder = Builder(self._order.spec)
        builder.import_targets()
        return builder

    def _give_back(self, opened: OpenStudy) -> None:
        """Requeue what an error has left it: its process lives, so nothing shows others that it is lost."""
        with opened.storage.engine.connect() as conn:
            running = running_trials(conn, opened.study_id)
        for trial in running:
            if trial.lease is not None and (trial.lease.pid, trial.lease.worker) == (self.pid, self.label):
                opened.storage.requeue(trial.trial_id, "its worker failed")

    def _in_turn(self, do: Callable[[], T]) -> T | None:
        """Do something alone, with its output in this worker's log; None where it is asked to leave before."""
        while not _TURN.acquire(timeout=_LOOK):
            if self._request.leaving:
                return None
        try:
            with redirect_output(self._order.log), _printed_below():
                return do()
        finally:
            _TURN.release()


@contextlib.contextmanager
def _printed_below() -> Iterator[None]:
    """Let threads print to the process's own output, as a process does; the main thread prints where it did."""
    with (
        open(1, "w", buffering=1, closefd=False) as out,
        open(2, "w", buffering=1, closefd=False) as err,
        contextlib.redirect_stdout(_ByThread(sys.stdout, out)),
        contextlib.redirect_stderr(_ByThread(sys.stderr, err)),
    ):
        yield


class _ByThread(io.TextIOBase):
    def __init__(self, main: TextIO, others: TextIO) -> None:
        self._main, self._others = main, others

    def write(self, text: str) -> int:
        return self._now.write(text)

    def flush(self) -> None:
        self._now.flush()

    @property
    def _now(self) -> TextIO:
        return self._main if threading.current_thread() is threading.main_thread() else self._others


class InProcessLauncher(SlotLauncher[InProcessWorker]):
    """Starts workers in this process; see `hpo.execution.launchers.launcher.Launcher`."""

    def _start(self, order: WorkerOrder) -> InProcessWorker:
        return InProcessWorker(order)

    def wait(self, seconds: float, wake: socket.socket) -> bool:
        return wake in connection.wait([wake, *(worker.channel for worker in self._workers)], seconds)


@contextlib.contextmanager
def workers_in_process() -> Iterator[None]:
    """Let `hpo run` and `hpo.run` of this process check studies, and run their workers, in this process."""

    def checked_here(spec: StudySpec, *, here: bool = True) -> Checked:
        with contextlib.redirect_stdout(sys.stderr):
            return Checked(check_study(spec), study_slots(spec))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpo.execution.launchers.forkserver.start_fork_server", lambda _: None)
        patch.setattr("hpo.execution.checking.checked", checked_here)
        patch.setattr("hpo.execution.launchers.local.LocalLauncher", InProcessLauncher)
        yield
