"""Runs for one process or several, by name: what the tests compare."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.unit.trainer.support import At, interrupt_at
from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import (
    EMA,
    Checkpoint,
    GradientAccumulation,
    GradientClipping,
    GradientMonitor,
    NaNDetection,
)
from trainer.distributed.processes import RankError
from trainer.distributed.ranks import rank
from trainer.metrics.whole_set import WholeSet

EPOCHS = 5


class Rows(Dataset[Any]):
    """A data set with items by number, which goes through a DataLoader."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


def points(samples: int, seed: int = 0) -> TensorDataset:
    """Inputs [samples, 8] of two classes, a third of them in the second."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 1.2).long())


def pictures(samples: int, seed: int = 0) -> TensorDataset:
    """Inputs [samples, 1, 6, 6] of two classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 1, 6, 6, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0, 2:4, 2:4].sum((1, 2)) > 0).long())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 2),
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def separation(outputs: Tensor, targets: Tensor) -> Tensor:
    """No mean over samples: the difference of the classes' mean outputs."""
    margin = outputs[:, 1] - outputs[:, 0]
    return margin[targets == 1].mean() - margin[targets == 0].mean()


def weighted() -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.8]))


class Own:
    """A step with a weight of its own: the targets of the second class alone count."""

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        outputs = model(inputs)
        counts = (targets == 1).float()
        losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
        total = counts.sum()
        return {"loss": (losses * counts).sum() / total.clamp(min=1), "outputs": outputs, "weight": total}


Build = Callable[[], dict[str, Any]]

VARIANTS: dict[str, Build] = {
    "mlp": dict,
    "weighted": lambda: {"loss": weighted()},
    "sum": lambda: {"loss": nn.CrossEntropyLoss(reduction="sum"), "lr": 0.002},
    "ignored targets": lambda: {"loss": nn.CrossEntropyLoss(ignore_index=0), "batch_size": 6},
    "own weight": lambda: {"loss": None, "step": Own()},
    "accumulation": lambda: {"loss": weighted(), "callbacks": [GradientAccumulation(3)]},
    "clipping": lambda: {"callbacks": [GradientClipping(max_norm=0.05), GradientMonitor()]},
    "ema": lambda: {"callbacks": [EMA(0.8)]},
    "cnn": lambda: {"model": cnn(), "data": pictures},
    "cnn, accumulation, weighted": lambda: {
        "model": cnn(),
        "data": pictures,
        "loss": weighted(),
        "callbacks": [GradientAccumulation(2)],
    },
    "loader": lambda: {"wrap": Rows},
    "tiny batches": lambda: {"batch_size": 3, "samples": 10},
}


def build(
    name: str, callbacks: Iterable[Callback] = (), *, seed: int = 3, **changes: Any
) -> tuple[Trainer, Any, Any]:
    """A trainer with training and validation data."""
    torch.manual_seed(seed)
    options = {"loss": nn.CrossEntropyLoss(), "callbacks": [], **VARIANTS[name](), **changes}
    data, wrap = options.pop("data", points), options.pop("wrap", lambda item: item)
    size, samples = options.pop("batch_size", 16), options.pop("samples", 85)
    model = options.pop("model", None) or mlp()
    options.setdefault("max_epochs", EPOCHS)
    rate = options.pop("lr", 0.05)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
        metrics={"accuracy": accuracy, "separation": WholeSet(separation)},
        batching=BatchOptions(batch_size=size, eval_batch_size=20),
        callbacks=[*options.pop("callbacks"), *callbacks],
        device="cpu",
        **options,
    )
    return trainer, wrap(data(samples)), wrap(data(33, seed=1))


def fitted(name: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The history of a run, and the weights at its end."""
    trainer, train, val = build(name)
    state = trainer.fit(train, val)
    return [dict(metrics) for metrics in state.history], dict(trainer.model.state_dict())


def stopped(asking: int, batch: int, how: str) -> tuple[Any, ...]:
    """Where a run ends that one rank wants to end in a batch of its second epoch."""

    def act(trainer: Any) -> None:
        if how == "epoch":
            trainer.state.stop_epoch()
        trainer.state.stop("enough", now=how == "now")

    ask = At(
        "on_train_batch_end",
        act,
        lambda t: rank() == asking and (t.state.epoch, t.state.batch_index) == (1, batch),
    )
    trainer, train, val = build("mlp", [ask])
    state = trainer.fit(train, val)
    return state.stop_reason, state.epoch, state.batch_index, state.step, len(state.history)


def diverged(asking: int) -> tuple[Any, ...]:
    """Where a run ends in which the loss of one rank is NaN from a batch on."""

    def spoil(trainer: Any) -> None:
        trainer.state.loss = trainer.state.loss * float("nan")

    at = At("on_after_forward", spoil, lambda t: rank() == asking and t.state.step == 7)
    trainer, train, val = build("mlp", [at, NaNDetection(every_n_batches=1)])
    state = trainer.fit(train, val)
    return state.stop_reason, state.epoch, state.batch_index, state.step


class PrunedError(Exception):
    """What a pruner raises."""


def failing(asking: int, event: str, kind: type[Exception], place: tuple[int, int] = (1, 2)) -> str:
    """A run in which one rank fails; the reason of the end as the state has it."""

    def fail(trainer: Any, *_: Any) -> None:
        if kind is PrunedError:
            trainer.state.stop_reason = "pruned"
        raise kind("no more")

    def due(trainer: Any) -> bool:
        return rank() == asking and (trainer.state.epoch, trainer.state.batch_index) == place

    trainer, train, val = build("mlp", [At(event, fail, due)])
    try:
        trainer.fit(train, val)
    except (RankError, kind) as error:
        return f"{type(error).__name__}: {error} ({trainer.state.stop_reason})"
    return "no error"


def killed(asking: int, event: str) -> str:
    """A run in which one rank is killed."""
    at = At(
        event, lambda *_: os.kill(os.getpid(), signal.SIGKILL), lambda t: rank() == asking and t.state.step == 7
    )
    trainer, train, val = build("mlp", [at])
    try:
        trainer.fit(train, val)
    except RankError as error:
        return str(error)
    return "no error"


def interrupted(
    folder: str, name: str, stop_at: int | None, every: int | None = None, resume: bool = False
) -> Any:
    """A run with checkpoints that is interrupted after a step, or resumes; what it came to."""
    callbacks: list[Callback] = [Checkpoint(folder, max_overhead=1, every_n_steps=every)]
    if stop_at is not None:
        callbacks.append(interrupt_at(stop_at))
    trainer, train, val = build(name, callbacks)
    drawn: list[float] = []
    draw = lambda trainer: drawn.append(float(torch.rand(()) + random.random() + np.random.rand()))  # noqa: E731
    trainer.callbacks.register("on_before_forward", draw)
    trainer.fit(train, val, ckpt="last" if resume else None)
    state = trainer.state
    return [dict(item) for item in state.history], dict(trainer.model.state_dict()), drawn, state.step
