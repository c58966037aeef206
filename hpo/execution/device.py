"""Starts CUDA ahead of a trial, and counts how many processes may hold a CUDA context while others train."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

import torch

from hpo.execution.memory import is_ample

#: Approximate size of a CUDA context in bytes, with what a first trial loads (812 MiB on an H200), and the share
#: of the device's memory that the contexts of idle processes may take together.
_CONTEXT: Final = 800 * 2**20
_CONTEXTS: Final = 0.05
#: The share of the device's memory that a trial must leave free: the next one will need about as much as this one.
_FREE: Final = 0.5
#: CUDA's driver library, and the driver's number for the attribute "compute mode": who may have a context.
DRIVER: Final = "libcuda.so.1"
_COMPUTE_MODE: Final = 20


def start(device: torch.device) -> None:
    """Start CUDA in this process, and load what most trials use first: matrix products and an optimizer's kernels.

    This takes half a second, during which the previous trial may still train. An error here is ignored: the trial
    meets it again and reports it. No backward pass, because that starts threads, and the trial may still fork.
    """
    if device.type != "cuda":
        return
    with contextlib.suppress(Exception), torch.no_grad():
        weight = torch.nn.Parameter(torch.ones(8, 8, device=device))
        weight.grad = weight @ weight
        torch.optim.AdamW([weight], fused=True).step()
        del weight
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def spare_contexts(device: torch.device, *, ends: bool = False) -> int | None:
    """How many idle processes may hold a context on the device; ask when a trial has ended in this process.

    Args:
        device: Where the trial trained.
        ends: Whether this process ends now, and so frees what it holds.

    Returns:
        None for a device that has no contexts, or if this process has not used CUDA; 0 if CUDA has failed.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    if not is_ample() or not _is_shared(device):
        return 0
    try:
        free, total = torch.cuda.mem_get_info(device)
        peak, held = torch.cuda.max_memory_reserved(device), torch.cuda.memory_reserved(device)
    except RuntimeError:  # a kernel has failed, which the trial has reported; the context is lost
        return 0
    return contexts(free + held, total, peak, 0) if ends else contexts(free, total, peak, held)


def _is_shared(device: torch.device) -> bool:
    """Whether several processes may have a context at the same time, which is the default mode of a GPU."""
    mode = ctypes.c_int()
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    failed = driver.cuDeviceGetAttribute(ctypes.byref(mode), _COMPUTE_MODE, device.index or 0)
    return not failed and mode.value == 0


def contexts(free: int, total: int, peak: int, held: int) -> int:
    """How many idle processes may hold a CUDA context; all arguments are bytes of the device's memory.

    Args:
        free: Free memory now.
        total: All memory of the device.
        peak: The most that the trial has reserved.
        held: What each idle process holds beside its context.
    """
    if min(free, total - peak) < _FREE * total:
        return 0
    return int(_CONTEXTS * total / (_CONTEXT + held))
