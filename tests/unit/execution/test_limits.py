"""What limits say, and what is known about a process that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpo.execution import limits
from hpo.execution.limits import Limits, death_of, kill_group, oom_kills
from hpo.study.outcome import Outcome


def test_no_limit_is_broken_by_nothing() -> None:
    assert Limits().broken(os.getpid(), spent_s=1e9, idle_s=1e9) is None


@pytest.mark.parametrize(
    ("limit", "spent", "idle", "outcome", "said"),
    [
        (Limits(wall_s=10), 10.5, 0, Outcome.TIMED_OUT, "longer than trial_timeout, 10 s"),
        (Limits(wall_s=1_209_600), 1_209_601, 0, Outcome.TIMED_OUT, "longer than trial_timeout, 1209600 s"),
        (Limits(idle_s=5), 6, 5.5, Outcome.TIMED_OUT, "within no_progress_timeout, 5 s"),
        (Limits(memory=1), 0, 0, Outcome.OUT_OF_MEMORY, "trial_memory allows 9.31e-10 GiB"),
    ],
)
def test_a_broken_limit_ends_the_trial_and_says_which(
    limit: Limits, spent: float, idle: float, outcome: str, said: str
) -> None:
    verdict = limit.broken(os.getpid(), spent_s=spent, idle_s=idle)
    assert verdict is not None
    assert verdict.final
    assert verdict.outcome == outcome
    assert said in verdict.reason


def test_what_lies_on_the_limit_is_allowed() -> None:
    limit = Limits(wall_s=10, idle_s=5, memory=2**60)
    assert limit.broken(os.getpid(), spent_s=10, idle_s=5) is None


def test_a_group_is_killed_with_all_its_processes_and_a_gone_one_is_no_error() -> None:
    inner = "import os, time; print(1, flush=True); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout is not None
        process.stdout.readline()
        kill_group(process.pid)
        assert process.stdout.read() == b"", "the inner process held the pipe open, had it lived"
    kill_group(process.pid)


def test_a_process_that_has_made_no_group_is_killed_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        kill_group(process.pid)
        assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "its worker ended with exit code 3"),
        (0, "its worker ended with exit code 0"),
        (-signal.SIGSEGV, "its worker was killed by SIGSEGV"),
        (-99, "its worker was killed by signal 99"),
    ],
)
def test_a_death_is_put_in_words(code: int, said: str) -> None:
    assert death_of(code, oom_kills()) == said


def test_a_kill_while_the_kernel_was_out_of_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "vmstat"
    counter.write_text("pgfault 12\noom_kill 4\noom_kill_other 9\n")
    monkeypatch.setattr(limits, "_VMSTAT", counter)
    assert oom_kills() == 4
    assert death_of(-signal.SIGKILL, 4) == "its worker was killed by SIGKILL"
    assert "the kernel was out of memory" in death_of(-signal.SIGKILL, 3)
    assert death_of(-signal.SIGTERM, 3) == "its worker was killed by SIGTERM"
    counter.unlink()
    assert oom_kills() == 0
