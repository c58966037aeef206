"""Board: shared memory through which the processes of one machine exchange numbers and sum tensors.

An exchange over sockets wakes a thread in each process and waits for it. On the board, each process writes a
number and reads those of the others.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

#: Bytes that a process adds to a sum at once; they fit into a processor core's cache.
_CHUNK: Final = 2**20
#: The most processes that sum on the board, as each reads what all have written.
_MOST: Final = 8
#: The lower bits of a shown number, which are the word; the bits above are the number of its turn.
_WORD: Final = 40
_TURNS: Final = 2**20
#: What a failed process shows in place of its next number.
_FAILED: Final = -1
#: Numbers from the start of one slot to the next, so that each has its own cache line of 64 bytes.
_LINE: Final = 8
_MARK: Final = 16
#: A waiting process first reads this many times, then yields between reads for so many seconds, then sleeps.
_LOOKS: Final = 200
_YIELDING_S: Final = 2e-3
#: Seconds between checks that the other processes are alive.
_ALIVE_S: Final = 0.2


class Place(NamedTuple):
    """How other processes find a board.

    Attributes:
        process: Id of the process that made it.
        descriptor: The file descriptor of its memory in that process.
        mark: Random bytes at its end, by which a process of another machine sees that these numbers mean something
            else there.
    """

    process: int
    descriptor: int
    mark: bytes


class Board:
    """Exchanges numbers between the processes of one machine, and sums their tensors.

    There are two sets of slots, used alternately. When a process writes to the first set again, all others have
    read it, because they have already written to the second one.

    Args:
        memory: The shared memory, `bytes_of` bytes, initially zero.
        rank: Number of this process.
        size: Number of processes.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._turn = 0
        self._used = 0
        self._memory = memory
        self._words = memoryview(memory)[: 2 * size * _LINE * 8].cast("q")
        self._others = [
            [(place * size + other) * _LINE for other in range(size) if other != rank] for place in range(2)
        ]
        self._views: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}
        self.adds = size <= _MOST

    def exchange(self, word: int, look: Callable[[], None]) -> list[int]:
        """Show a word to the other processes, and wait for theirs.

        Args:
            word: A number from 0 to below 2**40.
            look: Called now and then while waiting; raises if the other processes are gone.

        Returns:
            The words of all processes, this process's first.

        Raises:
            ConnectionError: Another process has failed.
        """
        self._turn = turn = self._turn % _TURNS + 1
        words, found = self._words, [word]
        words[((turn & 1) * self._size + self._rank) * _LINE] = (turn << _WORD) | word
        for place in self._others[turn & 1]:
            shown = words[place]
            if shown >> _WORD != turn:
                shown = self._awaited(place, turn, look)
            found.append(shown & ((1 << _WORD) - 1))
        return found

    def fail(self) -> None:
        """Show the processes that wait for this one's next word that it has failed."""
        self._words[(((self._turn + 1) & 1) * self._size + self._rank) * _LINE] = _FAILED

    def sum(self, flat: Tensor, exchange: Callable[[], Any]) -> None:
        """Sum a contiguous CPU tensor over all processes, in place and in the order of their ranks.

        Args:
            flat: This process's tensor.
            exchange: Waits until all processes have called it.
        """
        flat, step = flat.view(-1), _CHUNK // flat.itemsize
        for first in range(0, len(flat), step):
            chunk = flat[first : first + step] if len(flat) > step else flat
            self._used ^= 1
            slots = self._slots(chunk)
            slots[self._rank].copy_(chunk)
            exchange()
            torch.add(slots[0], slots[1], out=chunk)
            for each in slots[2:]:
                chunk.add_(each)

    def _slots(self, like: Tensor) -> list[Tensor]:
        """The memory to which each process writes its summand of the next chunk, by rank."""
        key = self._used, like.dtype, len(like)
        if key not in self._views:
            first = (2 * self._size * _LINE * 8) + self._used * self._size * _CHUNK
            self._views[key] = [
                torch.frombuffer(self._memory, dtype=like.dtype, count=len(like), offset=first + rank * _CHUNK)
                for rank in range(self._size)
            ]
        return self._views[key]

    def _awaited(self, place: int, turn: int, look: Callable[[], None]) -> int:
        """Wait for the number of a turn at a place."""
        words = self._words
        for _ in range(_LOOKS):
            if (shown := words[place]) >> _WORD == turn:
                return shown
        began = time.monotonic()
        asked = began
        while True:
            shown = words[place]
            if shown >> _WORD == turn:
                return shown
            if shown == _FAILED:
                raise ConnectionError
            now = time.monotonic()
            if now - began < _YIELDING_S:
                os.sched_yield()
                continue
            if now - asked > _ALIVE_S:
                look()
                asked = now
            time.sleep(min(5e-3, (now - began) / 20))


def shared_board(rank: int, size: int, gather: Callable[[Any], list[Any]]) -> Board | None:
    """The board of a group; None in all processes if they are not on one machine that supports it.

    Args:
        rank: Number of this process.
        size: Number of processes.
        gather: Takes this process's value and returns those of all processes, by rank.
    """
    made = None if rank else _made(size)
    try:
        place = gather(None if made is None else made[1])[0]
        if place is None:
            return None
        board = _found(place, rank, size) if made is None else made[0]
        return board if all(gather(board is not None)) else None
    finally:
        if made is not None:
            os.close(made[1].descriptor)


def _made(size: int) -> tuple[Board, Place] | None:
    """The board made by rank 0, and its place for the others; None if the machine does not support it."""
    # On other processors, a number may become visible before what was written earlier.
    if platform.machine() not in {"x86_64", "AMD64"} or not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create("trainer")
    os.ftruncate(descriptor, bytes_of(size))
    memory = mmap.mmap(descriptor, bytes_of(size))
    mark = secrets.token_bytes(_MARK)
    memory[-_MARK:] = mark
    return Board(memory, 0, size), Place(os.getpid(), descriptor, mark)


def _found(place: Place, rank: int, size: int) -> Board | None:
    """The board at a place, for a process other than rank 0; None if this process can't open it."""
    try:
        with Path(f"/proc/{place.process}/fd/{place.descriptor}").open("r+b") as file:
            memory = mmap.mmap(file.fileno(), bytes_of(size))
    except (OSError, ValueError):
        return None
    return Board(memory, rank, size) if memory[-_MARK:] == place.mark else None


def bytes_of(size: int) -> int:
    """The size in bytes of a board of ``size`` processes; pages that are never used take no memory."""
    return 2 * size * (_LINE * 8 + _CHUNK) + _MARK
