"""GPUMemory: with the counts of an allocator that the test plays, and of a real GPU where there is one."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.trainer.callbacks.unchanged import assert_changes_nothing, assert_survives
from tests.unit.trainer.support import At, interrupt_at, make_trainer, regression, through_file
from trainer import Trainer
from trainer.callbacks.gpu_memory import GPUMemory
from trainer.callbacks.step_metrics import StepMetrics
from trainer.step_log import StepLog

DEVICE = torch.device("cuda", 1)
MB = 2**20
NAMES = ("gpu_memory_peak_mb", "gpu_memory_reserved_mb")


class Allocator:
    """Peaks since the last reset; asserts that no other device is asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.peak = self.resets = self.retries = 0
        self.used = False
        patch.setattr(torch.cuda, "memory_stats", self.stats)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        patch.setattr(torch.cuda, "max_memory_allocated", self.allocated)
        patch.setattr(torch.cuda, "max_memory_reserved", self.reserved)

    def take(self, megabytes: int) -> None:
        self.used = True
        self.peak = max(self.peak, megabytes * MB)

    def reset(self, device: torch.device) -> None:
        assert device == DEVICE
        self.peak = 0
        self.resets += 1

    def stats(self, device: torch.device) -> dict[str, int]:
        assert device == DEVICE
        return {"active_bytes.all.peak": 3 * self.peak, "num_alloc_retries": self.retries} if self.used else {}

    def allocated(self, device: torch.device) -> int:
        assert device == DEVICE
        return self.peak

    def reserved(self, device: torch.device) -> int:
        assert device == DEVICE
        return 2 * self.peak


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def on_device(*callbacks: Any, **options: Any) -> Trainer:
    """A trainer whose callbacks see another device than the one that its model is on."""
    pretend = At("setup", lambda trainer: setattr(trainer, "device", DEVICE))
    return make_trainer([GPUMemory(), pretend, *callbacks], **options)


def fit(trainer: Trainer) -> Trainer:
    trainer.fit(regression(), regression())
    return trainer


def peaks(trainer: Trainer) -> list[tuple[float | None, ...]]:
    return [tuple(metrics.get(name) for name in NAMES) for metrics in trainer.state.history]


def test_each_epoch_has_its_own_peak(allocator: Allocator) -> None:
    take = At("on_before_forward", lambda trainer: allocator.take(30 - 2 * trainer.state.step))
    assert peaks(fit(on_device(take, max_epochs=3))) == [(30.0, 60.0), (24.0, 48.0), (18.0, 36.0)]


def test_active_bytes_and_the_retries_of_each_epoch_are_there_for_steps_too(
    allocator: Allocator, tmp_path: Path
) -> None:
    def take(trainer: Any) -> None:
        allocator.take(10)
        allocator.retries += trainer.state.step

    trainer = fit(on_device(At("on_before_forward", take), StepMetrics(tmp_path, transfer_every_n_steps=2)))
    history = trainer.state.history
    assert [metrics["gpu_memory_active_mb"] for metrics in history] == [30.0, 30.0]
    assert [metrics["gpu_memory_retries"] for metrics in history] == [0 + 1 + 2, 3 + 4 + 5]
    log = StepLog(tmp_path / "steps.csv")
    retries = [(record.step, record.values.get("gpu_memory_retries")) for record in log]
    assert retries == [(1, None), (2, 1.0), (3, 3.0), (4, 3.0), (5, None), (6, 12.0)]


def test_validation_belongs_to_its_epoch(allocator: Allocator) -> None:
    take = At("on_validation_batch_end", lambda trainer: allocator.take(9))
    assert peaks(fit(on_device(take))) == [(9.0, 18.0), (9.0, 18.0)]


def test_what_was_taken_before_the_fit_is_not_counted(allocator: Allocator) -> None:
    allocator.take(99)
    take = At("on_before_forward", lambda trainer: allocator.take(5))
    stopped = fit(on_device(take, interrupt_at(4)))
    allocator.take(99)
    resumed = on_device(take)
    resumed.load_state_dict(through_file(stopped.state_dict()))
    assert peaks(fit(resumed)) == [(5.0, 10.0), (5.0, 10.0)]


def test_validating_alone_resets_nothing(allocator: Allocator) -> None:
    allocator.take(7)
    on_device().validate(regression())
    assert (allocator.peak, allocator.resets) == (7 * MB, 0)


def test_a_run_on_the_cpu_records_nothing_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("memory_stats", "reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.delattr(torch.cuda, name)
    with caplog.at_level(logging.INFO, "trainer.callbacks.gpu_memory"):
        trainer = fit(make_trainer([GPUMemory()], max_epochs=3))
    assert peaks(trainer) == [(None, None)] * 3
    assert [record.getMessage() for record in caplog.records] == ["no GPU memory is recorded: the run is on cpu"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_weights_and_batches_are_in_the_peak() -> None:
    model = nn.Linear(4, 2**20)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda outputs, targets: nn.functional.mse_loss(outputs.mean(1, keepdim=True), targets),
        callbacks=[GPUMemory()],
        max_epochs=2,
        device="cuda",
    )
    fit(trainer)
    weights = 5 * 2**20 * 4 / MB
    for peak, reserved in peaks(trainer):
        assert peak is not None
        assert reserved is not None
        assert 2 * weights < peak <= reserved  # weights and their gradients at least


def test_nothing_that_is_learnt_changes() -> None:
    assert_changes_nothing(GPUMemory)


def test_survives_any_use() -> None:
    assert_survives(GPUMemory)
