"""What the `.wandb` file of an offline run says, as W&B's own program reads it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.util import get_core_path


def keep_offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have W&B write its files below a folder, whatever an earlier test of this process has switched it to."""
    wandb.teardown()  # it remembers the environment of the first run
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name, place in (("DIR", folder), ("CONFIG_DIR", folder / "config"), ("CACHE_DIR", folder / "cache")):
        monkeypatch.setenv(f"WANDB_{name}", str(place))


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    """The records of a kind (``run``, ``history``, ``summary``, …), in their order."""
    # The program below `wandb leet inspect`, which needs a second only to start.
    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json", "--run-file", str(path)]
    done = subprocess.run([*command, str(path.parent)], capture_output=True, text=True, check=True)
    found = map(json.loads, done.stdout.splitlines())
    return [record[kind] for record in found if record["type"] == kind]


def history(path: Path) -> list[dict[str, Any]]:
    """What was logged, one mapping a call, without W&B's own keys but the step."""
    rows = [record["item"] for record in records(path, "history")]
    return [{key: value for key, value in row.items() if key == "_step" or key[0] != "_"} for row in rows]


def steps(path: Path) -> list[int]:
    """The steps that were logged."""
    return [row["_step"] for row in history(path)]


def run_record(path: Path) -> dict[str, Any]:
    """The record that opens the run: project, group, name, id, config, tags."""
    return records(path, "run")[0]


def config(path: Path) -> dict[str, Any]:
    """The run's configuration, without W&B's own."""
    return {key: value for key, value in run_record(path)["config"]["update"].items() if not key.startswith("_")}


def summary(path: Path) -> dict[str, Any]:
    """The run's summary as it ended, without W&B's own."""
    values: dict[str, Any] = {}
    for record in records(path, "summary"):
        values |= record["update"]
    return {key: value for key, value in values.items() if key[0] != "_"}
