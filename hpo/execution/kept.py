"""Which processes of paused trials are kept: libraries, device and data are loaded where such a trial resumes."""

from __future__ import annotations

import gc
import os
import resource
from typing import Final

import psutil
import torch

from hpo.execution.device import spare_contexts
from hpo.execution.memory import is_ample

#: Processes of paused trials that a worker keeps at most.
MOST: Final = 16
#: Bytes of main memory that such a process may hold for itself (some 50 MiB are usual), and those where it has
#: trained on a GPU (CUDA then holds some 850 MiB of them on an H200).
_OWN: Final = 256 * 2**20
_OWN_WITH_CUDA: Final = 1280 * 2**20


def release() -> None:
    """Give back what an ended training has left for the garbage collector, on the device too."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def anonymous() -> int:
    """Bytes of main memory of this process that no file has; a fork begins with its parent's, which it shares."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def spare(device: torch.device, at_fork: int) -> int:
    """How many processes like this one, whose trial has paused, its worker may keep; 0: it is to end.

    A process that has children ends, for they would run on beside the next trial.

    Args:
        device: Where its trial trains.
        at_fork: What `anonymous` was when this process began.
    """
    if _has_children():
        return 0
    if device.type == "cuda":
        return min(MOST, spare_contexts(device) or 0) if _is_small(_OWN_WITH_CUDA, at_fork) else 0
    if device.type != "cpu" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0  # it holds memory that is not known
    return MOST if _is_small(_OWN, at_fork) else 0


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _is_small(most: int, at_fork: int) -> bool:
    if not is_ample():
        return False
    # To count what is this process's own, the kernel looks at each page, for some 10 ms. But for pages of files,
    # which it can drop, that is at most what has come since the fork and a page for each fault, which copies one.
    copied = resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()
    return anonymous() - at_fork + copied <= most or psutil.Process().memory_full_info().uss <= most
