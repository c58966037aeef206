"""Which processes of paused trials are kept: libraries, device and data are loaded where such a trial resumes."""

from __future__ import annotations

import gc
import os
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


def spare(device: torch.device) -> int:
    """How many processes like this one, whose trial has paused, its worker may keep; 0: it is to end.

    A process that has children ends, for they would run on beside the next trial.

    Args:
        device: Where its trial trains.
    """
    if _has_children():
        return 0
    if device.type == "cuda":
        return min(MOST, spare_contexts(device) or 0) if _is_small(_OWN_WITH_CUDA) else 0
    if device.type != "cpu" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0  # it holds memory that is not known
    return MOST if _is_small(_OWN) else 0


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _is_small(most: int) -> bool:
    return is_ample() and psutil.Process().memory_full_info().uss <= most
