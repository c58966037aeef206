"""What the `.wandb` file of an offline run says."""

import json
from pathlib import Path
from typing import Any

from trainer.wandb_files import read_records


def history(path: Path) -> list[dict[str, Any]]:
    """What was logged, one mapping a call, without W&B's own keys but the step."""
    rows = []
    for record in read_records(path):
        if record.HasField("history"):
            items = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append({key: value for key, value in items.items() if key == "_step" or key[0] != "_"})
    return rows


def run_record(path: Path) -> Any:
    """The record that opens the run: project, group, name, id, config, tags."""
    return next(record.run for record in read_records(path) if record.HasField("run"))


def config(path: Path) -> dict[str, Any]:
    """The run's configuration, without W&B's own."""
    update = run_record(path).config.update
    return {item.key: json.loads(item.value_json) for item in update if not item.key.startswith("_")}


def summary(path: Path) -> dict[str, Any]:
    """The run's summary as it ended, without W&B's own."""
    values: dict[str, Any] = {}
    for record in read_records(path):
        if record.HasField("summary"):
            for item in record.summary.update:
                values[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return {key: value for key, value in values.items() if key[0] != "_"}
