"""Board: memory that the processes of one machine share, where each shows the others what it has come to.

To meet over a socket, each process wakes a thread and waits for it. Here a process writes a number, and looks at
those of the others.
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

#: Bytes that a process adds to a sum at once: what fits into a processor's own cache.
_CHUNK: Final = 2**20
#: Most processes that add up here: each reads what all have written.
_MOST: Final = 8
#: Bits of a shown number that are its word; those above say in which turn it was shown.
_WORD: Final = 40
_TURNS: Final = 2**20
#: What a process that has failed shows in place of its next number.
_FAILED: Final = -1
#: A number has a cache line of its own: eight of its size.
_LINE: Final = 8
_MARK: Final = 16
#: How long a process that waits only looks, then also lets others run, before it sleeps between looks.
_LOOKS: Final = 200
_YIELDING_S: Final = 2e-3
#: Seconds between two questions whether the others are still there.
_ALIVE_S: Final = 0.2


class Place(NamedTuple):
    """Where a board lies.

    Attributes:
        process: Id of the process that has made it.
        descriptor: Of its memory, in that process.
        mark: What is written there: a process of another machine may find something else under these numbers.
    """

    process: int
    descriptor: int
    mark: bytes


class Board:
    """Numbers and sums of the processes of one machine.

    There are two sets of places, used in turn. Who writes a third time knows that all have read the first set,
    because they have written to the second one.

    Args:
        memory: As `bytes_of` says, zero at first.
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
        """Show a word, and wait for those of all.

        Args:
            word: From 0 to below 2**40.
            look: Called now and then while it waits; raises where the others are gone.

        Returns:
            The words, that of this process first.

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
        """Show all who wait for this process's next word that there will be none."""
        self._words[(((self._turn + 1) & 1) * self._size + self._rank) * _LINE] = _FAILED

    def sum(self, flat: Tensor, exchange: Callable[[], Any]) -> None:
        """Add up a contiguous tensor of the host over all processes, in place and in the order of their ranks.

        Args:
            flat: What this process adds.
            exchange: An exchange with all others.
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
        """Where each process writes what is added up next."""
        key = self._used, like.dtype, len(like)
        if key not in self._views:
            first = (2 * self._size * _LINE * 8) + self._used * self._size * _CHUNK
            self._views[key] = [
                torch.frombuffer(self._memory, dtype=like.dtype, count=len(like), offset=first + rank * _CHUNK)
                for rank in range(self._size)
            ]
        return self._views[key]

    def _awaited(self, place: int, turn: int, look: Callable[[], None]) -> int:
        """The number that comes to stand at a place."""
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
    """The board of a group; None in all of its processes where they do not share a machine that has such memory.

    Args:
        rank: Number of this process.
        size: Number of processes.
        gather: Returns the value of each process, by rank.
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
    """That of rank 0, and where the others find it; None where there can be none."""
    # Other processors may let a number be seen before what was written ahead of it.
    if platform.machine() not in {"x86_64", "AMD64"} or not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create("trainer")
    os.ftruncate(descriptor, bytes_of(size))
    memory = mmap.mmap(descriptor, bytes_of(size))
    mark = secrets.token_bytes(_MARK)
    memory[-_MARK:] = mark
    return Board(memory, 0, size), Place(os.getpid(), descriptor, mark)


def _found(place: Place, rank: int, size: int) -> Board | None:
    """That of another process than rank 0; None where it can't be reached from here."""
    try:
        with Path(f"/proc/{place.process}/fd/{place.descriptor}").open("r+b") as file:
            memory = mmap.mmap(file.fileno(), bytes_of(size))
    except (OSError, ValueError):
        return None
    return Board(memory, rank, size) if memory[-_MARK:] == place.mark else None


def bytes_of(size: int) -> int:
    """How large the board of so many processes is; what none of it uses takes no memory."""
    return 2 * size * (_LINE * 8 + _CHUNK) + _MARK
