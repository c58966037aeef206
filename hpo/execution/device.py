"""What a process has of a device beside its training: a CUDA context, and what is loaded into that."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

import torch

from hpo.execution.memory import is_ample

#: Bytes that a CUDA context takes of its device, about, with what a first training loads (812 MiB on an H200), and
#: the share of the device that contexts may take together.
_CONTEXT: Final = 800 * 2**20
_CONTEXTS: Final = 0.05
#: The share of a device's memory that is to be free for others, as trials are about alike in what they take.
_FREE: Final = 0.5
#: CUDA's driver, and its number for the attribute that says how many processes may have a context of a device.
DRIVER: Final = "libcuda.so.1"
_COMPUTE_MODE: Final = 20


def start(device: torch.device) -> None:
    """Start CUDA in this process, with what most trainings use first: matrix products and an optimizer's kernels.

    That takes half a second, in which a training before may still run. What fails here fails again in the trial,
    whose error it is. No backward pass: it would start threads, and the trial may still fork.
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
    """How many processes may hold a context of a device while others train; 0 where it has failed.

    To be asked where a training has ended.

    Args:
        device: Where it was; None is the answer for one that has no contexts, or on which nothing was done.
        ends: Whether this process ends, and gives back what it has.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    if not is_ample() or not _is_shared(device):
        return 0
    try:
        free, total = torch.cuda.mem_get_info(device)
        peak, held = torch.cuda.max_memory_reserved(device), torch.cuda.memory_reserved(device)
    except RuntimeError:  # a kernel has failed, as the trial has said; the context is lost
        return 0
    return contexts(free + held, total, peak, 0) if ends else contexts(free, total, peak, held)


def _is_shared(device: torch.device) -> bool:
    """Whether several processes may have a context at a time, as GPUs are set up unless someone changes it."""
    mode = ctypes.c_int()
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    failed = driver.cuDeviceGetAttribute(ctypes.byref(mode), _COMPUTE_MODE, device.index or 0)
    return not failed and mode.value == 0


def contexts(free: int, total: int, peak: int, held: int) -> int:
    """How many processes may hold a CUDA context while others train; all arguments are bytes of the device.

    Args:
        free: What nothing has now.
        total: All of it.
        peak: What the training had at most.
        held: What this process still has beside its context.
    """
    if min(free, total - peak) < _FREE * total:
        return 0
    return int(_CONTEXTS * total / (_CONTEXT + held))
