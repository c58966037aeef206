"""Identifies this machine, and finds out whether a process lives: used for the owners of leases, and for agents.

A machine's name is not its identity: two may both be called ``localhost``, a cloned image has the same machine id,
containers share their machine's boot id, and a process is visible only in its own PID namespace. So a process is
looked up only if its machine's name, boot and namespace are those of this process; nothing is known about others.
"""

import functools
import os
import socket
import uuid
from pathlib import Path
from typing import Final

import psutil

_INITIAL_PID_NAMESPACE: Final = "pid:[4026531836]"  # the kernel's constant for the namespace of the machine itself
#: Stands for the start time of a process that the system does not show.
HIDDEN: Final = 0.0
_CLOCK_STEPS: Final = 10.0  # seconds by which a start time taken from the clock may shift when the clock is set
_HAS_PROC: Final = Path("/proc/self/stat").exists()


@functools.cache
def host_name() -> str:
    """This machine's name; a process in a PID namespace of its own counts as another machine."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = _INITIAL_PID_NAMESPACE
    name = socket.gethostname()[:200]
    return name if namespace == _INITIAL_PID_NAMESPACE else f"{name} {namespace}"


@functools.cache
def boot_id() -> str:
    """Id of this machine's boot; if the system has none, the address of its network card, or an empty text."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        node = uuid.getnode()
        return "" if node >> 40 & 1 else f"{node:012x}"  # with this bit the number is random: there is no card


def here() -> tuple[str, str]:
    """`host_name` and `boot_id`."""
    return host_name(), boot_id()


@functools.cache
def _proc_is_ours() -> bool:
    """Whether `/proc` shows this process's PID namespace, and not an outer one."""
    return Path("/proc/self").readlink() == Path(str(os.getpid()))


def process_start(pid: int) -> float | None:
    """When a process started; None for one that is gone or a zombie, ``HIDDEN`` if the system does not show it.

    On Linux in clock ticks since boot, which setting the clock does not shift (`psutil` adds the boot time, which
    is shifted); elsewhere in seconds since the epoch.
    """
    if not _HAS_PROC:
        return _process_start_without_proc(pid)
    if not _proc_is_ours():
        return HIDDEN if psutil.pid_exists(pid) else None
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field is the program's name in parentheses, and may hold spaces and parentheses itself.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in {b"Z", b"X", b"x"} else float(fields[19])


def _process_start_without_proc(pid: int) -> float | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def is_alive(host: str, boot: str, pid: int, start: float) -> bool | None:
    """Whether a process still runs; None if that can't be known here.

    It is known only for processes of this boot that this process can see. Another boot may be an earlier one of
    this machine, or that of another machine of the same name. A stopped process (SIGSTOP) lives. A process that is
    gone or a zombie, or whose id belongs to another process by now, does not.
    """
    if (host, boot) != here() or start == HIDDEN:
        return None
    found = process_start(pid)
    if found == HIDDEN:
        return None
    return found is not None and abs(found - start) <= (0.0 if _HAS_PROC else _CLOCK_STEPS)
