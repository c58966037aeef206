"""What stands beside a study: the dashboard and W&B, both real."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support import wandb_file
from tests.support.commands import PATIENCE, STUDY, hpo, hpo_json, make_study, start_hpo, start_program


def get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=PATIENCE) as response:
        return json.loads(response.read())


def test_the_dashboard_shows_the_curves_that_were_reported(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    hpo("run", study, "--n-trials", 2)
    process = start_program("dashboard", study, "--port", 0)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"(http://127\.0\.0\.1:\d+)/dashboard/studies/(\d+)", line)
        assert match, line
        address, study_id = match.groups()
        assert [item["study_name"] for item in get(f"{address}/api/studies")["study_summaries"]] == ["tiny"]
        trials = get(f"{address}/api/studies/{study_id}?after=0")["trials"]
        assert [len(trial["intermediate_values"]) for trial in trials] == [3, 3]
        assert {item["name"] for item in trials[0]["params"]} == {"optimizer.lr", "model.hidden"}
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode in (0, 130)
    assert "Traceback" not in errors


def test_a_taken_port_is_said(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    hpo("run", study, "--n-trials", 1)
    first = start_hpo("dashboard", study, "--port", 0)
    try:
        assert first.stdout is not None
        port = re.search(r"127\.0\.0\.1:(\d+)", first.stdout.readline())
        assert port
        assert "give another `--port`" in hpo("dashboard", study, "--port", port[1], code=3).stderr
    finally:
        first.kill()
        first.communicate()


def test_each_trial_is_an_offline_wandb_run_of_the_studys_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    study = make_study(tmp_path, STUDY.replace("search_space:", "callbacks: {wandb: {}}\nsearch_space:"))
    hpo("run", study, "--n-trials", 2)
    params = [entry["params"] for entry in hpo_json("trials", study)]
    for number in range(2):
        folder = tmp_path / "runs" / "tiny" / "trials" / str(number) / "attempt-1"
        (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        run = wandb_file.run_record(file)
        assert (run["project"], run["run_group"], run["display_name"]) == ("tiny", "tiny", f"trial-{number}")
        assert wandb_file.config(file) == params[number]
        rows = wandb_file.history(file)
        assert [row["epoch"] for row in rows] == [1, 2, 3]
        assert all({"train_loss", "val_loss", "lr", "max_grad_norm", "val_mae"} <= row.keys() for row in rows)
