"""What a trial uses of main memory, and how much of it is free."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hpo.execution.limits import kill_group
from hpo.execution.memory import _free_of_groups, free_share, memory_of
from tests.support.commands import wait_until


def test_memory_is_that_of_a_process_and_its_children() -> None:
    inner = "import time; a = bytearray(60_000_000); print('x', flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 60e6 < memory_of(process.pid) < 200e6
        kill_group(process.pid)
    wait_until(lambda: memory_of(process.pid) == 0)


def test_memory_of_a_worker_with_a_trial_leaves_its_other_processes_out() -> None:
    inner = "import os, time; a = bytearray(60_000_000); os.write(1, b'x\\n'); time.sleep(60)"
    start = f"subprocess.Popen([sys.executable, '-c', {inner!r}])"
    outer = f"import subprocess, sys; a, b = {start}, {start}; print(a.pid, flush=True); a.wait()"
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        (trial_pid,) = (int(line) for line in lines if line.strip() != b"x")
        assert memory_of(process.pid) > 120e6
        assert 60e6 < memory_of(process.pid, trial_pid) < 120e6
        kill_group(process.pid)


def test_the_free_share_is_that_of_the_machine_where_no_group_has_less() -> None:
    machine = psutil.virtual_memory()
    assert 0 < free_share() <= machine.available / machine.total + 0.05


def _group(folder: Path, limit: str, used: int, files: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - files}\ninactive_file {files}\n")


def test_each_group_with_a_limit_counts_without_what_files_take(tmp_path: Path) -> None:
    _group(tmp_path / "job", "1000", 700, 200)
    _group(tmp_path / "job" / "step", "max", 700, 200)
    _group(tmp_path / "job" / "step" / "task", "400", 500, 0)
    assert list(_free_of_groups(tmp_path, "job/step/task")) == [0.0, 0.5]
    assert list(_free_of_groups(tmp_path, "job/step")) == [0.5]
    assert list(_free_of_groups(tmp_path, "")) == []


def test_a_container_has_its_limit_at_the_root(tmp_path: Path) -> None:
    _group(tmp_path, "1000", 250, 0)
    assert list(_free_of_groups(tmp_path, "")) == [pytest.approx(0.75)]
