"""Measures the memory that a run takes: on a GPU by torch's count, else by how far this process grows."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import psutil
import torch

from hpo.checks.findings import Finding, finding
from hpo.config.spec import StudySpec
from hpo.wording import gib

_STATUS: Final = Path("/proc/self/status")
_RESET: Final = Path("/proc/self/clear_refs")
#: Written to `clear_refs`, it makes the kernel reset a process's peak memory.
_FORGET_PEAK: Final = "5"


class PeakMemory:
    """The most memory in use since the last `reset`.

    Args:
        device: The device; for any but a CUDA device, the main memory of this process is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = psutil.Process().memory_info().rss

    def reset(self) -> None:
        """Reset the peak."""
        if self._device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]  # before that there is nothing to forget
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):  # refused by the kernel or a container: the old peak stays
                _RESET.write_text(_FORGET_PEAK)

    def peak(self) -> int:
        """The peak in bytes: memory allocated on the GPU, or this process's growth since `__init__`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, _highest() - self._before)

    def too_little(self, spec: StudySpec, workers: int, each: int) -> list[Finding]:
        """A finding if so many workers, with so many bytes each, need more memory than there is."""
        if self._device.type == "cuda":
            there, where = torch.cuda.get_device_properties(self._device).total_memory, str(self._device)
        else:
            there, where = psutil.virtual_memory().available, "this machine"
        if workers * each <= there:
            return []
        problem = f"{workers} workers need {gib(workers * each)}, and {where} has {gib(there)}"
        return [finding(spec, problem, path="run.workers", value=workers, fix="use fewer workers")]


def _highest() -> int:
    """The peak main memory of this process; its current memory if the system does not report the peak."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss
