"""A worker: one process on one device that loads what all trials share, and forks a process for each trial.

A trial's process ends with the trial, and with it all that the study's code has changed in it: global settings,
threads, child processes, memory that is still held. So a trial's value depends on the trial alone. The fork costs
milliseconds, and shares modules and data with the worker.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final, NoReturn

import optuna

from hpo.execution.limits import kill_group
from hpo.execution.messages import PROCESS, Leaving, Message, Pulse, Ready, Stop, WorkerOrder, send
from hpo.execution.trial_process import Ended, TrialProcess, end_forks_at_sigterm, fail, obey
from hpo.execution.warm import warm_up
from hpo.storage.ledger import Owner
from hpo.study.folders import redirect_output
from hpo.study.open_study import load_study
from hpo.study.standing import standing_of

#: Seconds that a trial's process may take to end when its trial has: threads of the study's may hold it up.
_LINGER: Final = 5.0
_FORK: Final = multiprocessing.get_context("fork")


def work(order: WorkerOrder, channel: Connection[Message, Stop], pulse: Pulse) -> None:
    """Run a worker in its own process; the exit code is 0 when it ended in order.

    Args:
        order: What to do.
        channel: To the supervisor: messages out, `Stop` in. When it closes, the supervisor is gone, which counts
            as being asked to leave.
        pulse: Shows that the worker advances.
    """
    _detach()
    end_forks_at_sigterm()
    if order.slot.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = order.slot.visible
    order.log.parent.mkdir(parents=True, exist_ok=True)
    with redirect_output(order.log), _woken() as wake:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            _check_preload()
            in_order = _Worker(order, channel, pulse, wake).run()
        except Exception as error:  # noqa: BLE001 - every error is sent to the supervisor
            traceback.print_exc()
            fail(channel, error)
            in_order = False
        send(channel, Leaving())
    if not in_order:
        sys.exit(1)


def _detach() -> None:
    """Own process group, so that the terminal's Ctrl-C reaches the supervisor alone."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextlib.contextmanager
def _woken() -> Iterator[int]:
    """A descriptor on which the number of each SIGTERM (a request to leave) and SIGCHLD arrives as a byte."""
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    try:
        yield wake
    finally:
        signal.set_wakeup_fd(-1)
        os.close(wake)
        os.close(waker)


def _check_preload() -> None:
    # The fork server passes over a preload that fails, and its workers would just be slow.
    if "hpo.execution.launchers.preload" not in sys.modules:
        raise RuntimeError(
            "the fork server could not import its preload; "
            "`python -c 'import hpo.execution.launchers.preload'` says why"
        )


class _Worker:
    def __init__(self, order: WorkerOrder, channel: Connection[Message, Stop], pulse: Pulse, wake: int) -> None:
        self._channel = channel
        self._pulse = pulse
        self._wake = wake
        self._leaving = False
        # Of this process, which takes no trial; the processes that do put themselves in its place.
        owner = Owner.current(worker=order.label, device=order.slot.label)
        self._opened = replace(load_study(order.spec, owner), scheduler=order.scheduler)
        builder, self._forkable = warm_up(order.spec)
        self._trial = TrialProcess(order, self._opened, builder, channel, pulse)

    def run(self) -> bool:
        """Have trials trained until there are none left, or the worker is asked to leave; whether all is well."""
        send(self._channel, Ready())
        if not self._forkable and not self._is_asked_to_leave():
            # This process trains one trial itself, and the supervisor starts another for the next.
            self._opened.storage.close()
            signal.set_wakeup_fd(-1)
            obey(self._channel, self._trial.request)
            return self._trial.run() is not Ended.FAILED
        self._opened.storage.rehearse(self._opened.study_id)
        # What deciding needs is imported once, and not by each trial's process.
        self._opened.scheduler.next(standing_of(self._opened))
        ended = Ended.TRIAL
        while ended is Ended.TRIAL and not self._is_asked_to_leave():
            # Each trial's process inherits what is known by now, and reads what is new.
            self._opened.study.get_trials(deepcopy=False)
            self._opened.storage.close()  # connections can't be shared
            ended = self._fork()
        return ended is not Ended.FAILED

    def _fork(self) -> Ended:
        """Let a process of its own take a trial; where it dies, this one dies alike: the supervisor settles it."""
        ours, theirs = _FORK.Pipe()
        process = _FORK.Process(target=_in_fork, args=(self._trial, ours, theirs))
        process.start()
        theirs.close()
        with ours:
            ended = self._wait(process, ours)
        if ended is None:
            process.join()
            _die_like(process.exitcode or 0)
        process.join(_LINGER)
        assert process.pid is not None
        kill_group(process.pid, only_group=True)  # what its trial has left running
        process.join()
        process.close()
        self._pulse[PROCESS] = 0.0
        return ended

    def _wait(self, process: BaseProcess, ours: Connection[Stop, Ended]) -> Ended | None:
        """Pass orders on until the process says why it ends; None where it ends without a word."""
        while True:
            ready = connection.wait([ours, self._wake, *self._heard()])
            if ours in ready:
                with contextlib.suppress(EOFError, OSError):
                    return ours.recv()
                return None
            if self._channel in ready:
                self._pass_on(ours)
            if self._wake in ready and self._was_terminated():
                self._ask_to_leave(ours)
            # A process that its study has forked may hold the other end open.
            if process.exitcode is not None and not ours.poll():
                return None

    def _heard(self) -> list[Connection[Message, Stop]]:
        return [] if self._leaving else [self._channel]

    def _pass_on(self, ours: Connection[Stop, Ended]) -> None:
        try:
            stop = self._channel.recv()
        except (EOFError, OSError):  # the supervisor is gone
            stop = Stop()
        if stop.verdict is None:
            self._ask_to_leave(ours)
        else:
            with contextlib.suppress(OSError):
                ours.send(stop)

    def _ask_to_leave(self, ours: Connection[Stop, Ended]) -> None:
        self._leaving = True
        with contextlib.suppress(OSError):
            ours.send(Stop())

    def _is_asked_to_leave(self) -> bool:
        """Whether that was asked while no trial ran; what was asked about a trial came too late."""
        if connection.wait([self._wake], 0) and self._was_terminated():
            self._leaving = True
        with contextlib.suppress(EOFError, OSError):
            while not self._leaving and self._channel.poll():
                self._leaving = self._channel.recv().verdict is None
            return self._leaving
        return True

    def _was_terminated(self) -> bool:
        return signal.SIGTERM in os.read(self._wake, 4096)


def _in_fork(trial: TrialProcess, ours: Connection[Any, Any], theirs: Connection[Any, Any]) -> None:
    ours.close()
    os.setpgid(0, 0)  # so that all that it starts can be ended with it
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    obey(theirs, trial.request)
    theirs.send(trial.run())


def _die_like(exitcode: int) -> NoReturn:
    """End as another process has, without a word: it may have died inside one."""
    if exitcode < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-exitcode, signal.SIG_DFL)
        os.kill(os.getpid(), -exitcode)
    os._exit(max(exitcode, 0))
