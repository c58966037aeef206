"""Peers: the other processes of a training on several devices, one for each device but the first.

The process that holds the trial is rank 0. Its peers build the same trainer from the same config, and fit it
together with it. The storage, the session and what follows a training are rank 0's alone. Peers end with rank 0.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from hpo.config.spec import StudySpec
from hpo.search.one_thread import allow_threads
from hpo.study.folders import print_error, redirect_output
from hpo.study.outcome import Outcome
from hpo.trial.builder import Builder
from hpo.trial.failure import failure_outcome, is_device_memory
from hpo.trial.forks import only_in
from hpo.trial.mainless import LoneContext
from trainer.distributed.processes import RankError, end_group
from trainer.error_text import error_text, traceback_text

#: Seconds that peers may take to end a training that rank 0 has ended.
_LINGER: Final = 5.0
#: Signals that are meant for rank 0, whom its peers follow.
_FOR_RANK_0: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
#: All ranks are on one machine: nothing of what they tell each other leaves it.
_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True)
class Seat:
    """A peer's place in the group.

    Attributes:
        rank: Its number, from 1.
        device: Where it trains.
        folder: Where it may write; rank 0 and other peers have other folders.
        ready: To be called once its trainer is built: all go on together from there.
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
class _Task:
    work: Work
    folder: Path
    device: str
    threads: int
    environment: dict[str, str]


@dataclass(frozen=True)
class _Ready:
    """A peer has built its trainer."""


@dataclass(frozen=True)
class _Done:
    """A peer's work has come to its end.

    Attributes:
        error: Its error in a line; None: there was none.
        trace: The error's traceback.
        memory: Whose memory ran out by that: ``"device"`` or ``"host"``; empty: none's.
    """

    error: str | None = None
    trace: str = ""
    memory: str = ""


class PeerTracebackError(Exception):
    """The traceback of an error in a peer, as the cause of rank 0's."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclass
class _Peer:
    rank: int
    process: BaseProcess
    end: Connection[Any, Any]
    is_ready: bool = False
    done: _Done | None = None
    died: bool = False

    @property
    def has_ended(self) -> bool:
        return self.done is not None or self.died


class Peers:
    """The peers of this process, rank 0; of a training on one device there are none.

    They are started by the first work, unless they are forked before, and kept for further work.

    Args:
        builder: Rank 0's; forked peers have its data.
        devices: The device of each rank.
        on_death: Called, in a thread, with the rank and the exit code of a peer that has ended without a word in
            the middle of its work. Without it, rank 0 gets a `RankError`.

    Attributes:
        builder: As given.
        devices: As given.
    """

    def __init__(
        self, builder: Builder, devices: Sequence[str], on_death: Callable[[int, int], None] | None = None
    ) -> None:
        self.builder = builder
        self.devices = tuple(devices)
        self._on_death = on_death
        self._peers: list[_Peer] = []
        self._store: Any = None
        self._changed = threading.Condition()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return max(1, len(self.devices))

    def fork(self) -> None:
        """Start them as forks of this process, which runs one thread and has started no accelerator."""
        self._start(multiprocessing.get_context("fork"), self.builder)

    @contextlib.contextmanager
    def at_work(self, work: Work, folder: Path) -> Iterator[None]:
        """Have the peers work while the block runs, which is rank 0's part; at its end they are through.

        Args:
            work: What each does.
            folder: Where rank 0 writes. A peer has a folder ``rank-N`` in it, with its log.

        Raises:
            RankError: A peer has failed; its cause has the peer's traceback.
        """
        if self.size == 1:
            yield
            return
        if not self._peers:
            self._start(LoneContext(), self.builder.spec)
        with self._described() as port:
            self._hand_out(work, folder, port)
            watch = threading.Thread(target=self._watch, name="hpo-peers", daemon=True)
            watch.start()
            try:
                yield
            except BaseException as error:
                self._wait(lambda peer: peer.has_ended, _LINGER)
                cause = self._cause(error)
                self.close()
                if cause is None:
                    raise
                raise error from cause
            if not self._wait(lambda peer: peer.has_ended, _LINGER):
                self.close()
            watch.join(_LINGER)

    def meet(self) -> None:
        """Wait until all peers have built their trainers.

        Raises:
            RankError: One has failed.
        """
        self._wait(lambda peer: peer.is_ready or self._has_failed(), None)
        for peer in self._peers:
            if peer.died:
                raise RankError(f"rank {peer.rank} died without a word", peer.rank)
            if peer.done is not None and peer.done.error is not None:
                raise RankError(f"rank {peer.rank} failed: {peer.done.error}", peer.rank)

    def close(self) -> None:
        """End the peers, and wait for that."""
        peers, self._peers = self._peers, []
        if not peers:
            return
        end_group()
        for peer in peers:
            peer.done = peer.done or _Done()  # its end is no death
            peer.end.close()
        deadline = time.monotonic() + _LINGER
        for peer in peers:
            peer.process.join(max(0.0, deadline - time.monotonic()))
            if peer.process.exitcode is None:
                peer.process.kill()
            peer.process.join()
            peer.process.close()
        self._store = None

    # ---- inside

    def _start(self, context: BaseContext, source: Builder | StudySpec) -> None:
        ends: list[Connection[Any, Any]] = []
        for rank in range(1, self.size):
            ours, theirs = context.Pipe()
            ends.append(ours)
            inherited = tuple(ends) if context.get_start_method() == "fork" else ()
            # Not a daemon: those may not have DataLoader workers.
            process = context.Process(  # type: ignore[attr-defined]
                target=_serve, args=(theirs, inherited, source, rank), name=f"rank-{rank}", daemon=False
            )
            with _held_back():
                process.start()
            theirs.close()
            self._peers.append(_Peer(rank, process, ours))

    @contextlib.contextmanager
    def _described(self) -> Iterator[int]:
        """Let this process know that it is rank 0 of a group, as torchrun does; the port of the group's store."""
        if self._store is None:
            # A port of the system's choice, which nothing else can take meanwhile.
            self._store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        port = int(self._store.port)
        own = _description(0, self.size, port)
        kept = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        try:
            yield port
        finally:
            for name, value in kept.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _hand_out(self, work: Work, folder: Path, port: int) -> None:
        threads = torch.get_num_threads()
        for peer in self._peers:
            peer.is_ready, peer.done = False, None
            description = _description(peer.rank, self.size, port)
            task = _Task(work, folder / f"rank-{peer.rank}", self.devices[peer.rank], threads, description)
            with contextlib.suppress(OSError):  # it has died, which the watch sees
                peer.end.send_bytes(pickle.dumps(task))  # by value: multiprocessing would share tensors

    def _watch(self) -> None:
        """Take what the peers say, until all have done their work."""
        working = {peer.end: peer for peer in self._peers}
        while working:
            try:
                ready = connection.wait(list(working))
            except OSError:  # closed by `close`
                return
            for end in ready:
                peer = working[end]  # type: ignore[index]
                self._take(peer)
                if peer.has_ended:
                    del working[peer.end]

    def _take(self, peer: _Peer) -> None:
        try:
            said = peer.end.recv()
        except (EOFError, OSError):
            said = None
        died = said is None and not peer.has_ended
        if died and self._on_death is not None:
            peer.process.join()
            self._on_death(peer.rank, peer.process.exitcode or 0)
        with self._changed:
            peer.died = peer.died or died
            peer.is_ready = peer.is_ready or isinstance(said, _Ready)
            if isinstance(said, _Done):
                peer.done = said
            self._changed.notify_all()

    def _wait(self, holds: Callable[[_Peer], bool], seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: all(map(holds, self._peers)), seconds)

    def _has_failed(self) -> bool:
        return any(peer.died or (peer.done is not None and peer.done.error is not None) for peer in self._peers)

    def _cause(self, error: BaseException) -> BaseException | None:
        """The error of the peer that rank 0's is about; None where it is about none."""
        failed = error.rank if isinstance(error, RankError) else None
        done = next((peer.done for peer in self._peers if peer.rank == failed), None)
        if done is None or done.error is None:
            return None
        kind: type[BaseException] = PeerTracebackError
        if done.memory:
            kind = torch.OutOfMemoryError if done.memory == "device" else MemoryError
        return kind(done.trace)


def _description(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun would tell a process of its group."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),  # rank 0 has started it
    }


def _serve(
    end: Connection[Any, Any], inherited: Sequence[Connection[Any, Any]], source: Builder | StudySpec, rank: int
) -> None:
    """A peer's life: one work after another, as long as rank 0 lives."""
    for other in inherited:  # or the end of rank 0 would not be seen
        other.close()
    for number in _FOR_RANK_0:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_RANK_0)
    tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(end, tasks), daemon=True).start()
    builder = source if isinstance(source, Builder) else Builder(source)
    while True:
        end.send(_done(tasks.get(), builder, end, rank))


def _listen(end: Connection[Any, Any], tasks: queue.SimpleQueue[_Task]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            tasks.put(pickle.loads(end.recv_bytes()))
    os._exit(0)  # rank 0 is gone, or needs its peers no more


def _done(task: _Task, builder: Builder, end: Connection[Any, Any], rank: int) -> _Done:
    os.environ.update(task.environment)
    torch.set_num_threads(task.threads)
    allow_threads(task.threads)
    task.folder.mkdir(parents=True, exist_ok=True)
    seat = Seat(rank, torch.device(task.device), task.folder, lambda: end.send(_Ready()))
    with redirect_output(task.folder / "log.txt"):
        try:
            with only_in(os.getpid()):
                task.work(builder, seat)
        except BaseException as error:  # noqa: BLE001 - a study's code may raise anything; rank 0 hears of it
            trace = traceback_text(error)
            print_error(trace)
            return _Done(error_text(error), trace, _memory(error))
    return _Done()


def _memory(error: BaseException) -> str:
    if failure_outcome(error) != Outcome.OUT_OF_MEMORY:
        return ""
    return "device" if is_device_memory(error) else "host"


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """A process that is started inside gets no signal that is meant for rank 0, which gets it afterwards."""
    # Its start would let signals through again.
    resource_tracker.ensure_running()
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANK_0)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)
