"""The fork server does once what each trial's process would do again."""

import subprocess
import sys

import pytest

_LOOK = """
import hpo.execution.launchers.preload
from optuna.storages._rdb.models import StudyModel, TrialModel
assert all(model.__mapper__.configured for model in (StudyModel, TrialModel))
"""


@pytest.mark.full
def test_the_classes_of_the_tables_are_set_up_before_a_worker_is_forked() -> None:
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
