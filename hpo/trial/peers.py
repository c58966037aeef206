"""Peers: the other processes of a training on several devices, one for each device but the first.

The process that holds the trial is rank 0. Its peers build the same trainer from the same config and train
together with it. Only rank 0 uses the storage and the session, and does what follows a training. Peers end with
rank 0.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist

from hpo.config.spec import StudySpec
from hpo.config.variables import in_environment
from hpo.signals import held_back
from hpo.study.folders import print_error
from hpo.trial.builder import Builder
from hpo.trial.mainless import LoneContext
from hpo.trial.peer import FOR_RANK_0, Done, Ready, Task, Work, serve
from trainer.distributed.processes import end_group
from trainer.distributed.rank_error import RankError

#: Seconds that peers may take to end a training that rank 0 has ended.
_LINGER: Final = 5.0
#: Seconds between two checks whether a peer is stopped, and the number of such findings in a row that end it.
_LOOK: Final = 1.0
_STOPPED_LOOKS: Final = 30
#: All ranks are on one machine, so their messages never leave it.
_LOOPBACK: Final = "127.0.0.1"


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
    done: Done | None = None
    died: bool = False
    fate: str = "died without a word"
    stopped: int = 0

    @property
    def has_ended(self) -> bool:
        return self.done is not None or self.died


class Peers:
    """The peers of this process, which is rank 0; a training on one device has none.

    They are started with the first work, unless they were forked before, and kept for further work.

    Args:
        builder: Rank 0's builder; forked peers have its data.
        devices: The device of each rank.
        on_death: Called in a thread with the rank and the exit code of a peer that has died during its work
            without a message. Without it, rank 0 gets a `RankError`.

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
        self._working = False
        self._changed = threading.Condition()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return max(1, len(self.devices))

    def fork(self) -> None:
        """Start the peers as forks of this process, which must have one thread and no started accelerator."""
        self._start(multiprocessing.get_context("fork"), self.builder)

    @contextlib.contextmanager
    def at_work(self, work: Work, folder: Path) -> Iterator[None]:
        """Make the peers work while the block runs, which is rank 0's part; when it ends, they have finished too.

        Args:
            work: The work of each peer.
            folder: Where rank 0 writes; a peer gets a folder ``rank-N`` in it, with its log.

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
            self._working = True
            watch = threading.Thread(target=self._watch, name="hpo-peers", daemon=True)
            watch.start()
            try:
                yield
            except BaseException as error:
                self._leave()
                self._wait(lambda peer: peer.has_ended, _LINGER)
                cause, lost = self._cause(error), self._lost_peer()
                self.close()
                if lost is not None and _is_of(lost, error):
                    raise lost from error
                if cause is None:
                    raise
                raise error from cause
            self._leave()
            if not self._wait(lambda peer: peer.has_ended, _LINGER):
                self.close()
            watch.join(_LINGER)

    def meet(self) -> None:
        """Wait until all peers have built their trainers.

        Raises:
            RankError: A peer has failed.
        """
        self._wait(lambda peer: peer.is_ready or self._has_failed(), None)
        if (lost := self._lost_peer()) is not None:
            raise lost
        for peer in self._peers:
            if peer.done is not None and peer.done.error is not None:
                raise RankError(f"rank {peer.rank} failed: {peer.done.error}", peer.rank)

    def close(self) -> None:
        """End the peers and wait until they have ended."""
        peers, self._peers = self._peers, []
        if not peers:
            return
        end_group()
        for peer in peers:
            peer.done = peer.done or Done()  # so that its end does not count as a death
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
            # Not a daemon, since daemons may not start DataLoader workers.
            process = context.Process(  # type: ignore[attr-defined]
                target=serve, args=(theirs, inherited, source, rank), name=f"rank-{rank}", daemon=False
            )
            resource_tracker.ensure_running()  # starting it inside the block below would unblock signals
            with held_back(FOR_RANK_0):  # until the process ignores them
                process.start()
            theirs.close()
            self._peers.append(_Peer(rank, process, ours))

    @contextlib.contextmanager
    def _described(self) -> Iterator[int]:
        """Set this process's environment as torchrun does for rank 0; yields the port of the group's store."""
        if self._store is None:
            # Port 0: the system chooses a free one, which no other program can take meanwhile.
            self._store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        port = int(self._store.port)
        with in_environment(_description(0, self.size, port)):
            yield port

    def _hand_out(self, work: Work, folder: Path, port: int) -> None:
        threads = torch.get_num_threads()
        for peer in self._peers:
            peer.is_ready, peer.done = False, None
            description = _description(peer.rank, self.size, port)
            task = Task(work, folder / f"rank-{peer.rank}", self.devices[peer.rank], threads, description)
            with contextlib.suppress(OSError):  # the peer has died, which the watch notices
                peer.end.send_bytes(pickle.dumps(task))  # by value: multiprocessing would share tensors

    def _watch(self) -> None:
        """Receive the peers' messages until all have done their work, and end peers that are stopped."""
        working = {peer.end: peer for peer in self._peers}
        while working:
            try:
                ready = connection.wait(list(working), _LOOK)
            except OSError:  # closed by `close`
                return
            for end in ready:
                peer = working[end]  # type: ignore[index]
                self._take(peer)
                if peer.has_ended:
                    del working[peer.end]
                if peer.died:
                    self._let_go()
            for peer in working.values():
                _end_if_stopped(peer)

    def _leave(self) -> None:
        """Rank 0 has come to the end of its part."""
        with self._changed:
            self._working = False
            self._changed.notify_all()

    def _let_go(self) -> None:
        """Close the group's store, if rank 0 still waits there for a peer that has died."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._working, _LINGER):
                self._store = None

    def _lost_peer(self) -> RankError | None:
        """The error for a peer that has died; None where all live."""
        died = next((peer for peer in self._peers if peer.died), None)
        return None if died is None else RankError(f"rank {died.rank} {died.fate}", died.rank)

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
            peer.is_ready = peer.is_ready or isinstance(said, Ready)
            if isinstance(said, Done):
                peer.done = said
            self._changed.notify_all()

    def _wait(self, holds: Callable[[_Peer], bool], seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: all(map(holds, self._peers)), seconds)

    def _has_failed(self) -> bool:
        return any(peer.died or (peer.done is not None and peer.done.error is not None) for peer in self._peers)

    def _cause(self, error: BaseException) -> BaseException | None:
        """The peer's error behind rank 0's error; None where there is none."""
        failed = error.rank if isinstance(error, RankError) else None
        done = next((peer.done for peer in self._peers if peer.rank == failed), None)
        if done is None or done.error is None:
            return None
        kind: type[BaseException] = PeerTracebackError
        if done.memory:
            kind = torch.OutOfMemoryError if done.memory == "device" else MemoryError
        return kind(done.trace)


def _is_of(lost: RankError, error: BaseException) -> bool:
    """Whether rank 0's error follows from a peer's death, directly or because `_let_go` has closed the store."""
    return isinstance(error, dist.DistError) or (isinstance(error, RankError) and error.rank in {0, lost.rank})


def _end_if_stopped(peer: _Peer) -> None:
    """End a peer that has been stopped for long, as by SIGSTOP: the others would wait for it forever.

    Checks are counted instead of seconds, so that a group that is stopped as a whole may continue.
    """
    with contextlib.suppress(psutil.NoSuchProcess, ValueError):  # it has ended, and its object may be closed
        is_stopped = psutil.Process(peer.process.pid).status() == psutil.STATUS_STOPPED
        peer.stopped = peer.stopped + 1 if is_stopped else 0
        if peer.stopped == _STOPPED_LOOKS:
            peer.fate = f"was stopped for {_STOPPED_LOOKS * _LOOK:g} s, and has been ended"
            print_error(f"rank {peer.rank} {peer.fate}")
            peer.process.kill()


def _description(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment variables that torchrun would set for a process of its group."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),  # rank 0 has started it
    }
