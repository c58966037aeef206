"""The process of a peer, which does one work after another as long as rank 0 lives; see `hpo.trial.peers`."""

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

#: Signals that only rank 0 handles; its peers follow it.
FOR_RANK_0: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Seat:
    """A peer's place in the group.

    Attributes:
        rank: Its rank, from 1.
        device: The device that it trains on.
        folder: The folder that it may write to; each rank has its own.
        ready: To be called once the peer's trainer is built; from there all ranks continue together.
    """

    rank: int
    device: torch.device
    folder: Path
    ready: Callable[[], None]


class Work(Protocol):
    """A peer's part in what rank 0 does; it is sent to the peer by pickle."""

    def __call__(self, builder: Builder, seat: Seat) -> None:
        """Do it."""
        ...


@dataclass(frozen=True)
class Task:
    """What rank 0 sends a peer: work, and what the peer needs to do it."""

    work: Work
    folder: Path
    device: str
    threads: int
    environment: dict[str, str]


@dataclass(frozen=True)
class Ready:
    """A peer's message that it has built its trainer."""


@dataclass(frozen=True)
class Done:
    """A peer's message that its work has ended.

    Attributes:
        error: Its error in one line; None if there was none.
        trace: The error's traceback.
        memory: Which memory ran out: ``"device"`` or ``"host"``; empty if none did.
    """

    error: str | None = None
    trace: str = ""
    memory: str = ""


def serve(
    end: Connection[Any, Any], inherited: Sequence[Connection[Any, Any]], source: Builder | StudySpec, rank: int
) -> None:
    """Run a peer: do one work after another, as long as rank 0 lives."""
    for other in inherited:  # else the peer would not notice the end of rank 0
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
    os._exit(0)  # rank 0 has ended, or no longer needs its peers


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
        except BaseException as error:  # noqa: BLE001 - a study's code may raise anything; it is sent to rank 0
            trace = traceback_text(error)
            print_error(trace)
            return Done(error_text(error), trace, _memory(error))
    return Done()


def _memory(error: BaseException) -> str:
    if failure_outcome(error) != Outcome.OUT_OF_MEMORY:
        return ""
    return "device" if is_device_memory(error) else "host"
