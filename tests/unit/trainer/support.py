"""Small runs that are real: data, models, trainers, and callbacks that watch or disturb them."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer import BatchOptions, Callback, Trainer
from trainer.checkpoint.manager import snapshot
from trainer.events import EVENTS

INTERRUPTED = "interrupted"


def quick(examples: int) -> settings:
    """Settings for properties: no clock, no files, the same examples each time."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def regression(samples: int = 12, seed: int = 3) -> TensorDataset:
    """Inputs [samples, 4] and noisy linear targets [samples, 1]."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 4, generator=generator)
    noise = torch.randn(samples, 1, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True) + 0.1 * noise)


def make_model(seed: int = 7) -> nn.Sequential:
    """A model with everything that makes resuming hard: dropout, and statistics of batches."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 1))


def make_trainer(callbacks: Iterable[Callback] = (), **options: Any) -> Trainer:
    """A trainer over ``make_model`` with SGD, batches of 4; ``options`` replace any of it."""
    model = options.pop("model", None) or make_model()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.05)
    if "step" not in options:
        options.setdefault("loss", nn.functional.mse_loss)
    options.setdefault("max_epochs", 2)
    options.setdefault("batching", BatchOptions(batch_size=4))
    options.setdefault("device", "cpu")
    return Trainer(model, optimizer, callbacks=callbacks, **options)


class Scripted:
    """A step whose losses are given: one training and one validation batch an epoch."""

    def __init__(self, train: Iterable[float], val: Iterable[float]) -> None:
        self.train, self.val = iter(train), iter(val)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        value = next(self.train if model.training else self.val)
        return sum(parameter.sum() * 0 for parameter in model.parameters()) + torch.tensor(
            value, dtype=torch.float64
        )


def scripted_trainer(
    callbacks: Iterable[Callback],
    val: Sequence[float],
    train: Sequence[float] | None = None,
    **options: Any,
) -> Trainer:
    """A real run whose losses follow the script; see ``run_scripted``."""
    options.setdefault("max_epochs", len(val))
    return make_trainer(
        callbacks,
        model=nn.Linear(1, 1).double(),
        step=Scripted([1.0] * len(val) if train is None else train, val),
        batching=BatchOptions(batch_size=8),
        **options,
    )


def run_scripted(
    callbacks: Iterable[Callback],
    val: Sequence[float],
    train: Sequence[float] | None = None,
    **options: Any,
) -> Trainer:
    """Train through the script and return the trainer."""
    trainer = scripted_trainer(callbacks, val, train, **options)
    trainer.fit(one_batch(), one_batch())
    return trainer


def one_batch() -> TensorDataset:
    """A data set that makes a single batch."""
    return TensorDataset(torch.zeros(2, 1).double(), torch.zeros(2, 1).double())


class At(Callback):
    """Calls ``action(trainer)`` at one event, as often as ``when(trainer)`` holds."""

    def __init__(
        self,
        event: str,
        action: Callable[..., None],
        when: Callable[[Any], bool] = lambda trainer: True,
        priority: int = 50,
    ) -> None:
        self.priority = priority
        self._event, self._action, self._when = event, action, when

    def _act(self, event: str, trainer: Any, *arguments: Any) -> None:
        if event == self._event and self._when(trainer):
            self._action(trainer, *arguments)


def _forward(event: str) -> Callable[..., None]:
    return lambda self, trainer, *arguments: self._act(event, trainer, *arguments)


for _event in EVENTS:
    setattr(At, _event, _forward(_event))


def beside_a_graph(callback: Callback) -> Callback:
    """A test's callback that only looks, and so may be there where the step is recorded."""
    callback.graph_safe = True  # type: ignore[misc]
    return callback


class Recorder(Callback):
    """Writes down every event, as ``(label, event)`` where it has a label."""

    transient = ("log",)

    def __init__(self, log: list[Any], label: Any = None, priority: int = 50) -> None:
        self.log, self.label, self.priority = log, label, priority


def _record(event: str) -> Callable[..., None]:
    def hook(self: Recorder, trainer: Any, *arguments: Any) -> None:
        self.log.append(event if self.label is None else (self.label, event))

    return hook


for _event in EVENTS:
    setattr(Recorder, _event, _record(_event))


def interrupt_at(*steps: int, now: bool = True) -> At:
    """Asks the run to stop right after each of these steps."""
    return At(
        "on_train_batch_end",
        lambda trainer: trainer.state.stop(INTERRUPTED, now=now),
        lambda trainer: trainer.state.step in steps,
    )


def splus(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """An optimizer whose parameters look different in evaluation; to import its package takes seconds."""
    from pytorch_optimizer import SPlus

    return SPlus(parameters, lr=lr, inverse_steps=3)


def through_file(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint as it comes back from a disk: plain values and tensors only."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def fail(error: BaseException, reason: str = "") -> At:
    """Raises in the second epoch, after a request to stop if there is a reason for one."""

    def act(trainer: Any) -> None:
        if reason:
            trainer.state.stop(reason)
        raise error

    return At("on_epoch_end", act, lambda trainer: trainer.state.epoch == 2, priority=85)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the trainer has warned of."""
    return [
        record.message
        for record in caplog.records
        if record.name.startswith("trainer.") and record.levelno >= logging.WARNING
    ]


def frozen(trainer: Trainer) -> dict[str, Any]:
    """What two runs are compared by: all of a checkpoint but the global generators."""
    state: dict[str, Any] = snapshot(trainer.state_dict())
    del state["rng"]
    return state


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Equal to the last bit, NaN included; names the first place that is not."""
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(torch.nan_to_num(one, nan=1e30), torch.nan_to_num(other, nan=1e30)), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (item, other_item) in enumerate(zip(one, other, strict=True)):
            assert_same(item, other_item, f"{path}[{index}]")
    else:
        assert one == other or (one != one and other != other), f"{path}: {one} != {other}"


class TwoUpdates:
    """Updates the first layers in every second batch, and the last one in each."""

    def __call__(self, model: nn.Module, batch: Any, update: Any) -> Tensor:
        inputs, targets = batch
        if update.state.batch_index % 2 == 0:
            update(nn.functional.mse_loss(model(inputs), targets), "first")
        loss = nn.functional.mse_loss(model(inputs), targets)
        update(loss, "last")
        return loss
