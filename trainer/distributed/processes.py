"""Processes: the group of a run with several processes, one per rank, and their communication.

It uses two process groups of torch. The one of the devices (``nccl`` on CUDA, ``gloo`` elsewhere) sums gradients.
The other is made for each session and uses ``gloo`` on the host, for everything small: a process that fails closes
it, so that all others notice within milliseconds, wherever they wait. If all processes are on one machine, they
meet and sum CPU tensors through shared memory (`board`).
"""

from __future__ import annotations

import atexit
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from trainer.data.shard import Shard
from trainer.distributed.board import Board, shared_board
from trainer.distributed.group import Group, device_of
from trainer.distributed.local_ranks import has_ended, other_local_ranks, place_of_process
from trainer.distributed.packing import bytes_of, value_of
from trainer.distributed.rank_error import RankError
from trainer.distributed.ranks import is_distributed, local_rank, rank, world_size
from trainer.error_text import error_text
from trainer.state import TrainState

logger = logging.getLogger(__name__)
_LOGGER: Final = logging.getLogger("trainer")

#: Seconds to wait for the error of a lost process, which it writes to the store before it closes its connections.
_LAST_WORDS: Final = 2.0
#: How often a process that waits for others checks that they are alive.
_LOOK: Final = timedelta(seconds=2)
#: The words that processes exchange; the highest word of all counts. At a meeting: nothing; that this process has
#: decided something; that it exchanges something with all; or, only from rank 0, that it first wants the others'
#: shares of a checkpoint, or of its tensors. Outside of a meeting: that it sends its parts of a split model; that
#: it sends gradients; or, only on the board, that it sums a tensor. Anywhere: that it has failed.
_NOTHING, _DECIDED, TOGETHER, SHARES, TENSORS, PARTS, GRADIENTS, _SUM, FAILED = range(9)
#: Words that either all processes say or none.
_OF_ALL: Final = frozenset({TOGETHER, PARTS, GRADIENTS, _SUM})
#: The lower bits of a number on the board, which are one of these words; the bits above are a count.
_KIND: Final = 4
_APART: Final = (
    "the processes are at different places of the run: in one of them a hook has skipped something that it did "
    "not skip in another one, or asked all for something; let hooks do the same in all processes"
)
_UNEVEN: Final = (
    "the processes use different parameters of a split model in the same batch, as where a part of it depends on "
    "the data: let each batch use the same ones in all, or use strategy 'ddp'"
)
#: Added to the error about a dead process if there is no board, which would have shown this other cause.
_UNSEEN: Final = f"; as these processes share no memory, it may also be that {_APART}"


class Processes(Group):
    """The group of a run of several processes."""

    def __init__(self) -> None:
        self.rank = rank()
        self.size = world_size()
        self._control: Any = None
        self._board: Board | None = None
        self._unseen = ""
        self._device_sums = 0
        self._highest = dist.AllreduceOptions()
        self._highest.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._key = ""
        self._store: Any = None
        self._level = logging.NOTSET
        #: The process ids of the other ranks on this machine, by rank.
        self._known: dict[int, int] = {}
        self._on_cuda = False
        self._make_share: Callable[[], Any] = dict
        #: Whether the session has ended by an error.
        self.failed = False
        #: Whether the others are at a meeting or on their way to one, so that rank 0 may ask them for something.
        self.will_meet = False
        #: Whether that meeting is the one at the end of a batch.
        self.at_boundary = False

    def device(self, given: torch.device | str | None) -> torch.device:
        """The given device, or the CUDA device with this process's number on its machine, or the CPU."""
        device = device_of(given or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type != "cuda" or device.index is not None:
            return device
        # For a process that sees only its own device, that is number 0.
        return torch.device("cuda", local_rank() % max(1, torch.cuda.device_count()))

    @contextmanager
    def session(
        self,
        device: torch.device,
        share: Callable[[], Any] = dict,
        whole: Callable[[], Any] = dict,  # noqa: ARG002
    ) -> Iterator[None]:
        """Let the processes work together inside the block; an error in one process ends it in all.

        Raises:
            RankError: Another process has failed.
        """
        if self._control is not None:  # inside a fit
            yield
            return
        if self._dead():  # in an earlier session
            raise self._lost()
        self._make_share = share
        self._open(device)
        try:
            yield
            self._meet()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._close()

    def shard(self, state: TrainState) -> Shard | None:
        """This process's part of each batch."""
        return Shard(self.rank, self.size, state)

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Call ``make`` in rank 0 alone, and return its result in all processes."""
        packed = torch.empty(0, dtype=torch.uint8) if self.rank else bytes_of(make())
        self._meet(TOGETHER)
        size = torch.tensor([len(packed)])
        self._finish(self._begun(lambda control: control.broadcast(size, 0)))
        packed = packed if not self.rank else torch.empty(int(size), dtype=torch.uint8)
        self._finish(self._begun(lambda control: control.broadcast(packed, 0)))
        return value_of(packed)

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, by rank, in all processes."""
        packed = bytes_of(value)  # first, as it may fail, and after the meeting the others rely on it
        self._meet(TOGETHER)
        return self._collected(packed)

    def arrive(self) -> None:
        """See `Group.arrive`; does nothing on the CPU, where each sum is a meeting."""
        if self._on_cuda:
            self._meet(TOGETHER)

    def other_shares(self) -> Sequence[Any]:
        """The shares of the other processes for a checkpoint; rank 0 asks for them only at the end of a batch."""
        if self.rank or not self.at_boundary:
            return ()
        self._exchange(SHARES)
        return self._gathered_now(None)[1:]

    def decide(self, mine: Any) -> list[Any]:
        """What each process has decided, by rank; empty if none has. All processes meet here.

        Args:
            mine: What this process has decided; None if nothing.
        """
        packed = None if mine is None else bytes_of(mine)  # first, as in `gather`
        if not self._meet(_NOTHING if packed is None else _DECIDED):
            return []
        return self._collected(bytes_of(None) if packed is None else packed)

    def leave(self, error: BaseException | None = None, reason: str | None = None) -> None:
        """See `Group.leave`; does not meet if the session is already closed by an error."""
        try:
            if self._control is not None:
                self._meet(_NOTHING if error is None else FAILED)
        finally:
            self.will_meet = False
            if error is not None:
                self.fail(error, reason)

    def sum(self, flat: Tensor) -> Any:
        """Start to sum a tensor over all processes, in place; the result must be passed to ``wait``."""
        if flat.is_cuda:
            self._device_sums += 1
            return dist.all_reduce(flat, async_op=True)
        if self._board is not None and self._board.adds:
            self._board.sum(flat, lambda: self._said(_SUM, flat.numel()))
            return None
        return self._begun(lambda control: control.allreduce([flat]))

    def wait(self, works: list[Any]) -> None:
        """Wait for sums, and empty the list; on CUDA, the device's queue waits, not the host."""
        while works:
            if (work := works.pop(0)) is not None:
                self._finish(work)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give all processes the values of rank 0."""
        self._meet(TOGETHER)
        for tensor in tensors:
            on_host = tensor.detach().cpu() if tensor.is_cuda else tensor.detach()
            if not on_host.is_contiguous():
                on_host = on_host.contiguous()
            sent = on_host.view(-1).view(torch.uint8)  # gloo supports no complex numbers and no 16-bit integers
            self._finish(self._begun(lambda control, sent=sent: control.broadcast(sent, 0)))  # type: ignore[misc]
            if on_host.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(on_host)

    def fail(self, error: BaseException, reason: str | None = None) -> None:
        """Tell the others of an error of this process, so that they stop waiting for it."""
        if self._control is None:
            return
        self.failed = True
        if not isinstance(error, RankError):
            text = json.dumps({"rank": self.rank, "error": error_text(error), "reason": reason})
            try:
                self._store.compare_set(f"{self._key}/error", "", text)
            except RuntimeError:  # the process with the store is gone, which the others notice themselves
                logger.warning("the other processes can't be told of the error")
        if self._board is not None:
            self._board.fail()
        self._close()
        if self._on_cuda and c10d._world.default_pg is not None:  # noqa: SLF001
            # Otherwise work on the device that waits for the others would never end.
            c10d._abort_process_group()  # noqa: SLF001

    # ---- inside

    def _open(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            torch.cuda.set_device(device)
        if not is_distributed():
            self._begin_group("cpu:gloo,cuda:nccl" if self._on_cuda else "gloo")
        # It still exists if an error has ended the process group.
        self._store = c10d._get_default_store()  # noqa: SLF001
        # How often this process has opened a group: the same number in all processes, as they open it together.
        opened = self._store.add(f"trainer/opened/{self.rank}", 1)
        self._key = f"trainer/{opened}"
        self._control = dist.new_group(backend="gloo")
        self.at_boundary = self.will_meet = self.failed = False
        if self.rank:  # all processes log the same, so only rank 0 logs below errors
            self._level, level = _LOGGER.level, max(_LOGGER.getEffectiveLevel(), logging.ERROR)
            _LOGGER.setLevel(level)
        self._device_sums = 0
        self._known = other_local_ranks(self.gather(place_of_process()), self.rank)
        self._board = shared_board(self.rank, self.size, self.gather)
        self._unseen = _UNSEEN if self._board is None else ""

    def _begin_group(self, backend: str) -> None:
        """Start the process group under new names, as the store still has the addresses of earlier ones."""
        store = next(iter(c10d.rendezvous("env://")))[0]  # type: ignore[attr-defined]
        group = store.add(f"trainer/groups/{self.rank}", 1)
        store = c10d.PrefixStore(f"trainer/groups/{group}", store)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size)
        atexit.register(end_group)

    def _close(self) -> None:
        control, self._control, self._board = self._control, None, None
        if control is not None:
            dist.destroy_process_group(control)
            if self.rank:
                _LOGGER.setLevel(self._level)

    def _meet(self, word: int = _NOTHING) -> int:
        """Wait for all processes, and answer rank 0's requests meanwhile; return the highest word of all."""
        while (said := self._exchange(word)) in {SHARES, TENSORS}:
            self._answer(said)
        return said

    def _answer(self, word: int) -> None:  # noqa: ARG002 - there is only one request
        """Send rank 0 what it has asked for."""
        self._gathered_now(self._make_share())

    def _exchange(self, word: int) -> int:
        return self._said(word, self._device_sums)[1]

    def _said(self, word: int, count: int) -> tuple[int, int]:
        """Exchange words, and return the lowest and the highest one.

        Args:
            word: What this process does.
            count: How many numbers it sums or sends; at a meeting, how many sums it has started on its device.

        Raises:
            RankError: Another process has failed.
            RuntimeError: The processes are at different places of the run.
        """
        words, counts = self._of_all(word, count)
        lowest, highest = min(words), max(words)
        if highest == FAILED:
            if word != FAILED:
                raise self._lost()
        elif min(counts) != max(counts) or (highest in _OF_ALL and lowest != highest):
            raise RuntimeError(_UNEVEN if lowest == highest == GRADIENTS else _APART)
        return lowest, highest

    def _of_all(self, word: int, count: int) -> tuple[list[int], list[int]]:
        """The words and the counts of all processes; without a board, only the lowest and highest of each."""
        if self._board is None:
            ends = torch.tensor([-word, word, -count, count])
            self._finish(self._begun(lambda control: control.allreduce([ends], self._highest)))
            lowest, highest, least, most = ends.tolist()
            return [-lowest, highest], [-least, most]
        try:
            found = self._board.exchange(word | count << _KIND, self._look)
        except ConnectionError:
            found = []
        if not found:
            raise self._lost()
        return [shown & ((1 << _KIND) - 1) for shown in found], [shown >> _KIND for shown in found]

    def _look(self) -> None:
        """Raise RankError if another process has failed or died."""
        if self._told() is not None or self._dead():
            raise self._lost()

    def _gathered_now(self, value: Any) -> list[Any]:
        """The value of each process, by rank; for processes that have just met."""
        return self._collected(bytes_of(value))

    def _collected(self, packed: Tensor) -> list[Any]:
        """Send a packed value to all, and return the unpacked values of all, by rank."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._finish(self._begun(lambda control: control.allgather(sizes, torch.tensor([len(packed)]))))
        longest = int(max(sizes))
        sent = torch.zeros(longest, dtype=torch.uint8)
        sent[: len(packed)] = packed
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._finish(self._begun(lambda control: control.allgather(found, sent)))
        return [value_of(each[: int(size)]) for each, size in zip(found, sizes, strict=True)]

    def _begun(self, begin: Callable[[Any], Any]) -> Any:
        """Start work in the host's process group."""
        if self._control is None:  # this process has failed, and a hook at its end still communicates
            raise self._lost()
        try:
            return begin(self._control)
        except RuntimeError:
            pass
        raise self._lost()

    def _finish(self, work: Any) -> None:
        """Wait for work of the group, as long as the others are alive.

        No reference to failed work is kept: its connections close only then, and end the wait of the others.
        """
        while True:
            try:
                work.wait() if self._on_cuda else work.wait(_LOOK)
            except RuntimeError as error:
                timed_out = "timed out" in str(error)
            else:
                return
            if not timed_out or self._told() is not None or self._dead():
                del work
                raise self._lost()

    def _lost(self) -> RankError:
        """The error that says what happened to the other processes; waits a while for their own words."""
        deadline = time.monotonic() + _LAST_WORDS
        while True:
            told = self._told()
            dead = self._dead()
            if told is not None:
                return told
            if dead:
                died = f"rank {dead[0]} died without a word, as a process that is killed does"
                return RankError(died + self._unseen, dead[0])
            if time.monotonic() > deadline:
                return RankError(f"the connection to another process is lost, and it left no word{self._unseen}")
            time.sleep(0.02)

    def _told(self) -> RankError | None:
        """The error that a failed process has written to the store; None if there is none."""
        try:
            if self._store is None or not self._store.check([f"{self._key}/error"]):
                return None
            told = json.loads(self._store.get(f"{self._key}/error"))
        except RuntimeError:
            return RankError("the process that keeps the group together is gone, rank 0 or torchrun", 0)
        return RankError(f"rank {told['rank']} failed: {told['error']}", told["rank"], told["reason"])

    def _dead(self) -> list[int]:
        """The ranks of the processes of this machine that have ended."""
        return [rank for rank, process in self._known.items() if has_ended(process)]


def end_group() -> None:
    """End the process group that the Trainer has started, if it still exists."""
    if is_distributed():
        dist.destroy_process_group()
