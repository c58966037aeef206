"""A run whose trials raise whatever code can raise, and what is shown of it afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE, STUDY, hpo, hpo_json, make_study, start_hpo, wait_until

FAULTS = """
import asyncio
import torch


class Mute(Exception):
    def __str__(self):
        raise ZeroDivisionError


class Fault(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, outputs, targets):
        if self.kind == "interrupt":
            raise KeyboardInterrupt
        if self.kind == "exit":
            raise GeneratorExit
        if self.kind == "cancelled":
            raise asyncio.CancelledError
        if self.kind == "mute":
            raise Mute
        if self.kind == "odd":
            raise ValueError("half \\ud800, end \\x00, \\x1b[2J")
        return ((outputs - targets) ** 2).mean()
"""
KINDS = ["interrupt", "exit", "cancelled", "mute", "odd", "fine"]


def test_whatever_trials_raise_the_run_goes_on_and_can_be_looked_at(tmp_path: Path) -> None:
    study = make_study(tmp_path, STUDY.replace("parts.Explode", "faults.Fault, kind: fine"))
    (tmp_path / "faults.py").write_text(FAULTS)
    space = f"search_space={{loss.kind: {{type: categorical, choices: [{', '.join(KINDS)}]}}}}"
    hpo("run", study, "study.sampler.name=grid", f"study.n_trials={len(KINDS)}", "--workers", 2, space)
    trials = {trial["params"]["loss.kind"]: trial for trial in hpo_json("trials", study, space)}
    assert {kind: trial["outcome"] for kind, trial in trials.items()} == {
        **dict.fromkeys(KINDS, "error"),
        "fine": "complete",
    }
    assert [trials[kind]["reason"] for kind in KINDS[:-1]] == [
        "KeyboardInterrupt",
        "GeneratorExit",
        "CancelledError",
        "Mute: (no message: its __str__ raised ZeroDivisionError)",
        r"ValueError: half \ud800, end \x00, \x1b[2J",
    ]
    for command in ("status", "trials", "report", "best"):
        hpo(command, study, space)
    assert "ValueError: half" in hpo("logs", study, trials["odd"]["trial"], space).stdout


FORKING = """
import os
import sys

import parts


def load():
    # A worker does so, for all its trials.
    if os.fork() == 0:
        return parts.load()
    return parts.load()


class Net(parts.Net):
    def __init__(self, hidden, at):
        super().__init__(hidden)
        self.at, self.forked = at, False

    def forward(self, inputs):
        outputs = super().forward(inputs)
        if self.training and not self.forked:
            self.forked = True
            if os.fork() == 0:
                if self.at == "exit":
                    sys.exit()
                if self.at == "raise":
                    raise ValueError("in the fork")
        return outputs
"""


def test_forks_that_return_exit_or_raise_change_nothing(tmp_path: Path) -> None:
    text = STUDY.replace("parts.Net, hidden: 4, delay: 0.0, dropout: 0.1", "forking.Net")
    study = make_study(tmp_path, text.replace("parts.load", "forking.load"))
    (tmp_path / "forking.py").write_text(FORKING)
    space = "search_space={model.at: {type: categorical, choices: [return, exit, raise]}}"
    options = ("study.sampler.name=grid", "study.n_trials=3", "model.hidden=4", "model.at=return", space)
    hpo("run", study, *options, "--workers", 2)
    trials = hpo_json("trials", study, *options)
    assert [trial["outcome"] for trial in trials] == ["complete"] * 3
    assert [(trial["epochs"], len(trial["internals"]["attempts"])) for trial in trials] == [(3, 1)] * 3
    for trial in trials:
        folder = tmp_path / "runs" / "tiny" / "trials" / str(trial["trial"]) / "attempt-1"
        assert (folder / "metrics.csv").read_text().count("\n") == 4
        said = (folder / "log.txt").read_text()
        assert ("a second time: it ends here" in said) == (trial["params"]["model.at"] == "return")
        assert ("ValueError: in the fork" in said) == (trial["params"]["model.at"] == "raise")


@pytest.mark.parametrize("harm", ["removed", "replaced", "log removed"])
def test_a_database_that_is_gone_ends_the_run_with_checkpoints(tmp_path: Path, harm: str) -> None:
    study = make_study(tmp_path)
    options = ("--workers", 2, "--n-trials", 2, "model.delay=0.2", "trainer.max_epochs=400", "run.max_retries=0")
    process = start_hpo("run", study, *options)
    folder = tmp_path / "runs" / "tiny"
    wait_until(lambda: len({path.parent for path in folder.rglob("epoch-*.pt")}) == 2)
    database, kept = folder / "study.db", tmp_path / "kept.db"
    if harm == "removed":
        shutil.copy(database, kept)
        database.unlink()
    elif harm == "replaced":
        shutil.copy(database, kept)
        kept.rename(database)
    else:
        Path(f"{database}-wal").unlink()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3, errors
    name = "study.db-wal" if harm == "log removed" else "study.db"
    happened = "was replaced by another file" if harm == "replaced" else "was removed"
    assert f"{name} {happened} while it was in use" in errors
    assert "Traceback" not in errors
    assert database.exists() == (harm != "removed"), "no database is made in its place"
    assert len(list(folder.rglob("stopped.txt"))) == 2


def test_a_new_database_beside_old_trials_resumes_none_of_them(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    hpo("run", study, "--n-trials", 1)
    folder = tmp_path / "runs" / "tiny"
    (folder / "study.db").unlink()
    hpo("run", study, "--n-trials", 1, "study.sampler.seed=9", "trainer.max_epochs=5")
    trial = folder / "trials" / "0"
    assert sorted(path.name for path in trial.iterdir()) == ["attempt-1", "attempt-1.other-database-1"]
    assert (trial / "attempt-1" / "metrics.csv").read_text().count("\n") == 6
    said = (trial / "attempt-1" / "log.txt").read_text()
    assert "resuming from" not in said
    assert "it is now attempt-1.other-database-1" in said
