"""A worker: one process on one device that takes trials until there are none left to take."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Protocol

import optuna
import torch

from hpo.build import Builder
from hpo.care.recovery import RETRIED_ATTR, Verdict
from hpo.config import StudySpec
from hpo.errors import BudgetExhaustedError, HpoError, LeaseLostError
from hpo.ledger import Heartbeat, Owner
from hpo.objective import TrialReport, TrialRun
from hpo.running.devices import Slot
from hpo.running.folders import redirect_output
from hpo.running.stopping import StopRequest
from hpo.study import OpenStudy, load_study
from trainer.state import TrainState

logger = logging.getLogger(__name__)

#: Signs of life in the time after which a silent worker counts as dead.
_BEATS: Final = 6
#: Seconds between two of them at most.
_SLOWEST_BEAT: Final = 10.0
#: Seconds between two messages about epochs at least.
_NEWS_PAUSE: Final = 0.25
#: Epochs in one of them at most: with few it fits into any channel that has room at all.
_NEWS_LENGTH: Final = 100


@dataclass(frozen=True)
class WorkerOrder:
    """What a worker is to do.

    Attributes:
        spec: The study file.
        label: The worker's name in the ledger and in logs.
        slot: Its device and threads.
        log: File for what it prints outside of trials.
    """

    spec: StudySpec
    label: str
    slot: Slot
    log: Path


@dataclass(frozen=True)
class Started:
    """A worker has taken a trial.

    Attributes:
        number: The trial.
        spent_s: Seconds that its earlier attempts took.
    """

    number: int
    spent_s: float = 0.0


@dataclass(frozen=True)
class EpochsEnded:
    """A trial has finished epochs.

    Attributes:
        number: The trial.
        first: The first of these epochs, counted from 1.
        values: The study's metric after each of them, None where there was no validation.
        max_epochs: Epochs of a run to the end.
        predicted: The final loss predicted after the last of them, None where nothing predicts one.
        resumed: They were finished by an earlier attempt; this one goes on from them.
    """

    number: int
    first: int
    values: tuple[float | None, ...]
    max_epochs: int
    predicted: float | None = None
    resumed: bool = False


@dataclass(frozen=True)
class Failed:
    """A worker can't go on, for a reason that is not one trial's."""

    message: str


@dataclass(frozen=True)
class Leaving:
    """A worker is about to end.

    Attributes:
        within_s: Seconds that this may take.
    """

    within_s: float = 30.0


@dataclass(frozen=True)
class Stop:
    """To a worker: end trial ``number`` with a verdict; without one, put down what runs and leave."""

    number: int = -1
    verdict: Verdict | None = None


Message = Started | EpochsEnded | TrialReport | Failed | Leaving


#: The monotonic clock when the worker last finished a batch, or took a trial.
BEAT: Final = 0
#: 1 when it has finished an epoch of its trial, else 0.
ADVANCED: Final = 1


class Pulse(Protocol):
    """Two numbers in memory shared with the supervisor, at the places ``BEAT`` and ``ADVANCED``."""

    def __getitem__(self, place: int) -> float: ...

    def __setitem__(self, place: int, value: float) -> None: ...


def work(order: WorkerOrder, channel: Connection[Message, Stop], pulse: Pulse) -> None:
    """Run a worker in its own process; the exit code is 0 when it ended in order.

    Args:
        order: What to do.
        channel: To the supervisor: messages out, `Stop` in. When it closes, the supervisor is gone, which counts
            as being asked to leave.
        pulse: Shows that the worker gets on.
    """
    request = StopRequest()
    _detach(request)
    if order.slot.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = order.slot.visible
    threading.Thread(target=_listen, args=(channel, request), daemon=True).start()
    order.log.parent.mkdir(parents=True, exist_ok=True)
    with redirect_output(order.log):
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            _check_preload()
            _Worker(order, channel, request, pulse).run()
        except Exception as error:  # noqa: BLE001 - the supervisor is told, whatever it is
            traceback.print_exc()
            text = str(error) if isinstance(error, HpoError) else f"{type(error).__name__}: {error}"
            _send(channel, Failed(text))
            sys.exit(1)
        finally:
            _send(channel, Leaving())


def _detach(request: StopRequest) -> None:
    """Own process group, so that the terminal's Ctrl-C reaches the supervisor alone; TERM puts the trial down."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: request.leave())
    _end_forks_at_sigterm()


def _end_forks_at_sigterm() -> None:
    """What a study's code forks is to end at a SIGTERM, as its pools expect, from its first instant.

    One that came between the fork and the change of the handler would be lost, and the pool wait for ever; so it
    is held back until then.
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


def _check_preload() -> None:
    # The fork server passes over a preload that fails, and its workers would just be slow.
    if "hpo.running.preload" not in sys.modules:
        raise RuntimeError(
            "the fork server could not import its preload; `python -c 'import hpo.running.preload'` says why"
        )


def _listen(channel: Connection[Message, Stop], request: StopRequest) -> None:
    # When the supervisor is gone, that is a request to leave as well.
    with contextlib.suppress(EOFError, OSError):
        while True:
            stop = channel.recv()
            if stop.verdict is None:
                request.leave()
            else:
                request.end(stop.number, stop.verdict)
    request.leave()


def _send(channel: Connection[Message, Stop], message: Message) -> None:
    try:
        channel.send(message)
    except OSError:
        logger.warning("the supervisor is gone; nobody heard %r", message)


@dataclass
class _Worker:
    order: WorkerOrder
    channel: Connection[Message, Stop]
    request: StopRequest
    pulse: Pulse
    _news: _News | None = None
    _from_epoch: int | None = None

    def run(self) -> None:
        """Take trials until there are none, or the process is not to be used any more."""
        slot, spec = self.order.slot, self.order.spec
        torch.set_num_threads(slot.threads)
        opened = load_study(spec, Owner.current(worker=self.order.label, device=slot.label))
        builder = Builder(spec)
        interval = min(_SLOWEST_BEAT, spec.study.lost_after / _BEATS)
        try:
            with Heartbeat(opened.storage.beat, interval=interval, on_lost=self.request.lose):
                while not self.request.leaving:
                    with contextlib.suppress(LeaseLostError):  # stopped for so long inside the asking
                        trial = _ask(opened)
                        if trial is None or self._train(opened, trial, builder).worn:
                            return
        finally:
            opened.storage.close()

    def _train(self, opened: OpenStudy, trial: optuna.Trial, builder: Builder) -> TrialReport:
        self._from_epoch = None
        news = self._news = _News(self.channel, trial.number, self.order.spec.study.metric)
        self.pulse[BEAT], self.pulse[ADVANCED] = time.monotonic(), 0.0
        _send(self.channel, Started(trial.number, self._spent(opened, trial)))
        torch.set_num_threads(self.order.slot.threads)
        device = torch.device(self.order.slot.device)
        report = TrialRun(opened, trial, builder, device, self.request, self._beat).run()
        news.finish()
        _send(self.channel, report)
        return report

    def _beat(self, state: TrainState) -> None:
        now = self.pulse[BEAT] = time.monotonic()
        if self._from_epoch is None:
            self._from_epoch = state.epoch
        elif state.epoch > self._from_epoch:
            self.pulse[ADVANCED] = 1.0
        if self._news is not None:
            self._news.follow(state, now)

    def _spent(self, opened: OpenStudy, trial: optuna.Trial) -> float:
        if self.order.spec.study.trial_timeout is None:
            return 0.0
        earlier = opened.storage.attempts_of_trial(trial._trial_id)[:-1]  # noqa: SLF001 - no public name
        after = trial.user_attrs.get(RETRIED_ATTR, 0)
        return sum(attempt.seconds for attempt in earlier if attempt.attempt > after)


class _News:
    """Tells the supervisor which epochs a trial has finished.

    Training never waits for that. What can't be said at once, because the channel is full or has just been used,
    is said with a later batch, and the rest when the trial has ended.

    Args:
        channel: To the supervisor.
        number: The trial.
        metric: The metric to tell.
    """

    def __init__(self, channel: Connection[Message, Stop], number: int, metric: str) -> None:
        self._channel = channel
        self._number = number
        self._metric = metric
        self._state: TrainState | None = None
        self._resumed = 0
        self._told = 0
        self._next = 0.0

    def follow(self, state: TrainState, now: float) -> None:
        """Tell what there is to tell, if that can be done without waiting; at the first call, what was resumed."""
        if self._state is None:
            self._state, self._resumed = state, len(state.history)
        if self._told < len(state.history) and now >= self._next:
            self._next = now + _NEWS_PAUSE
            while self._told < len(state.history) and _has_room(self._channel):
                self._say(state)

    def finish(self) -> None:
        """Tell the rest: nobody trains now."""
        while self._state is not None and self._told < len(self._state.history):
            self._say(self._state)

    def _say(self, state: TrainState) -> None:
        resumed = self._told < self._resumed
        end = self._resumed if resumed else len(state.history)
        said = state.history[self._told : min(end, self._told + _NEWS_LENGTH)]
        values = tuple(_number(metrics.get(self._metric)) for metrics in said)
        predicted = _number(said[-1].get("predicted_final_loss"))
        first, self._told = self._told + 1, self._told + len(said)
        _send(self._channel, EpochsEnded(self._number, first, values, state.max_epochs, predicted, resumed))


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _has_room(channel: Connection[Message, Stop]) -> bool:
    """Whether a short message can be sent without waiting for its reader."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLOUT)
    return poll.poll(0) == [(channel.fileno(), select.POLLOUT)]


def _ask(opened: OpenStudy) -> optuna.Trial | None:
    """The next trial to work on, a waiting one first; None when all are claimed."""
    try:
        return opened.study.ask()
    except BudgetExhaustedError:
        return None
