"""What a study and its trackers import is imported once, in the fork server, which can still be forked."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpo.config.spec import load_spec
from hpo.execution.launchers.imported_once import NAMES_VARIABLE, TRACKERS, environment_of
from hpo.trial.callbacks import CALLBACKS
from tests.support.commands import make_study

_LOOK = """
import hpo.execution.launchers.study_imports
import sys
from hpo.execution.warm import is_forkable
print(is_forkable(), *sorted(set(sys.argv[1:]) - set(sys.modules)))
"""


def look(environment: Mapping[str, str], *modules: str) -> str:
    """What a process that has imported the study's libraries says: whether it is forkable, and which it lacks."""
    command = [sys.executable, "-c", _LOOK, *modules]
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def environment(folder: Path, *overrides: str) -> dict[str, str]:
    return environment_of(load_spec(make_study(folder), overrides))


def test_trackers_go_by_the_names_of_callbacks() -> None:
    assert TRACKERS.keys() <= CALLBACKS.keys()


@pytest.mark.full
@pytest.mark.parametrize("name", TRACKERS)
def test_what_a_tracker_imports_is_there_and_a_trial_can_be_forked(tmp_path: Path, name: str) -> None:
    given = environment(tmp_path, f"callbacks.{name}=true")
    assert look(given, *TRACKERS[name].modules) == "True"


@pytest.mark.full
def test_pandas_and_arrow_leave_a_worker_that_can_be_forked(tmp_path: Path) -> None:
    given = environment(tmp_path) | {NAMES_VARIABLE: "pandas pyarrow"}
    assert look(given, "pandas", "pyarrow") == "True"
    assert look(given | {"JE_ARROW_MALLOC_CONF": "background_thread:true"}) == "False"  # or the test sees nothing


@pytest.mark.full
def test_a_library_that_is_broken_or_absent_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('built for another NumPy')")
    given = {NAMES_VARIABLE: "broken absent json.tool", "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    assert look(given, "broken", "absent", "json.tool") == "True absent broken"


def test_a_tracker_that_is_switched_off_is_not_imported(tmp_path: Path) -> None:
    assert environment(tmp_path, "callbacks.wandb=false")[NAMES_VARIABLE] == ""
    assert "wandb" in environment(tmp_path, "callbacks.wandb={project: x}")[NAMES_VARIABLE].split()


def test_what_a_person_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    monkeypatch.setenv("JE_ARROW_MALLOC_CONF", "dirty_decay_ms:0")
    given = environment(tmp_path, "callbacks.mlflow=true")
    assert given["MLFLOW_DISABLE_TELEMETRY"] == "false"
    assert given["JE_ARROW_MALLOC_CONF"] == "dirty_decay_ms:0"


@pytest.mark.parametrize("name", ["mlflow", "comet"])
def test_its_variables_are_those_that_the_callback_sets(name: str) -> None:
    source = Path(sys.modules[CALLBACKS[name].kind.__module__].__file__ or "").read_text()
    for variable, value in TRACKERS[name].environment.items():
        assert f'os.environ.setdefault("{variable}", "{value}")' in source
