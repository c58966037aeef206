"""Which processes of paused trials are kept: libraries, device and data are loaded where such a trial resumes."""

from __future__ import annotations

import gc
import os
from typing import Final

import psutil
import torch

from hpo.execution.memory import free_share

#: Processes of paused trials that a worker keeps at most.
MOST: Final = 16
#: Bytes of main memory that such a process may hold for itself (some 50 MiB are usual), and the share of the
#: machine's that is to be free.
_OWN: Final = 256 * 2**20
_FREE: Final = 0.25
#: Bytes that a CUDA context takes of its device, about, and the share of it that contexts may take together.
_CONTEXT: Final = 512 * 2**20
_CONTEXTS: Final = 0.05
#: The share of a device's memory that is to be free for others, as trials are about alike in what they take.
_FREE_OF_DEVICE: Final = 0.5


def release() -> None:
    """Give back what an ended training has left for the garbage collector, on the device too."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def room(device: torch.device) -> int:
    """How many processes like this one, whose trial has paused, its worker may keep; 0: it is to end.

    A process that has children ends, for they would run on beside the next trial.

    Args:
        device: Where its trial trains.
    """
    if _has_children() or not _is_small():
        return 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        peak, held = torch.cuda.max_memory_reserved(device), torch.cuda.memory_reserved(device)
        return min(MOST, contexts(free, total, peak, held))
    if device.type != "cpu" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0  # it holds memory that is not known
    return MOST


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _is_small() -> bool:
    return free_share() >= _FREE and psutil.Process().memory_full_info().uss <= _OWN


def contexts(free: int, total: int, peak: int, held: int) -> int:
    """How many processes may keep a CUDA context while others train; all arguments are bytes of the device.

    Args:
        free: What nothing has now.
        total: All of it.
        peak: What the paused training had at most.
        held: What this process still has beside its context.
    """
    if min(free, total - peak) < _FREE_OF_DEVICE * total:
        return 0
    return int(_CONTEXTS * total / (_CONTEXT + held))
