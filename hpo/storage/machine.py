"""Which machine this is, and whether a process lives: what a ledger's row says of its owner, and others ask.

A machine's name is not its identity: two may both be called ``localhost``, a cloned image brings its machine id
along, containers of one machine share its boot, and a process can be seen from its own PID namespace only. So a
process is looked up only where name, boot and namespace are this process's own; of any other one nothing is known.
"""

import functools
import os
import socket
import uuid
from pathlib import Path
from typing import Final

import psutil

_INITIAL_PID_NAMESPACE: Final = "pid:[4026531836]"  # the kernel's constant for the namespace of the machine itself
#: The start of a process that its system does not show.
HIDDEN: Final = 0.0
_CLOCK_STEPS: Final = 10.0  # seconds by which a process's start may seem to move where it is reported by the clock
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
    """Identifier of this machine's boot; where the system has none, its network card's address, or nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        node = uuid.getnode()
        return "" if node >> 40 & 1 else f"{node:012x}"  # that bit: there was no card, and the number is random


def here() -> tuple[str, str]:
    """`host_name` and `boot_id`."""
    return host_name(), boot_id()


@functools.cache
def _proc_is_ours() -> bool:
    """Whether `/proc` shows this process's PID namespace, and not the one around it."""
    return Path("/proc/self").readlink() == Path(str(os.getpid()))


def process_start(pid: int) -> float | None:
    """When a process started, or None for a process that is gone or a zombie; ``HIDDEN`` where that is not shown.

    On Linux in clock ticks since boot, which no change of the clock moves (`psutil` adds the boot time, which
    such a change does move); elsewhere in seconds since the epoch.
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
    """Whether a process still runs; None where that can't be known here.

    It is known of this boot's processes that this one sees. Another boot may be an earlier one of this machine, or
    another machine of the same name. A stopped process (SIGSTOP) lives. One that is gone or a zombie, and one
    whose id belongs to another process by now, do not.
    """
    if (host, boot) != here() or start == HIDDEN:
        return None
    found = process_start(pid)
    if found == HIDDEN:
        return None
    return found is not None and abs(found - start) <= (0.0 if _HAS_PROC else _CLOCK_STEPS)
