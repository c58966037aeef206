"""Commands that read a study import nothing that they don't need, and what supervises one no torch either.

Torch takes seconds, Alembic (which Optuna asks for the tables' version) a tenth of one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.finished import finished_study

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, ready_sqlite_file: Path) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("finished")
    with finished_study(folder, ready_sqlite_file) as opened:
        yield opened.spec.path


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which importing torch or Alembic fails."""
    folder = tmp_path_factory.mktemp("no_torch")
    for name in ("torch", "alembic"):
        (folder / f"{name}.py").write_text(f'raise ImportError("this imports {name}")\n')
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def run(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


# One process for all, since starting one takes longer than a command: what is refused once is refused again.
_COMMANDS = """
import sys
from hpo.cli.app import main

study, folder = sys.argv[1:]
reading = ("status", "best", "trials", "logs 0", f"export --output {folder}/trials.csv", "repair --dry-run")
for command in (*reading, "stop", "run --on local --dry-run", "submit --on local --dry-run"):
    name, *rest = command.split()
    sys.argv = ["hpo", name, study, *rest]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"hpo {command} ended with {end.code}") from end
print("all of them")
"""


def test_a_command_that_reads_imports_no_torch_and_no_alembic(
    study: Path, refused: dict[str, str], tmp_path: Path
) -> None:
    done = run([sys.executable, "-c", _COMMANDS, str(study), str(tmp_path)], refused)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all of them\n")


def test_a_process_that_supervises_or_serves_imports_no_torch(refused: dict[str, str]) -> None:
    modules = "hpo.execution.supervisor, hpo.execution.checking, hpo.dashboard.serve, hpo.console.live"
    done = run([sys.executable, "-c", f"import {modules}"], refused)
    assert done.returncode == 0, done.stderr


_READ = """
import pathlib, sys
from hpo.config.spec import load_spec
from hpo.study.open_study import load_study
from hpo.study.status import study_best, study_status

opened = load_study(load_spec(pathlib.Path(sys.argv[1])))
study_status(opened), study_best(opened)

from optuna.storages._rdb.models import StudyModel
assert not StudyModel.__mapper__.configured, "the object mapper was asked"
others = [name for name in ("postgresql", "mysql") if f"sqlalchemy.dialects.{name}" in sys.modules]
assert not others, f"dialects of other databases were imported: {others}"
"""


def test_reading_a_study_needs_no_mapper_and_no_other_dialect(study: Path, refused: dict[str, str]) -> None:
    done = run([sys.executable, "-c", _READ, str(study)], refused)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["torch", "alembic"])
def test_the_refusal_works(name: str, refused: dict[str, str]) -> None:
    assert f"this imports {name}" in run([sys.executable, "-c", f"import {name}"], refused).stderr
