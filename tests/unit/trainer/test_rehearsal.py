"""A rehearsal goes once through everything, and leaves the trainer as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.trainer.support import At, Recorder, assert_same, frozen, make_model, make_trainer, regression
from trainer import BatchOptions, Trainer
from trainer.callbacks import (
    EMA,
    BatchSizeSchedule,
    Checkpoint,
    CSVLogging,
    EarlyStopping,
    GradientAccumulation,
    MetricSaver,
    StabilityMonitor,
    StepMetrics,
    WeightMerging,
)
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


@pytest.mark.parametrize(
    "callback",
    [StepMetrics, lambda folder: MetricSaver(folder, every_n_steps=1), lambda folder: WeightMerging(folder, 2, 2)],
    ids=["StepMetrics", "MetricSaver", "WeightMerging"],
)
def test_nothing_is_said_of_callbacks_that_are_left_out(callback: Any, tmp_path: Path, caplog: Any) -> None:
    kept, left_out = EarlyStopping(), callback(tmp_path)
    trainer, before = make_trainer([kept, left_out]), left_out.state_dict()
    rehearse(trainer, regression(), regression())
    assert caplog.text == ""
    assert left_out.state_dict() == before
    assert kept.state_dict() == EarlyStopping().state_dict()


@pytest.mark.parametrize(
    ("callback", "options"),
    [
        (lambda: GradientAccumulation(2, drop_last=True), {}),
        (lambda: GradientAccumulation(4, drop_last=True), {"validate_every": 1}),
        (lambda: GradientAccumulation(4), {}),
        (lambda: BatchSizeSchedule({0: 2, 1: 4}, unit="step"), {}),
        (lambda: BatchSizeSchedule({0: 2, 1: 4}), {}),
        (lambda: At("on_epoch_end", lambda trainer: trainer.set_batch_size(3)), {}),
        (lambda: At("on_train_batch_start", lambda trainer: trainer.state.skip("optimizer_step")), {}),
    ],
    ids=["whole groups", "groups over passes", "a short pass", "by steps", "by passes", "by hand", "no step"],
)
def test_what_a_fit_trains_is_rehearsed(callback: Any, options: dict[str, Any]) -> None:
    trainer, plain = (make_trainer([callback()], **options) for _ in range(2))
    assert {"train_loss", "val_loss"} <= rehearse(trainer, regression(), regression()).keys()
    for each in (trainer, plain):
        each.fit(regression(), regression())
    assert_same(frozen(trainer), frozen(plain))


def test_a_rehearsal_of_accumulated_batches_is_their_step() -> None:
    model = torch.nn.Linear(4, 1)
    by_hand = torch.nn.Linear(4, 1)
    by_hand.load_state_dict(model.state_dict())
    inputs, targets = regression().tensors
    trainer = make_trainer(
        [GradientAccumulation(2, drop_last=True)],
        model=model,
        batching=BatchOptions(batch_size=4, eval_batch_size=4, shuffle=False),
    )
    found = rehearse(trainer, (inputs, targets), (inputs, targets))
    loss = torch.nn.functional.mse_loss(by_hand(inputs[:8]), targets[:8])
    loss.backward()
    with torch.no_grad():
        for parameter in by_hand.parameters():
            parameter -= 0.05 * parameter.grad
        after = torch.nn.functional.mse_loss(by_hand(inputs[:4]), targets[:4])
    assert found["train_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["val_loss"] == pytest.approx(after.item(), rel=1e-5)


class Counting(nn.Module):
    """Counts its batches, and keeps the latest, in buffers that no state holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        for name, start in (
            ("replaced", torch.zeros(())),
            ("changed", torch.zeros(())),
            ("grown", torch.zeros(1)),
        ):
            self.register_buffer(name, start, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.replaced = self.replaced + 1
            self.changed += 1
            self.grown = torch.ones(len(inputs))
        return self.linear(inputs) * (1 + self.replaced + self.changed + len(self.grown))


def test_buffers_that_are_in_no_state_are_put_back() -> None:
    rehearsed, plain = (make_trainer(model=frozen_start(Counting())) for _ in range(2))
    rehearse(rehearsed, regression(), regression())
    assert_same(dict(rehearsed.model.named_buffers()), dict(Counting().named_buffers()))
    for trainer in (rehearsed, plain):
        trainer.fit(regression())
    assert_same(frozen(rehearsed), frozen(plain))


def frozen_start(model: Counting) -> Counting:
    """The model with weights that are the same in each."""
    nn.init.constant_(model.linear.weight, 0.1)
    nn.init.constant_(model.linear.bias, 0.1)
    return model


def test_lazy_modules_without_weights_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(1))
    trainer = make_trainer(model=model)
    with pytest.raises(
        ValueError, match=r"parameter 0\.weight has no shape yet: call the model once .* before rehe"
    ):
        rehearse(trainer, regression())
    model(regression().tensors[0])
    assert rehearse(trainer, regression()).keys() == {"train_loss", "lr"}
