"""A rehearsal goes once through everything, and leaves the trainer as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.trainer.support import At, Recorder, assert_same, frozen, make_model, make_trainer, regression
from trainer import BatchOptions, Trainer
from trainer.callbacks import EMA, Checkpoint, CSVLogging, EarlyStopping, StabilityMonitor
from trainer.rehearsal import rehearse


def build(folder: Path, *callbacks: Any) -> Trainer:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    files = [Checkpoint(folder / "checkpoints", max_overhead=1), CSVLogging(folder / "metrics.csv")]
    return make_trainer(
        [*callbacks, *files, EMA(0.9), EarlyStopping(), StabilityMonitor(window=8)],
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),
        batching=BatchOptions(batch_size=4, eval_batch_size=4),
    )


def test_a_fit_after_a_rehearsal_is_the_one_without(tmp_path: Path) -> None:
    log: list[str] = []
    trainer = build(tmp_path, Recorder(log))
    found = rehearse(trainer, regression(), regression(), regression())
    assert {"train_loss", "val_loss", "test_loss"} <= found.keys()
    batches = [f"on_{scope}_batch_end" for scope in ("train", "validation", "test")]
    assert [log.count(event) for event in batches] == [1, 1, 1]
    assert log.count("on_epoch_end") == log.count("on_fit_end") == 1
    assert list(tmp_path.iterdir()) == []
    assert_same(frozen(trainer), frozen(build(tmp_path / "new")))
    trainer.fit(regression(), regression())
    plain = build(tmp_path / "other")
    plain.fit(regression(), regression())
    assert_same(frozen(trainer), frozen(plain))


def test_what_fails_late_fails_at_once_and_everything_is_put_back(tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    trainer = build(tmp_path, At("on_test_end", fail))
    with pytest.raises(ZeroDivisionError):
        rehearse(trainer, regression(), regression(), regression())
    assert_same(frozen(trainer), frozen(build(tmp_path / "new")))
    trainer.fit(regression(), regression())
    with pytest.raises(ValueError, match="has trained already"):
        rehearse(trainer, regression())
