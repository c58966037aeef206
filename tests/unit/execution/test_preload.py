"""The fork server does once what each trial's process would do again."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest

from hpo.config.spec import load_spec
from hpo.execution.launchers.forkserver import start_fork_server
from tests.support.commands import make_study

_LOOK = """
import sys
import hpo.execution.launchers.preload
assert "hydra.utils" in sys.modules  # the first target of a study file would import it
from optuna.storages._rdb.models import StudyModel, TrialModel
assert all(model.__mapper__.configured for model in (StudyModel, TrialModel))
"""


@pytest.mark.full
def test_the_classes_of_the_tables_are_set_up_and_hydra_is_there_before_a_worker_is_forked() -> None:
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_its_socket_has_room_where_the_folder_of_temporary_files_has_a_long_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := tmp_path / ("x" * 100)).mkdir()
    spec = load_spec(make_study(tmp_path))
    opened: list[str] = []

    def listen() -> None:  # as the fork server does
        with Listener(family="AF_UNIX") as listener:
            opened.append(str(listener.address))

    monkeypatch.setattr(tempfile, "tempdir", str(long))
    this: Any = multiprocessing.current_process()
    monkeypatch.delitem(this._config, "tempdir", raising=False)
    monkeypatch.setattr("hpo.trial.mainless.SERVER.set_forkserver_preload", lambda _: None)
    monkeypatch.setattr("hpo.trial.mainless.SERVER.ensure_running", listen)
    start_fork_server(spec)
    assert opened
    assert tempfile.gettempdir() == str(long)


def test_it_does_not_have_the_token_of_a_dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inherited: list[str] = []
    monkeypatch.setenv("HPO_DASHBOARD_TOKEN", "a token")
    monkeypatch.setattr("hpo.trial.mainless.SERVER.set_forkserver_preload", lambda _: None)
    monkeypatch.setattr("hpo.trial.mainless.SERVER.ensure_running", lambda: inherited.extend(os.environ))
    start_fork_server(load_spec(make_study(tmp_path)))
    assert "PATH" in inherited
    assert "HPO_DASHBOARD_TOKEN" not in inherited
    assert os.environ["HPO_DASHBOARD_TOKEN"] == "a token"
