"""A Trainer on a GPU: what it learns, where it resumes, and what it leaves there."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.gpu.support import DEVICE, OPTIMIZERS, SAMPLES, SCHEDULERS, fit, gpu_trainer, needs_gpu, on_cpu
from tests.unit.trainer.support import (
    At,
    assert_same,
    beside_a_graph,
    frozen,
    interrupt_at,
    regression,
    through_file,
)
from trainer import BatchOptions, Trainer
from trainer.callbacks import (
    EMA,
    Checkpoint,
    GarbageCollection,
    GPUMemory,
    GradientClipping,
    GradientMonitor,
    NaNDetection,
    Profiler,
    StabilityMonitor,
    Throughput,
    WeightAveraging,
)
from trainer.data.random_state import seed_all
from trainer.distributed.group import Group
from trainer.metrics.epoch import EpochMetrics

pytestmark = needs_gpu


class _WithAnother(Group):
    """Two processes, of which the other has recorded a name of its own."""

    size = 2

    def gather(self, value: Any) -> list[Any]:
        return [value, {"elsewhere": ("mean", 6.0, 2.0)}]


def test_what_another_process_alone_has_recorded_is_asked_for_twice() -> None:
    metrics = EpochMetrics(torch.device(DEVICE), group=_WithAnother())
    for value in (1.0, 3.0):
        metrics.record("here", torch.tensor(value, device=DEVICE))
        found = metrics.compute()
    assert found == {"here": 2.0, "elsewhere": 3.0}


def trained(callbacks: Any = (), **options: Any) -> Trainer:
    seed_all(1)
    return fit(gpu_trainer(callbacks, **options))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("step", [1, 2, 5, 12, 17, 24])
def test_a_run_stopped_anywhere_resumes_to_the_same_bits(precision: Any, graph: bool, step: int) -> None:
    """With dropout, whose random numbers are the device's."""
    if precision == "fp16" and graph:
        pytest.skip("a graph can't record the scaling")
    options = {"precision": precision, "cuda_graph": graph, "scheduler": "cosine"}
    whole = trained(**options)
    stopped = trained([beside_a_graph(interrupt_at(step))], **options)
    assert stopped.state.step == step
    seed_all(99)
    again = gpu_trainer(**options)
    again.load_state_dict(through_file(stopped.state_dict()))
    torch.rand(5, device=DEVICE)
    assert_same(on_cpu(frozen(fit(again))), on_cpu(frozen(whole)))


def test_a_run_resumes_from_its_file(tmp_path: Path) -> None:
    whole = trained([Checkpoint(tmp_path / "whole")])
    trained([Checkpoint(tmp_path / "part", every_n_steps=5), interrupt_at(17)])
    again = gpu_trainer([Checkpoint(tmp_path / "part", every_n_steps=5)])
    again.fit(regression(SAMPLES), regression(9, seed=8), ckpt="last")
    mine, theirs = on_cpu(frozen(again)), on_cpu(frozen(whole))
    for part in ("model", "optimizer"):
        assert_same(mine[part], theirs[part])


@pytest.mark.parametrize(("optimizer", "device"), [("amsgrad", "cpu"), ("adamw", "cuda")])
def test_a_resumed_optimizer_counts_its_steps_where_a_fresh_one_does(
    optimizer: str, device: str, tmp_path: Path
) -> None:
    """AMSGrad is given ``foreach``; AdamW is fused, which counts on the device."""

    def counted(trainer: Trainer) -> set[str]:
        return {kept["step"].device.type for kept in trainer.optimizer.state.values()}

    assert counted(trained([Checkpoint(tmp_path), interrupt_at(5)], optimizer=optimizer)) == {device}
    again = gpu_trainer([Checkpoint(tmp_path)], optimizer=optimizer)
    again.fit(regression(SAMPLES), regression(9, seed=8), ckpt="last")
    assert again.state.epoch == 3
    assert counted(again) == {device}


@pytest.mark.parametrize("graph", [False, True])
def test_a_checkpoint_of_a_gpu_trains_on_at_a_cpu(graph: bool) -> None:
    stopped = trained([beside_a_graph(interrupt_at(17))], cuda_graph=graph)
    again = gpu_trainer(device="cpu")
    again.load_state_dict(through_file(stopped.state_dict()))
    fit(again)
    assert again.state.step == 36
    assert math.isfinite(again.state.history[-1]["val_loss"])
    back = gpu_trainer(max_epochs=4, cuda_graph=graph)
    back.load_state_dict(through_file(again.state_dict()))
    assert fit(back).state.step == 48


def without_bias() -> nn.Module:
    seed_all(7)
    return nn.Sequential(
        nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 1)
    )


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_graph_learns_what_single_launches_learn(optimizer: str, scheduler: str) -> None:
    """With batch norm, dropout, a smaller last batch, and a learning rate that changes.

    No bias before the batch norm, which takes it out again: its gradient is rounding, and Adam makes steps of it.
    """
    plain, recorded = (
        trained(
            [GradientMonitor()],
            model=without_bias(),
            optimizer=optimizer,
            scheduler=scheduler,
            cuda_graph=graph,
        )
        for graph in (False, True)
    )
    for one, other in zip(plain.state.history, recorded.state.history, strict=True):
        assert other == pytest.approx(one, rel=2e-4, abs=1e-6)
    for one, other in zip(plain.model.state_dict().values(), recorded.model.state_dict().values(), strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)


def alone(precision: str) -> list[float]:
    """Training losses of torch alone, each batch's."""
    seed_all(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    losses = []
    inputs, targets = (tensor.to(DEVICE) for tensor in regression(48).tensors)
    for _ in range(3):
        for at in range(0, 48, 4):
            optimizer.zero_grad()
            with torch.autocast("cuda", types[precision], enabled=precision != "fp32"):
                loss = nn.functional.mse_loss(model(inputs[at : at + 4]), targets[at : at + 4])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_each_precision_learns_what_torch_alone_learns(precision: Any) -> None:
    seed_all(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    losses: list[float] = []
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.02),
        nn.functional.mse_loss,
        callbacks=[
            GradientClipping(max_norm=1.0),
            At("on_train_batch_end", lambda trainer: losses.append(trainer.state.loss.item())),
        ],
        max_epochs=3,
        precision=precision,
        batching=BatchOptions(batch_size=4, shuffle=False),
        device=DEVICE,
    )
    trainer.fit(regression(48))
    assert losses == pytest.approx(alone(precision), rel=1e-4 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_compiled_model_learns_what_it_learns_as_it_is(precision: Any, graph: bool) -> None:
    def model() -> nn.Module:
        seed_all(1)
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    plain = trained(model=model(), precision=precision)
    compiled = trained(model=model(), precision=precision, compile=True, cuda_graph=graph)
    for one, other in zip(plain.state.history, compiled.state.history, strict=True):
        assert other == pytest.approx(one, rel=1e-3 if precision == "fp32" else 5e-2)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_no_step_waits_for_the_device_with_a_loader(graph: bool, workers: int) -> None:
    def forbid(trainer: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if trainer.state.batch_index else "default")

    data = DataLoader(regression(SAMPLES), 4, shuffle=True, num_workers=workers, pin_memory=True)
    trainer = gpu_trainer(
        [
            NaNDetection(),
            GradientMonitor(),
            StabilityMonitor(),
            beside_a_graph(At("on_train_batch_end", forbid)),
            beside_a_graph(
                At("on_train_epoch_end", lambda trainer: torch.cuda.set_sync_debug_mode("default"), priority=-1000)
            ),
        ],
        metrics={"mae": nn.functional.l1_loss},
        cuda_graph=graph,
        max_epochs=2,
    )
    try:
        trainer.fit(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.state.epoch == 2


def test_batches_copied_beside_the_training_are_those_of_the_cpu() -> None:
    """Each batch's sum as the step sees it, while large ones are copied and memory is used again."""
    data = torch.utils.data.TensorDataset(torch.arange(64 * 4096.0).view(64, 4096))
    seen: list[Any] = []

    def step(model: nn.Module, batch: Any) -> Any:
        noise = torch.randn(2048, 2048, device=batch[0].device)
        busy = (noise @ noise).sum() * 0  # the device is behind the host
        seen.append(batch[0].double().sum() + busy)
        return model(batch[0]).mean()

    model = nn.Linear(4096, 1)
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.0), step=step, max_epochs=2, device=DEVICE,
        batching=BatchOptions(batch_size=4, shuffle=False),
    )  # fmt: skip
    trainer.fit(DataLoader(data, 4, pin_memory=True))
    sums = [data.tensors[0][at : at + 4].double().sum().item() for at in range(0, 64, 4)]
    assert [value.item() for value in seen] == sums * 2


def test_an_ended_run_gives_its_memory_back() -> None:
    def held() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    trained(cuda_graph=True)
    before = held()
    for _ in range(3):
        trained(cuda_graph=True)
        assert held() <= before + 2**20


def test_the_callbacks_that_look_at_a_device(tmp_path: Path) -> None:
    trainer = trained(
        [
            GPUMemory(),
            Throughput(flops_per_sample="measure", peak_flops=67e12),
            StabilityMonitor(window=4),
            GarbageCollection(),
            EMA(0.9),
            Profiler(tmp_path, active=2),
        ],
        scheduler="cosine",
    )
    last = trainer.state.history[-1]
    assert last["gpu_memory_peak_mb"] > 0
    assert last["samples_per_second"] > 0
    assert 0 < last["flops_utilisation"] < 1
    (operators,) = tmp_path.glob("operators-step-*.txt")
    assert "CUDA" in operators.read_text()


def test_averaged_weights_live_on_the_device() -> None:
    trainer = trained([WeightAveraging(last_steps=0.5)])
    assert all(parameter.is_cuda for parameter in trainer.model.parameters())
    assert math.isfinite(trainer.state.history[-1]["val_loss"])


@pytest.mark.parametrize("step", [1, 5])
def test_memory_that_runs_out_is_told_as_such_inside_of_a_graph_too(step: int) -> None:
    """The fourth batch is recorded; what fails in there must not hide behind the recording's own error."""
    from hpo.study.outcome import Outcome
    from hpo.trial.failure import failure_outcome

    class Hungry(nn.Linear):
        calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += self.training
            if self.calls == step - (step == 5):
                torch.empty(2**42, device=inputs.device)
            return super().forward(inputs)

    trainer = gpu_trainer(model=Hungry(4, 1), cuda_graph=True)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        fit(trainer)
    assert failure_outcome(raised.value) == Outcome.OUT_OF_MEMORY, repr(raised.value)
    assert torch.ones(2, device=DEVICE).sum().item() == 2
