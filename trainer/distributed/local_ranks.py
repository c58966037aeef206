"""Finds which ranks of a group are processes of this machine, and which of these have ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence


def place_of_process() -> tuple[str, int]:
    """Where this process's id is valid, and the id.

    It is valid on this machine, and there in the container's namespace of process ids.
    """
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}", os.getpid()


def other_local_ranks(places: Sequence[tuple[str, int]], own: int) -> dict[int, int]:
    """The process ids of the other ranks on this machine, by rank.

    Args:
        places: `place_of_process` of each rank, by rank; all were alive a moment ago.
        own: The rank of this process.
    """
    here = places[own][0]
    return {
        rank: process
        for rank, (place, process) in enumerate(places)
        if rank != own and place == here and not has_ended(process)
    }


def has_ended(process: int) -> bool:
    """Whether a process of this machine is gone, or is a zombie."""
    try:
        with open(f"/proc/{process}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except ProcessLookupError:  # it ended between opening and reading
        return True
    except FileNotFoundError:
        return os.path.isdir("/proc/self")  # noqa: PTH112
