"""Which ranks of a group are processes of this machine, and which of these have ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence


def place_of_process() -> tuple[str, int]:
    """This process: where its number means something, and the number.

    The place is this machine, and in it the container's namespace of process numbers.
    """
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}", os.getpid()


def other_local_ranks(places: Sequence[tuple[str, int]], own: int) -> dict[int, int]:
    """Process numbers by rank, of the other ranks that are processes here.

    Args:
        places: `place_of_process` of each rank, which has just said that it is there.
        own: The rank of this process.
    """
    here = places[own][0]
    return {
        rank: process
        for rank, (place, process) in enumerate(places)
        if rank != own and place == here and not has_ended(process)
    }


def has_ended(process: int) -> bool:
    """Whether a process of this machine is gone, or waits for its end to be noticed."""
    try:
        with open(f"/proc/{process}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except ProcessLookupError:  # it went between the two
        return True
    except FileNotFoundError:
        return os.path.isdir("/proc/self")  # noqa: PTH112
