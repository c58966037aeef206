"""Studies that are run from inside their own folder, whatever its files are called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import hpo_json

STUDY = """
study: {name: own, n_trials: 2, sampler: random}
run: {workers: 1, devices: [cpu]}
objective: {_target_: trainer.run, lr: 1.0}
search_space: {objective.lr: {type: float, low: 0.1, high: 1.0}}
"""
#: Named like a package of ours.
TRAINER = """
import os

def run(trial, lr):
    assert "PYTHONSAFEPATH" not in os.environ, "what a trial starts looks in its working folder"
    trial.report(1, val_loss=lr)
"""


@pytest.mark.parametrize("on", [[], ["--on", "local"]])
def test_files_that_are_named_like_our_packages_are_the_studys_own(
    on: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    (folder := tmp_path / "study").mkdir()
    (folder / "study.yaml").write_text(STUDY)
    (folder / "trainer.py").write_text(TRAINER)
    (folder / "hpo.py").write_text("raise ImportError('this is not hpo')")
    (command := tmp_path / "hpo").write_text("from hpo.cli.app import main\nmain()")  # as it is installed
    words = [sys.executable, str(command), "run", "study.yaml", *on]
    done = subprocess.run(words, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [trial["outcome"] for trial in hpo_json("trials", folder / "study.yaml")] == ["complete"] * 2
