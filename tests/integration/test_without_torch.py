"""Commands that read a study, and the process that supervises one, import no torch: that takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.finished import finished_study

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, ready_sqlite_file: Path) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("finished")
    with finished_study(folder, ready_sqlite_file) as opened:
        yield opened.spec.path


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which importing torch fails."""
    folder = tmp_path_factory.mktemp("no_torch")
    (folder / "torch.py").write_text('raise ImportError("this imports torch")\n')
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def run(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "best",
        "trials",
        "logs 0",
        "export --output {folder}/trials.csv",
        "repair --dry-run",
    ],
)
def test_a_command_that_reads_imports_no_torch(
    command: str, study: Path, refused: dict[str, str], tmp_path: Path
) -> None:
    name, *rest = command.format(folder=tmp_path).split()
    done = run([sys.executable, "-m", "hpo", name, str(study), *rest], refused)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module", ["hpo.execution.supervisor", "hpo.execution.checking", "hpo.dashboard.serve", "hpo.console.live"]
)
def test_a_process_that_supervises_or_serves_imports_no_torch(module: str, refused: dict[str, str]) -> None:
    done = run([sys.executable, "-c", f"import {module}"], refused)
    assert done.returncode == 0, done.stderr


def test_the_refusal_works(refused: dict[str, str]) -> None:
    assert "this imports torch" in run([sys.executable, "-c", "import torch"], refused).stderr
