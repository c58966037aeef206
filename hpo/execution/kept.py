"""Decides which processes of paused trials are kept, with libraries, device and data loaded, until they resume."""

from __future__ import annotations

import gc
import os
import resource
from typing import Final

import psutil
import torch

from hpo.execution.device import spare_contexts
from hpo.execution.memory import is_ample

#: The most processes of paused trials that a worker keeps.
MOST: Final = 16
#: Bytes of main memory that such a process may have for itself: without a GPU (about 50 MiB are usual), and after
#: it has trained on a GPU (CUDA then holds about 850 MiB on an H200).
_OWN: Final = 256 * 2**20
_OWN_WITH_CUDA: Final = 1280 * 2**20


def release() -> None:
    """Collect the garbage of a training that has ended, and free its memory on the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def anonymous() -> int:
    """Bytes of this process's main memory that are backed by no file; a fork starts with its parent's, shared."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def spare(device: torch.device, at_fork: int) -> int:
    """How many processes of paused trials like this one its worker may keep; 0 means that this one must end.

    A process that has children must end, because they would run on beside the next trial.

    Args:
        device: Where its trial trains.
        at_fork: The value of `anonymous` when this process was forked.
    """
    if _has_children():
        return 0
    if device.type == "cuda":
        return min(MOST, spare_contexts(device) or 0) if _is_small(_OWN_WITH_CUDA, at_fork) else 0
    if device.type != "cpu" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0  # how much memory it holds is unknown
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
    # For an exact count of this process's own memory (USS) the kernel looks at each page, which takes about 10 ms.
    # An upper bound, without pages of files (the kernel can drop those), is cheap: the memory added since the
    # fork, and one copied page for each page fault.
    copied = resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()
    return anonymous() - at_fork + copied <= most or psutil.Process().memory_full_info().uss <= most
