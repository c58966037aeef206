"""Processes: a group of several processes, one for each rank, and what they tell each other.

There are two groups of torch. The one of the devices (``nccl`` on CUDA, ``gloo`` elsewhere) sums gradients. The
other is made for each session and uses ``gloo`` on the host, for everything that is small: it is closed by a
process that fails, and so the others, wherever they wait, know within milliseconds.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from trainer.data.shard import Shard
from trainer.distributed.group import Group
from trainer.distributed.ranks import is_distributed, local_rank, rank, world_size
from trainer.state import TrainState

logger = logging.getLogger(__name__)

#: Seconds that a lost process has to leave its error behind; it does so before it closes its connections.
_LAST_WORDS: Final = 2.0
#: What a process says at a meeting: nothing, that it wants the others' parts of a checkpoint, that it has decided.
_NOTHING, _PARTS, _DECIDED = range(3)

#: Sessions of this process so far: equal in all, as they are entered together.
_sessions = itertools.count(1)


class RankError(RuntimeError):
    """Another process of the group has failed or died.

    Attributes:
        rank: Its rank; None where that is not known.
        reason: Why its run ended, as in ``state.stop_reason``; None where it left no word.
    """

    def __init__(self, message: str, failed: int | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.rank = failed
        self.reason = reason


class Processes(Group):
    """The group of a run of several processes."""

    def __init__(self) -> None:
        self.rank = rank()
        self.size = world_size()
        self._control: Any = None
        self._words = torch.zeros(1, dtype=torch.int64)
        self._highest = dist.AllreduceOptions()
        self._highest.reduceOp = dist.ReduceOp.MAX
        self._key = ""
        self._on_cuda = False
        self._make_part: Callable[[], Any] = dict
        #: Whether the others are on their way to a meeting, or there: rank 0 may ask them for their parts.
        self.at_boundary = False

    def device(self, given: torch.device | str | None) -> torch.device:
        """As given, or the CUDA device of this process's number on its machine, or the CPU."""
        if given is not None or not torch.cuda.is_available():
            return torch.device(given or "cpu")
        return torch.device("cuda", local_rank())

    @contextmanager
    def session(self, device: torch.device, part: Callable[[], Any] = dict) -> Iterator[None]:
        """Work together from here to the end of the block; an error in one process ends it in all.

        Raises:
            RankError: Another process has failed.
        """
        if self._control is not None:  # inside a fit
            yield
            return
        self._make_part = part
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
        """What ``make`` returns in the process of rank 0, in all processes."""
        made = [make() if not self.rank else None]
        self._meet()
        self._call(lambda: dist.broadcast_object_list(made, group=self._control, group_src=0))
        return made[0]

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, by rank, in all processes."""
        self._meet()
        return self._gathered(value)

    def other_parts(self) -> Sequence[Any]:
        """What the other processes add to a checkpoint; they are asked at a batch's end, and nowhere else."""
        if self.rank or not self.at_boundary:
            return ()
        self._exchange(_PARTS)
        parts: list[Any] = [None] * self.size
        self._call(lambda: dist.gather_object(None, parts, group=self._control, group_dst=0))
        return parts[1:]

    def decide(self, mine: Any) -> list[Any]:
        """What each process has decided, by rank; nothing where none has.

        Args:
            mine: What this process has decided; None: nothing. All processes meet here, whatever they say.
        """
        if not self._meet(_NOTHING if mine is None else _DECIDED):
            return []
        return self._gathered(mine)

    def sum(self, flat: Tensor) -> Any:
        """Begin to add up a tensor over all processes, in place; ``wait()`` of what is returned ends it."""
        if flat.is_cuda:
            return self._call(lambda: dist.all_reduce(flat, async_op=True))
        return self._call(lambda: self._control.allreduce([flat]))

    def wait(self, works: Sequence[Any]) -> None:
        """Wait for sums; on a CUDA device its queue does, not the host."""
        for work in works:
            self._call(work.wait)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give all processes the values of rank 0."""
        self._meet()
        for tensor in tensors:
            on_host = tensor.detach().cpu() if tensor.is_cuda else tensor.detach()
            if not on_host.is_contiguous():
                on_host = on_host.contiguous()
            self._call(partial(dist.broadcast, on_host, group=self._control, group_src=0))
            if on_host.data_ptr() != tensor.data_ptr():
                tensor.copy_(on_host)

    def fail(self, error: BaseException, reason: str | None = None) -> None:
        """Tell the others of an error of this process, and end what they wait for."""
        if self._control is None:
            return
        if not isinstance(error, RankError):
            text = json.dumps({"rank": self.rank, "error": _told(error), "reason": reason})
            try:
                c10d._get_default_store().compare_set(f"{self._key}/error", "", text)  # noqa: SLF001
            except RuntimeError:  # the process that keeps the store is gone, which the others see by themselves
                logger.warning("the other processes can't be told of the error")
        self._close()
        if self._on_cuda and c10d._world.default_pg is not None:  # noqa: SLF001
            # What waits on the device for the others would never end.
            c10d._abort_process_group()  # noqa: SLF001

    # ---- inside

    def _open(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            torch.cuda.set_device(device)
        if not is_distributed():
            dist.init_process_group("cpu:gloo,cuda:nccl" if self._on_cuda else "gloo")
            atexit.register(_end_group)
        self._key = f"trainer/{next(_sessions)}"
        store = c10d._get_default_store()  # noqa: SLF001
        store.set(f"{self._key}/{self.rank}", json.dumps([socket.gethostname(), os.getpid()]))
        self._control = dist.new_group(backend="gloo")
        self.at_boundary = False
        self._meet()

    def _close(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            dist.destroy_process_group(control)

    def _meet(self, word: int = _NOTHING) -> int:
        """Wait until all are here, and give rank 0 what it asks for meanwhile; the highest word that was said."""
        while (said := self._exchange(word)) == _PARTS:
            part = self._make_part()
            self._call(partial(dist.gather_object, part, group=self._control, group_dst=0))
        return said

    def _exchange(self, word: int) -> int:
        words = self._words
        words[0] = word
        self._call(lambda: self._control.allreduce([words], self._highest).wait())
        return int(words)

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        self._call(lambda: dist.all_gather_object(found, value, group=self._control))
        return found

    def _call(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except RuntimeError as error:
            raise self._lost() from error
        except AttributeError:
            if self._control is not None:
                raise
            raise self._lost() from None  # this process has failed, and a hook of its end wants to go on

    def _lost(self) -> RankError:
        """What has become of the others."""
        deadline = time.monotonic() + _LAST_WORDS
        while True:
            try:
                store = c10d._get_default_store()  # noqa: SLF001
                if store.check([f"{self._key}/error"]):
                    told = json.loads(store.get(f"{self._key}/error"))
                    return RankError(f"rank {told['rank']} failed: {told['error']}", told["rank"], told["reason"])
                dead = [number for number in range(self.size) if self._is_dead(number)]
            except (RuntimeError, ValueError):
                return RankError("rank 0 ended without a word, and the group with it", 0)
            if dead:
                return RankError(f"rank {dead[0]} died without a word, as a process that is killed does", dead[0])
            if time.monotonic() > deadline:
                return RankError("the connection to another process is lost, and it left no word")
            time.sleep(0.02)

    def _is_dead(self, number: int) -> bool:
        """Whether a process of this machine has ended."""
        found = json.loads(c10d._get_default_store().get(f"{self._key}/{number}"))  # noqa: SLF001
        host, process = found
        if host != socket.gethostname():
            return False
        try:
            with open(f"/proc/{process}/stat") as file:  # noqa: PTH123
                return file.read().rpartition(")")[2].split()[0] in "ZX"
        except FileNotFoundError:
            return True


def group_of_process() -> Group:
    """The group of the run that this process takes part in."""
    return Group() if world_size() == 1 else Processes()


def _told(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _end_group() -> None:
    """End the process group that the Trainer has begun, if it is still there."""
    if is_distributed():
        dist.destroy_process_group()
