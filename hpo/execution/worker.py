"""A worker: one process on one device that loads what all trials share, and forks a process for each trial.

The worker asks the scheduler and takes the trials, in the name of the processes that train them: the worker has
everything that a decision needs in memory, while a new fork would have to load it first.

A trial's process ends with the trial, and with it everything that the study's code has changed in it: global
settings, threads, child processes, memory. So a trial's value depends on the trial alone. The fork takes
milliseconds and shares modules and data with the worker. The process of a trial that pauses may be kept until that
trial resumes (`hpo.execution.kept`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, Final

import optuna
from optuna.exceptions import StorageInternalError

from hpo.errors import LeaseLostError, StudyError
from hpo.execution.messages import Command, Leaving, Message, Ready, Stop, WorkerOrder, send
from hpo.execution.pulse import ENDING, PROCESS, Pulse
from hpo.execution.standby import Processes, Standby
from hpo.execution.trial_process import (
    Assignment,
    Extension,
    GrantEnds,
    Orders,
    Over,
    TrialProcess,
    WhyOver,
    end_forks_at_sigterm,
    fail,
)
from hpo.execution.warm import warm_up
from hpo.search.schedulers.scheduler import Wait
from hpo.storage.ledger import Lease, Owner
from hpo.study.folders import print_error, redirect_output
from hpo.study.open_study import load_study
from hpo.study.standing import standing_of
from hpo.study.taking import Taker
from hpo.trial.process_forks import die_like

#: Seconds before a scheduler that says to wait is asked again, at first and at most.
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0


def work(order: WorkerOrder, channel: Connection[Message, Command], pulse: Pulse) -> None:
    """Run a worker in its own process; the exit code is 0 when it ended in order.

    Args:
        order: What to do.
        channel: To the supervisor: messages out, commands in. When it closes, the supervisor is gone, which counts
            as a request to leave.
        pulse: Shows that the worker advances.
    """
    _detach()
    end_forks_at_sigterm()
    if order.slot.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = order.slot.visible
    try:
        order.log.parent.mkdir(parents=True, exist_ok=True)
        order.log.open("ab").close()
    except OSError as error:
        fail(channel, StudyError(f"its log {order.log} can't be written: {error.strerror or error}"))
        send(channel, Leaving())
        sys.exit(1)
    with redirect_output(order.log), _woken() as wake:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            _check_preload()
            in_order = _Worker(order, channel, pulse, wake).run()
        except Exception as error:  # noqa: BLE001 - every error is sent to the supervisor
            print_error(traceback.format_exc())
            fail(channel, error)
            in_order = False
        send(channel, Leaving())
    if not in_order:
        sys.exit(1)


def _detach() -> None:
    """Move to a process group of its own, so that a Ctrl-C at the terminal reaches the supervisor alone."""
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
    # The fork server ignores a preload that fails; its workers would merely be slow.
    if "hpo.execution.launchers.preload" not in sys.modules:
        raise RuntimeError(
            "the fork server could not import its preload; "
            "`python -c 'import hpo.execution.launchers.preload'` says why"
        )


class _Worker:
    def __init__(self, order: WorkerOrder, channel: Connection[Message, Command], pulse: Pulse, wake: int) -> None:
        self._channel = channel
        self._pulse = pulse
        self._wake = wake
        self._leaving = False
        self._unassigned: Lease | None = None  # a trial that was taken for a process that died before it got it
        # Before a trial is taken, its process takes this one's place as the owner (`_take_as`).
        owner = Owner.current(worker=order.label, device=order.slot.label, agent=order.agent)
        self._opened = replace(load_study(order.spec, owner, order.pooler), scheduler=order.scheduler)
        self._taker = Taker(self._opened)
        self._free_since = time.monotonic()
        builder, left = warm_up(order.spec)
        self._ready = Ready(left, time.monotonic() - self._free_since)
        self._trial = TrialProcess(order, self._opened, builder, channel, pulse)
        assert self._opened.storage.owner is not None
        self._processes = Processes(self._trial, self._opened.storage.owner)

    def run(self) -> bool:
        """Have trials trained until none is left or the worker is asked to leave; False if it can't continue."""
        send(self._channel, self._ready)
        if self._ready.left is not None:
            return self._train_one_here()
        self._opened.storage.rehearse(self._opened.study_id)
        # Import what decisions need, and read the trials known so far, while nothing waits for it.
        self._opened.scheduler.next(standing_of(self._opened))
        self._opened.study.get_trials(deepcopy=False, states=())
        self._free_since = time.monotonic()
        try:
            return self._train_all()
        finally:
            self._processes.close()
            self._pulse[ENDING] = 0.0
            # The supervisor does not touch what is held in the name of a process that it knows as this worker's.
            if self._unassigned is None:
                self._pulse[PROCESS] = 0.0

    def _train_all(self) -> bool:
        ended = WhyOver.TRIAL
        while ended in (WhyOver.TRIAL, WhyOver.KEPT):
            self._take_as(self._processes.standby())
            lease = self._unassigned or self._take()
            if lease is None:
                return True
            process = self._processes.take(lease.trial_id)
            self._pulse[ENDING] = 0.0
            if not process.is_ready() and self._unassigned is None:
                self._unassigned = lease  # this process never got the trial: the next one trains it
                self._processes.lose(process)
                continue
            self._unassigned = None
            over = self._train(process, lease)
            ended = over.ended
            if ended is WhyOver.KEPT:
                self._processes.keep(lease.trial_id, process, over.spare or 0)
            else:
                if over.spare is not None:
                    self._processes.fit(over.spare)
                self._pulse[ENDING] = process.pid
                self._processes.end(process)
        return ended is not WhyOver.FAILED

    def _take_as(self, standby: Standby) -> None:
        """Take trials in the waiting process's name, but paused trials with a kept process in that one's name."""
        storage = self._opened.storage
        storage.owner, storage.owners = standby.owner, self._processes.owners
        self._hand_over_unassigned()
        self._pulse[PROCESS] = standby.pid

    def _train_one_here(self) -> bool:
        """Train one trial in this process, which can't be forked; the next trial gets a new worker."""
        self._pulse[PROCESS] = os.getpid()
        lease = self._take()
        if lease is None:
            return True
        self._opened.storage.close()
        Orders(self._channel, self._trial.request)
        signal.set_wakeup_fd(-1)
        if connection.wait([self._wake], 0) and self._was_terminated():  # while it took the trial
            self._trial.request.leave()
        with contextlib.closing(self._trial.peers):
            return (
                self._trial.run(lease, partial(self._taker.extended, lease.trial_id)).ended is not WhyOver.FAILED
            )

    def _take(self) -> Lease | None:
        """Take a trial; None if nothing is left to do or the worker is asked to leave."""
        pause = _FIRST_PAUSE
        while not self._is_asked_to_leave():
            taken = self._taker.take()
            if not isinstance(taken, Wait):
                return taken
            connection.wait([self._wake, *self._heard()], pause)
            self._free_since = time.monotonic()
            pause = min(2 * pause, _LONGEST_PAUSE)
        return None

    def _hand_over_unassigned(self) -> None:
        """Hold an unassigned trial, whose process died before it got the trial, in the new process's name."""
        if self._unassigned is None:
            return
        try:
            self._opened.storage.hand_over(self._unassigned.trial_id)
        except LeaseLostError:
            self._opened.storage.forget(self._unassigned.trial_id)
            self._unassigned = None

    def _train(self, standby: Standby, lease: Lease) -> Over:
        """Let the process train a trial. If it dies, so does this worker; the supervisor settles the trial."""
        self._pulse[PROCESS] = standby.pid
        self._opened.storage.rest()  # no query until the grant ends
        with contextlib.suppress(OSError):
            standby.line.send(Assignment(lease, time.monotonic() - self._free_since))
        self._processes.standby()  # for the next trial
        over = self._wait(standby, lease)
        if over is None:
            standby.process.join()
            die_like(standby.process.exitcode or 0)
        self._free_since = time.monotonic()
        self._opened.storage.forget(lease.trial_id)
        return over

    def _wait(self, standby: Standby, lease: Lease) -> Over | None:
        """Pass orders on until the process says why it trains no more; None if it ends without saying so."""
        line = standby.line
        while True:
            ready = connection.wait([line, self._wake, *self._heard()])
            if line in ready:
                try:
                    said = line.recv()
                except (EOFError, OSError):
                    return None
                if isinstance(said, Over):
                    return said
                if isinstance(said, GrantEnds):
                    self._extend(line, lease, said)
            if self._channel in ready:
                self._pass_on(line)
            if self._wake in ready and self._was_terminated():
                self._ask_to_leave(line)
            # The line may stay open after the process has ended: a process forked by the study's code may hold it.
            if standby.process.exitcode is not None and not line.poll():
                return None

    def _extend(self, line: Connection[Any, Any], lease: Lease, ends: GrantEnds) -> None:
        try:
            extension = Extension(self._taker.extended(lease.trial_id, ends.values))
        except (LeaseLostError, StorageInternalError) as error:
            extension = Extension(None, error)
        self._opened.storage.rest()
        with contextlib.suppress(OSError):
            line.send(extension)

    def _heard(self) -> list[Connection[Message, Command]]:
        return [] if self._leaving else [self._channel]

    def _pass_on(self, line: Connection[Any, Any]) -> None:
        try:
            command = self._channel.recv()
        except (EOFError, OSError):  # the supervisor is gone
            command = Stop()
        if isinstance(command, Stop):
            self._ask_to_leave(line)
        else:
            with contextlib.suppress(OSError):
                line.send(command)

    def _ask_to_leave(self, line: Connection[Any, Any]) -> None:
        self._leaving = True
        with contextlib.suppress(OSError):
            line.send(Stop())

    def _is_asked_to_leave(self) -> bool:
        """Whether the worker was asked to leave while no trial ran; commands about a trial came too late."""
        if connection.wait([self._wake], 0) and self._was_terminated():
            self._leaving = True
        with contextlib.suppress(EOFError, OSError):
            while not self._leaving and self._channel.poll():
                self._leaving = isinstance(self._channel.recv(), Stop)
            return self._leaving
        return True

    def _was_terminated(self) -> bool:
        return signal.SIGTERM in os.read(self._wake, 4096)
