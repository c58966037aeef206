"""A worker: one process on one device that takes trials until there are none left to take."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import optuna
import torch

from hpo.build import Builder
from hpo.config import StudySpec
from hpo.devices import Slot
from hpo.errors import BudgetExhaustedError, HpoError
from hpo.folders import redirect_output
from hpo.ledger import Heartbeat, Owner
from hpo.objective import TrialReport, TrialRun
from hpo.study import OpenStudy, load_study

logger = logging.getLogger(__name__)

STOP: Final = "stop"


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
    """A worker has taken a trial."""

    number: int


@dataclass(frozen=True)
class Failed:
    """A worker can't go on, for a reason that is not one trial's."""

    message: str


Message = Started | TrialReport | Failed


def work(order: WorkerOrder, channel: Connection[Message, str]) -> None:
    """Run a worker in its own process; the exit code is 0 when it ended in order.

    Args:
        order: What to do.
        channel: To the supervisor: messages out, ``STOP`` in. When it closes, the supervisor is gone, which
            counts as ``STOP``.
    """
    asked = threading.Event()
    _detach(asked)
    if order.slot.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = order.slot.visible
    threading.Thread(target=_listen, args=(channel, asked), daemon=True).start()
    order.log.parent.mkdir(parents=True, exist_ok=True)
    with redirect_output(order.log):
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            _check_preload()
            _take_trials(order, channel, asked)
        except Exception as error:  # noqa: BLE001 - the supervisor is told, whatever it is
            traceback.print_exc()
            text = str(error) if isinstance(error, HpoError) else f"{type(error).__name__}: {error}"
            _send(channel, Failed(text))
            sys.exit(1)


def _detach(asked: threading.Event) -> None:
    """Own process group, so that the terminal's Ctrl-C reaches the supervisor alone; TERM puts the trial down."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: asked.set())


def _check_preload() -> None:
    # The fork server passes over a preload that fails, and its workers would just be slow.
    if "hpo.preload" not in sys.modules:
        raise RuntimeError(
            "the fork server could not import hpo.preload; `python -c 'import hpo.preload'` says why"
        )


def _listen(channel: Connection[Message, str], asked: threading.Event) -> None:
    # When the supervisor is gone, that is a request to stop as well.
    with contextlib.suppress(EOFError, OSError):
        channel.recv()
    asked.set()


def _send(channel: Connection[Message, str], message: Message) -> None:
    try:
        channel.send(message)
    except OSError:
        logger.warning("the supervisor is gone; nobody heard %r", message)


def _take_trials(order: WorkerOrder, channel: Connection[Message, str], asked: threading.Event) -> None:
    torch.set_num_threads(order.slot.threads)
    owner = Owner.current(worker=order.label, device=order.slot.label)
    opened = load_study(order.spec, owner)
    builder = Builder(order.spec)
    try:
        with Heartbeat(opened.storage.beat):
            while not asked.is_set():
                trial = _ask(opened)
                if trial is None:
                    return
                _send(channel, Started(trial.number))
                torch.set_num_threads(order.slot.threads)
                run = TrialRun(opened, trial, builder, torch.device(order.slot.device), asked)
                _send(channel, run.run())
    finally:
        opened.storage.close()


def _ask(opened: OpenStudy) -> optuna.Trial | None:
    """The next trial to work on, a waiting one first; None when all are claimed."""
    try:
        return opened.study.ask()
    except BudgetExhaustedError:
        return None
