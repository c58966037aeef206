"""Limits of a trial (total time, time without a batch, memory), and the cause of a process's death in words."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpo.config.schema_run import RunSection
from hpo.execution.engines.engine import LEFT_EARLY
from hpo.execution.memory import memory_of
from hpo.storage.settling import Verdict
from hpo.study.outcome import Outcome
from hpo.wording import gib

# Counts the processes that the kernel has killed for lack of memory, on this machine and in its containers.
_VMSTAT: Final = Path("/proc/vmstat")


@dataclass(frozen=True)
class Limits:
    """What each trial may use; None means no limit.

    Attributes:
        wall_s: Seconds for all attempts at it together.
        idle_s: Seconds between two batches.
        memory: Bytes of main memory for its process and all child processes.
    """

    wall_s: float | None = None
    idle_s: float | None = None
    memory: int | None = None

    @classmethod
    def of(cls, run: RunSection) -> Limits:
        """The limits of a study file."""
        return cls(run.trial_timeout, run.no_progress_timeout, run.trial_memory)

    def broken(self, pid: int, *, spent_s: float, idle_s: float, trial_pid: int = 0) -> Verdict | None:
        """The verdict on a trial that has exceeded a limit; None if it has not.

        Args:
            pid: The worker's process.
            trial_pid: See `memory_of`.
            spent_s: Seconds that the trial has taken so far.
            idle_s: Seconds since its last batch.
        """
        if self.wall_s is not None and spent_s > self.wall_s:
            return _verdict(Outcome.TIMED_OUT, f"it took longer than trial_timeout, {self.wall_s:.12g} s")
        if self.idle_s is not None and idle_s > self.idle_s:
            return _verdict(
                Outcome.TIMED_OUT, f"no batch was finished within no_progress_timeout, {self.idle_s:.12g} s"
            )
        if self.memory is not None and (used := memory_of(pid, trial_pid)) > self.memory:
            allowed = f"trial_memory allows {gib(self.memory)}"
            return _verdict(Outcome.OUT_OF_MEMORY, f"it used {gib(used)} of main memory, {allowed}")
        return None


def _verdict(outcome: Outcome, reason: str) -> Verdict:
    return Verdict(outcome, reason, final=True)


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory since the machine started; 0 if unknown."""
    try:
        lines = _VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def death_of(exitcode: int | None, struck_before: int, who: str = "its worker") -> str:
    """Why a process is gone, in words.

    Args:
        exitcode: As in `multiprocessing.Process.exitcode`.
        struck_before: The value of `oom_kills` when the process started.
        who: The name of the process in the text.
    """
    if exitcode is None or exitcode >= 0:
        return f"{who} ended with exit code {exitcode}"
    name = _signal_name(-exitcode)
    if name == "SIGKILL" and oom_kills() > struck_before:
        return f"{who} was killed by SIGKILL; the kernel was out of memory at that time"
    return f"{who} was killed by {name}"


def agent_end(exitcode: int, struck_before: int) -> str:
    """How an agent has ended, in words; see `death_of`."""
    causes = {0: "it has left", LEFT_EARLY: "it was asked to leave"}
    return causes.get(exitcode) or death_of(exitcode, struck_before, who="the agent")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def kill_group(pid: int, *, only_group: bool = False) -> None:
    """Send SIGKILL to a process group, which may be gone or not made yet.

    Args:
        pid: The process that leads the group; it is killed itself if it has made no group yet.
        only_group: Never kill the process itself: it may have ended, and its id may belong to another by now.
    """
    for kill in (os.killpg,) if only_group else (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # the latter for a group of zombies, on macOS
            continue
        return
