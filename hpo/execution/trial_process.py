"""A trial's own process: it trains the one trial that it is given, stores the outcome, and ends.

If the trial pauses, the process may be kept, to train the same trial when that resumes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import optuna
import torch
from optuna.exceptions import StorageInternalError

from hpo.errors import HpoError, LeaseLostError, OtherCodeError
from hpo.execution.beating import trial_heartbeat
from hpo.execution.device import spare_contexts, start
from hpo.execution.kept import anonymous, release, spare
from hpo.execution.limits import death_of, oom_kills
from hpo.execution.messages import Command, End, Failed, Lost, Message, Started, WorkerOrder, send
from hpo.execution.news import News
from hpo.execution.pulse import ADVANCED, BEAT, DECIDING, Pulse, excused_in, show_free, show_held
from hpo.search.one_thread import allow_threads
from hpo.storage.attributes import GRANTS_ATTR, RETRIED_ATTR
from hpo.storage.grants import Extend, Granted
from hpo.storage.ledger import Lease
from hpo.storage.lineage import inherited_epochs
from hpo.storage.optuna_private import id_of_trial, known_of, reports_of
from hpo.study.folders import print_error
from hpo.study.open_study import OpenStudy
from hpo.study.taking import begin
from hpo.trial.builder import Builder
from hpo.trial.peers import Peers
from hpo.trial.process_forks import die_like
from hpo.trial.report import TrialReport
from hpo.trial.run import TrialRun
from hpo.trial.session import Session
from hpo.trial.stopping import StopRequest
from hpo.trial.trainer_code import TrainerCode
from hpo.trial.training_code import TrainingCode, function_code
from trainer.error_text import error_text


@dataclass(frozen=True)
class Assignment:
    """To the trial process: its trial.

    Attributes:
        lease: The lease of the trial, taken in the process's name.
        before_s: Seconds that it took to take the trial and to start the process.
    """

    lease: Lease
    before_s: float


@dataclass(frozen=True)
class GrantEnds:
    """To the worker: the trial has come to the end of its grant.

    Attributes:
        values: The values that it has reported and that are not stored yet, by epoch.
    """

    values: Mapping[int, float]


@dataclass(frozen=True)
class Extension:
    """To the trial process: the answer to `GrantEnds`.

    Attributes:
        granted: The new grant; None: the trial pauses.
        error: The storage has refused the trial, or has failed; raised in the trial process.
    """

    granted: Granted | None
    error: LeaseLostError | StorageInternalError | None = None


class WhyOver(Enum):
    """Why a trial process has stopped training."""

    TRIAL = "it has dealt with its trial"
    KEPT = "its trial has paused, and it waits for that to resume"
    ASKED = "it was asked to leave"
    FAILED = "it can't continue, and has sent the supervisor the reason"


@dataclass(frozen=True)
class Over:
    """To the worker: a trial process has stopped training.

    Attributes:
        ended: Why; the process ends too, unless it is kept.
        spare: How many idle processes the worker may have on the trial's device beside one that trains, this one
            included if it is kept; None if that is unknown.
    """

    ended: WhyOver
    spare: int | None = None


@dataclass
class TrialProcess:
    """Trains one trial.

    Attributes:
        order: The worker's order.
        opened: The study, with no connection open.
        builder: Builds the trainer; may have loaded the data already.
        channel: To the supervisor.
        pulse: Shows the supervisor which lease it holds, that it runs, and that the trial advances.
        request: Requests to stop the trial, from the worker and from this process's heartbeat.
        peers: The other processes of a trial on several devices.
    """

    order: WorkerOrder
    opened: OpenStudy
    builder: Builder
    channel: Connection[Message, Command]
    pulse: Pulse
    request: StopRequest = field(default_factory=StopRequest)
    peers: Peers = field(init=False)
    _news: News | None = None
    _at_fork: int = 0

    def __post_init__(self) -> None:
        self.peers = Peers(self.builder, self.order.slot.devices, partial(_died, oom_kills()))

    def begin_fork(self) -> None:
        """Call first in a process that was forked for a trial, while it has a single thread."""
        self._at_fork = anonymous()
        self.peers.fork()

    def run(self, lease: Lease, extend: Extend, before_s: float = 0.0) -> Over:
        """Train a trial to its end, to a pause or to a request to stop.

        Args:
            lease: The lease of the trial, taken in this process's name.
            extend: Called when the trial's grant ends.
            before_s: Seconds that it took to take the trial and to start this process.
        """
        request = self.request
        torch.set_num_threads(self.order.slot.threads)
        allow_threads(self.order.slot.threads)
        storage = self.opened.storage
        # The process that trains holds the lease.
        assert storage.owner is not None
        storage.owner = storage.owner.in_process(os.getpid())
        show_held(self.pulse, lease, time.monotonic())
        storage.excused_s = partial(excused_in, self.pulse)
        has_paused = False
        try:
            # The lease may be lost already, if this process was stopped for long after the trial was taken.
            with (
                trial_heartbeat(storage, self.pulse, request, self.order.spec.run.lost_after),
                contextlib.suppress(LeaseLostError),
            ):
                has_paused = self._train(lease, extend, before_s).paused
        except Exception as error:  # noqa: BLE001 - every error is sent to the supervisor
            print_error(traceback.format_exc())
            fail(self.channel, error)
            return Over(WhyOver.FAILED)
        finally:
            show_free(self.pulse)
            storage.close()
        if request.leaving:
            return Over(WhyOver.ASKED)
        kept = self._spare() if has_paused else 0
        return Over(WhyOver.KEPT, kept) if kept else Over(WhyOver.TRIAL, self._spare_contexts())

    def _spare(self) -> int:
        """How many processes like this one its worker may keep; 0 if this one must end."""
        if not self._may_hold_device:
            return 0
        self._news = None
        release()
        return spare(self.device, self._at_fork)

    @property
    def _may_hold_device(self) -> bool:
        """Whether a process may hold the device while it is idle.

        A training function of the study's, and the peers of a trial on several devices, need a new process each
        time.
        """
        return self.peers.size == 1 and self.order.spec.config.objective is None

    def _spare_contexts(self) -> int | None:
        return spare_contexts(self.device, ends=True) if self._may_hold_device else None

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return torch.device(self.order.slot.device)

    def start_device(self) -> None:
        """Start the device before there is a trial, unless that would change what the trial computes."""
        # cuBLAS reads the variable that deterministic mode sets only once in a process.
        deterministic = self.order.spec.trainer.deterministic or torch.are_deterministic_algorithms_enabled()
        if self._may_hold_device and not deterministic:
            start(self.device)

    def _train(self, lease: Lease, extend: Extend, before_s: float) -> TrialReport:
        trial = begin(self.opened, lease)
        grants = known_of(trial).user_attrs.get(GRANTS_ATTR, ())
        news = self._news = News(self.channel, trial.number, self.order.spec.study.metric, grants)
        self.pulse[BEAT], self.pulse[ADVANCED], self.pulse[DECIDING] = time.monotonic(), 0.0, 0.0
        epochs = max(reports_of(trial), default=inherited_epochs(trial))
        send(self.channel, Started(trial.number, lease, self._spent(trial), epochs, grants))
        code = self._code(trial)
        asked = partial(self._asked, extend, news)
        with news.of_trackers():
            run = TrialRun(self.opened, trial, code, self.device, self.request, self._beat, asked, before_s)
            report = run.run()
        news.finish()
        send(self.channel, report)
        return report

    def _code(self, trial: optuna.Trial) -> TrainingCode:
        if self.order.spec.config.objective is None:
            return TrainerCode(self.builder, self.peers)
        self.builder.import_targets()
        return function_code(self.order.spec, self.builder.resolver, trial)

    def _beat(self, session: Session) -> None:
        now = self.pulse[BEAT] = time.monotonic()
        if session.epoch > session.resumed_at:
            self.pulse[ADVANCED] = 1.0
        if self._news is not None:
            self._news.follow(session, now)

    def _asked(self, extend: Extend, news: News, values: Mapping[int, float]) -> Granted | None:
        """Call ``extend`` and report the grant; waiting for the answer does not count as time without a batch."""
        self.pulse[DECIDING] = 1.0
        try:
            granted = extend(values)
        finally:
            self.pulse[BEAT], self.pulse[DECIDING] = time.monotonic(), 0.0
        if granted is not None:
            news.extend(granted)
        return granted

    def _spent(self, trial: optuna.Trial) -> float:
        if self.order.spec.run.trial_timeout is None:
            return 0.0
        earlier = self.opened.storage.attempts_of_trial(id_of_trial(trial))[:-1]
        after = known_of(trial).user_attrs.get(RETRIED_ATTR, 0)
        return sum(attempt.seconds for attempt in earlier if attempt.attempt > after)


def _died(struck_before: int, rank: int, exitcode: int) -> None:
    """A peer has died: end this process in the same way, as happens to a trial on one device."""
    print_error(f"{death_of(exitcode, struck_before, who=f'rank {rank}')}, and so does the trial")
    die_like(exitcode)


def fail(channel: Connection[Message, Command], error: Exception) -> None:
    """Report to the supervisor the error that keeps a worker from its work."""
    text = str(error) if isinstance(error, HpoError) else error_text(error)
    send(channel, Failed(text, final=isinstance(error, OtherCodeError)))


class Orders:
    """Receives what the worker sends to its trial process: a trial, an answer about a grant, requests to stop.

    Args:
        source: The connection to the worker. Its end counts as a request to leave, and so does a SIGTERM.
        request: Gets the requests to stop the trial.
    """

    def __init__(self, source: Connection[Any, Any], request: StopRequest) -> None:
        self._source = source
        self._request = request
        self._told: queue.SimpleQueue[Assignment | Extension | None] = queue.SimpleQueue()
        signal.signal(signal.SIGTERM, lambda *_: request.leave())
        threading.Thread(target=self._listen, daemon=True).start()

    def assignment(self) -> Assignment | None:
        """Wait for the trial to train; None once the worker has closed the connection."""
        told = self._next()
        return told if isinstance(told, Assignment) else None

    def extend(self, values: Mapping[int, float]) -> Granted | None:
        """Ask the worker for a new grant (`hpo.storage.grants.Extend`); None also if the worker is gone.

        Raises:
            LeaseLostError: Another attempt has the trial.
            StorageInternalError: The storage fails.
        """
        with contextlib.suppress(OSError):  # the worker is gone
            self._source.send(GrantEnds(values))
        told = self._next()
        if not isinstance(told, Extension):
            return None
        if told.error is not None:
            raise told.error
        return told.granted

    def _next(self) -> Assignment | Extension | None:
        """The next message that is no command; None once the worker is gone."""
        told = self._told.get()
        if told is None:
            self._told.put(None)
        return told

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                told = self._source.recv()
                if isinstance(told, Command):
                    pass_on(told, self._request)
                    continue
                self._told.put(told)
        self._request.leave()
        self._told.put(None)


def pass_on(command: Command, request: StopRequest) -> None:
    """Pass one command on to a trial."""
    if isinstance(command, Lost):
        request.lose(command.lease)
    elif isinstance(command, End):
        request.end(command.lease, command.verdict)
    else:
        request.leave()


def end_forks_at_sigterm() -> None:
    """Make processes that the study's code forks end at a SIGTERM, as process pools expect.

    The signal is blocked around the fork until the child has changed its handler: a SIGTERM that came in between
    would be lost, and the pool would wait for ever.
    """
    held = threading.local()

    def hold() -> None:
        held.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held.before)

    def release_in_child() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=release_in_child)
