"""Main memory: how much a trial uses, and how much the machine or container has free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

#: Linux control groups (version 2), and the file that names this process's own; other systems have no such files.
_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN_GROUP: Final = Path("/proc/self/cgroup")
_AMPLE: Final = 0.25


def memory_of(pid: int, trial_pid: int = 0) -> int:
    """Bytes of main memory that a worker's trial uses; memory that several processes share is divided among them.

    Args:
        pid: The worker's process, which is counted.
        trial_pid: The process that holds the trial, counted with its child processes. 0: all child processes of
            the worker are counted.
    """
    try:
        worker = psutil.Process(pid)
        trial = psutil.Process(trial_pid or pid)
        family = {worker, trial, *trial.children(recursive=True)}
    except psutil.NoSuchProcess:
        return 0
    return sum(map(_memory, family))


def _memory(process: psutil.Process) -> int:
    try:
        info = process.memory_full_info()
    except psutil.AccessDenied:  # macOS shows this much of others' processes only
        return int(process.memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0
    # Only Linux knows the proportional share (PSS); elsewhere count the memory that only this process has (USS).
    return int(getattr(info, "pss", info.uss))


def is_ample() -> bool:
    """Whether enough main memory is free to keep idle processes."""
    return free_share() >= _AMPLE


def free_share() -> float:
    """The share of main memory that is free, from 0 to 1: the least of the machine's and its control groups'."""
    machine = psutil.virtual_memory()
    return min([machine.available / machine.total, *_free_of_groups(_GROUPS, _own_group())])


def _own_group() -> str:
    with contextlib.suppress(OSError):
        for line in _OWN_GROUP.read_text().splitlines():
            if line.startswith("0::"):
                return line[3:].strip("/")
    return ""


def _free_of_groups(root: Path, own: str) -> Iterator[float]:
    """The free share of each control group that has a limit and that this process is in."""
    group = root / own
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text()) - _files_of(folder)
            yield max(0.0, 1 - used / limit)
        if folder == root:
            return


def _files_of(group: Path) -> int:
    """Bytes that a group uses to cache files, which the kernel gives up first."""
    lines = (group / "memory.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
