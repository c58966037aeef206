"""Runs under the contract of callbacks, in one process or several: each writes to a folder of its own."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.unit.trainer.support import interrupt_at, make_trainer, regression
from tests.unit.trainer.test_contract import ALL, CLOCKED
from trainer import Callback
from trainer.callbacks import Checkpoint
from trainer.distributed.ranks import rank


@dataclass(frozen=True)
class Contract:
    """What a run with a shipped callback came to.

    Attributes:
        history: Without what no run has the same twice.
        weights: At its end.
        reason: Why it ended.
        test_loss: Of an evaluation after it.
        state: Of the callback.
        files: Lines of the files in its folder of this rank, by their names with 0 for every number.
    """

    history: list[dict[str, float]]
    weights: dict[str, Tensor]
    reason: str | None
    test_loss: float
    state: dict[str, Any]
    files: dict[str, list[int]]


def contract_run(name: str, folder: str, *others: Callback, ckpt: str | None = None) -> Contract:
    """A run with a shipped callback. There is no dropout, of which each process draws its own."""
    os.environ |= {"WANDB_MODE": "disabled", "COMET_AUTO_LOG_DISABLE": "true", "COMET_START_ONLINE": "false"}
    own = Path(folder) / f"rank-{rank()}"
    own.mkdir(parents=True, exist_ok=True)
    callbacks = [ALL[name][0](own)] if name else []
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    trainer = make_trainer(
        [*callbacks, *others], model=model, metrics={"mae": nn.functional.l1_loss}, max_epochs=3
    )
    state = trainer.fit(regression(11), regression(7, seed=8), ckpt=ckpt)
    test_loss = trainer.test(regression())["test_loss"]
    history = [{key: item for key, item in metrics.items() if key not in CLOCKED} for metrics in state.history]
    kept = callbacks[0].state_dict() if callbacks and name not in {"TimeLimit", "Throughput"} else {}
    return Contract(history, dict(model.state_dict()), state.stop_reason, test_loss, kept, _files(own))


def contract_resumed(name: str, folder: str) -> tuple[Contract, Contract]:
    """A run with a shipped callback, and one that stops inside its second epoch and resumes."""

    def stored(place: str) -> list[Callback]:
        return [] if name == "Checkpoint" else [Checkpoint(Path(folder) / "kept" / place, max_overhead=1)]

    whole = contract_run(name, f"{folder}/whole", *stored("whole"))
    contract_run(name, f"{folder}/parts", *stored("parts"), interrupt_at(5))
    return whole, contract_run(name, f"{folder}/parts", *stored("parts"), ckpt="last")


def _files(folder: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            text = path.suffix in {".csv", ".jsonl"}
            lines = len(path.read_text().splitlines()) if text else 0
            found.setdefault(
                re.sub(r"[0-9a-f]*\d+[0-9a-f]*", "0", path.relative_to(folder).as_posix()), []
            ).append(lines)
    return found
