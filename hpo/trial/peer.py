"""A peer's own process: it does one work after another, as long as rank 0 lives."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from hpo.config.spec import StudySpec
from hpo.search.one_thread import allow_threads
from hpo.study.folders import print_error, redirect_output
from hpo.study.outcome import Outcome
from hpo.trial.builder import Builder
from hpo.trial.failure import failure_outcome, is_device_memory
from hpo.trial.process_forks import only_in
from trainer.error_text import error_text, traceback_text

#: Signals that are meant for rank 0, whom its peers follow.
FOR_RANK_0: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Seat:
    """A peer's place in the group.

    Attributes:
        rank: Its number, from 1.
        device: Where it trains.
        folder: Where it may write; rank 0 and other peers have other folders.
        ready: To be called once its trainer is built: all continue together from there.
    """

    rank: int
    device: torch.device
    folder: Path
    ready: Callable[[], None]


class Work(Protocol):
    """What a peer does: its part in what rank 0 does. It is pickled."""

    def __call__(self, builder: Builder, seat: Seat) -> None:
        """Do it."""
        ...


@dataclass(frozen=True)
class Task:
    """What rank 0 hands a peer: work, and what it needs for that."""

    work: Work
    folder: Path
    device: str
    threads: int
    environment: dict[str, str]


@dataclass(frozen=True)
class Ready:
    """A peer has built its trainer."""


@dataclass(frozen=True)
class Done:
    """A peer's work has come to its end.

    Attributes:
        error: Its error in a line; None: there was none.
        trace: The error's traceback.
        memory: Whose memory ran out by that: ``"device"`` or ``"host"``; empty: none's.
    """

    error: str | None = None
    trace: str = ""
    memory: str = ""


def serve(
    end: Connection[Any, Any], inherited: Sequence[Connection[Any, Any]], source: Builder | StudySpec, rank: int
) -> None:
    """A peer's life: one work after another, as long as rank 0 lives."""
    for other in inherited:  # or the end of rank 0 would not be seen
        other.close()
    for number in FOR_RANK_0:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_RANK_0)
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(end, tasks), daemon=True).start()
    builder = source if isinstance(source, Builder) else Builder(source)
    while True:
        end.send(_worked(tasks.get(), builder, end, rank))


def _listen(end: Connection[Any, Any], tasks: queue.SimpleQueue[Task]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            tasks.put(pickle.loads(end.recv_bytes()))
    os._exit(0)  # rank 0 is gone, or needs its peers no more


def _worked(task: Task, builder: Builder, end: Connection[Any, Any], rank: int) -> Done:
    os.environ.update(task.environment)
    torch.set_num_threads(task.threads)
    allow_threads(task.threads)
    task.folder.mkdir(parents=True, exist_ok=True)
    seat = Seat(rank, torch.device(task.device), task.folder, lambda: end.send(Ready()))
    with redirect_output(task.folder / "log.txt"):
        try:
            with only_in(os.getpid()):
                task.work(builder, seat)
        except BaseException as error:  # noqa: BLE001 - a study's code may raise anything; rank 0 hears of it
            trace = traceback_text(error)
            print_error(trace)
            return Done(error_text(error), trace, _memory(error))
    return Done()


def _memory(error: BaseException) -> str:
    if failure_outcome(error) != Outcome.OUT_OF_MEMORY:
        return ""
    return "device" if is_device_memory(error) else "host"
