"""Runs for one process or several, by name: what the tests compare."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from tests.unit.trainer.support import At, interrupt_at, make_model, make_trainer, regression
from tests.unit.trainer.test_contract import ALL, CLOCKED
from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import (
    EMA,
    BestWeights,
    Checkpoint,
    GarbageCollection,
    GradientAccumulation,
    GradientClipping,
    GradientMonitor,
    NaNDetection,
    StabilityMonitor,
    Throughput,
    default_callbacks,
)
from trainer.distributed import processes
from trainer.distributed.rank_error import RankError
from trainer.distributed.ranks import rank, world_size
from trainer.metrics.epoch import _Accumulator
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


def precise_points(samples: int, seed: int = 0) -> TensorDataset:
    """The same in 64 bits."""
    inputs, targets = points(samples, seed).tensors
    return TensorDataset(inputs.double(), targets)


def pictures(samples: int, seed: int = 0) -> TensorDataset:
    """Inputs [samples, 1, 6, 6] of two classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 1, 6, 6, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0, 2:4, 2:4].sum((1, 2)) > 0).long())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


class Blocks(nn.Module):
    """A model of the form of a transformer: blocks in a list, and weights that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 11)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(11, 11), nn.Tanh()) for _ in range(3)])
        self.tied = nn.Linear(11, 11)
        self.tied.weight = self.blocks[2][0].weight
        self.last = nn.Linear(11, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.first(inputs)
        for block in self.blocks:
            values = values + block(values)
        return self.last(self.tied(values))


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


class Taught(nn.Module):
    """A model with a batch norm in a teacher, which takes no gradients, and in a part that is computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.teacher = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(inputs)
        values = self.first(inputs)
        if self.training:
            values = checkpoint(lambda part: self.norm(part).tanh(), values, use_reentrant=True)
        else:
            values = self.norm(values).tanh()
        return self.last(values) + taught


def channels_last() -> nn.Module:
    """A model of which a weight does not lie in memory in the order of its dimensions."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    return model.to(memory_format=torch.channels_last)


class Turned(nn.Module):
    """A model with complex numbers, trained ones and others, and with integers of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.ones(1))  # so that what follows begins at an odd place
        self.turn = nn.Parameter(torch.polar(torch.ones(8), torch.linspace(0, 1, 8)))
        self.register_buffer("angles", torch.polar(torch.ones(8), torch.arange(8.0)))
        self.register_buffer("places", torch.arange(8, dtype=torch.int16))
        self.inner = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner((inputs[:, self.places.long()] * self.odd * self.angles * self.turn.conj()).real)


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


class OwnUpdate:
    """A step that makes its own updates."""

    def __call__(self, model: nn.Module, batch: Any, update: Any) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(model(inputs), targets)
        update(loss)
        return loss


class Spread:
    """A metric that counts by itself: the range of the outputs."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.low, self.high = float("inf"), -float("inf")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.low, self.high = min(self.low, outputs.min().item()), max(self.high, outputs.max().item())

    def compute(self) -> float:
        return self.high - self.low

    def merge_state(self, others: Iterable[Spread]) -> None:
        for other in others:
            self.low, self.high = min(self.low, other.low), max(self.high, other.high)


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
    "channels last": lambda: {"model": channels_last(), "data": pictures},
    "complex": lambda: {"model": Turned()},
    "compiled cnn": lambda: {"model": cnn(), "data": pictures, "compile": {"backend": "eager"}},
    "teacher": lambda: {"model": Taught()},
    "cnn, accumulation, weighted": lambda: {
        "model": cnn(),
        "data": pictures,
        "loss": weighted(),
        "callbacks": [GradientAccumulation(2)],
    },
    "blocks": lambda: {"model": Blocks(), "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01)},
    "loader": lambda: {"wrap": Rows},
    "closure": lambda: {"optimizer": lambda p: torch.optim.LBFGS(p, lr=0.02, max_iter=2)},
    "closure of a sum": lambda: {
        "loss": nn.CrossEntropyLoss(reduction="sum"),
        "optimizer": lambda p: torch.optim.LBFGS(p, lr=0.002, max_iter=3, line_search_fn="strong_wolfe"),
        "model": mlp().double(),  # else the line search makes much of a rounding
        "data": precise_points,
    },
    "stability": lambda: {"callbacks": [StabilityMonitor(window=4, threshold=0.5)]},
    "stability, ignored targets": lambda: {
        "loss": nn.CrossEntropyLoss(ignore_index=0),
        "batch_size": 6,
        "callbacks": [StabilityMonitor(window=4, threshold=0.5)],
    },
    "stability of a sum": lambda: {
        "loss": nn.CrossEntropyLoss(reduction="sum"),
        "lr": 0.002,
        "callbacks": [StabilityMonitor(window=4, threshold=0.5)],
    },
    "updates of its own": lambda: {"loss": None, "step": OwnUpdate(), "metrics": {}},
    "merged metric": lambda: {"metrics": {"spread": Spread()}},
    "validation in batches of a limit": lambda: {"max_epochs": None, "max_steps": 25, "validate_every": 4},
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
    options.setdefault("metrics", {"accuracy": accuracy, "separation": WholeSet(separation)})
    make = options.pop("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9))
    rate = options.pop("lr", 0.05)
    trainer = Trainer(
        model,
        make(model.parameters()),
        batching=BatchOptions(batch_size=size, eval_batch_size=20),
        callbacks=[*options.pop("callbacks"), *callbacks],
        device="cpu",
        **options,
    )
    return trainer, wrap(data(samples)), wrap(data(33, seed=1))


def fitted(name: str, strategy: str = "ddp") -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The history of a run, and the weights at its end."""
    trainer, train, val = build(name, strategy=strategy)
    state = trainer.fit(train, val)
    return [dict(metrics) for metrics in state.history], weights_of(trainer)


def fitted_by_ready_loader() -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """A run whose loader deals its samples itself, and whose last batch of validation has one sample."""
    trainer, train, _ = build("mlp", samples=80)
    sampler: Any = DistributedSampler(train, num_replicas=world_size(), rank=rank(), shuffle=False)
    state = trainer.fit(DataLoader(train, 16 // world_size(), sampler=sampler), points(21, seed=1))
    return [dict(metrics) for metrics in state.history], weights_of(trainer)


def overfitted() -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """A run with a few batches, of which one has fewer samples than there are processes."""
    trainer, train, val = build("mlp", batch_size=8, samples=9)
    trainer.batching = replace(trainer.batching, overfit_batches=2)
    state = trainer.fit(train, val)
    return [dict(metrics) for metrics in state.history], weights_of(trainer)


def samples_per_batch() -> list[float]:
    """What `Throughput` says of each epoch but the first."""
    trainer, train, val = build("mlp", [Throughput(unit="values")])
    state = trainer.fit(train, val)
    rates = ("samples_per_second", "values_per_second")
    return [item[rate] / item["batches_per_second"] for item in state.history[1:] for rate in rates]


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """The model's state dict, with whole tensors where each process holds a part."""
    with trainer.group.session(trainer.device):
        return {name: trainer.group.whole(item) for name, item in trainer.model.state_dict().items()}


def stopped(
    asking: int, batch: int, how: str, strategy: str = "ddp", folder: str | None = None
) -> tuple[Any, ...]:
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
    writing = [] if folder is None else [Checkpoint(folder, max_overhead=1, every_n_steps=1)]
    trainer, train, val = build("mlp", [ask, *writing], strategy=strategy)
    state = trainer.fit(train, val)
    return state.stop_reason, state.epoch, state.batch_index, state.step, len(state.history)


def stopped_before_an_epoch(asking: int, strategy: str = "ddp") -> tuple[Any, ...]:
    """Where a run ends that one rank wants to end before its second epoch's first batch; the whole history."""
    ended: list[tuple[int, ...]] = []
    ask = At(
        "on_train_epoch_start",
        lambda t: t.state.stop("interrupted", now=True),
        lambda t: rank() == asking and t.state.epoch == 1 and not ended,
    )
    trainer, train, val = build("mlp", [ask], strategy=strategy)
    state = trainer.fit(train, val)
    ended.append((state.epoch, state.batch_index, state.step, len(state.history)))
    return *ended[0], trainer.fit(train, val).history


def diverged(asking: int, strategy: str = "ddp") -> tuple[Any, ...]:
    """Where a run ends in which the loss of one rank is NaN from a batch on."""

    def spoil(trainer: Any) -> None:
        trainer.state.loss = trainer.state.loss * float("nan")

    at = At("on_after_forward", spoil, lambda t: rank() == asking and t.state.step == 7)
    trainer, train, val = build("mlp", [at, NaNDetection(every_n_batches=1)], strategy=strategy)
    state = trainer.fit(train, val)
    return state.stop_reason, state.epoch, state.batch_index, state.step


class PrunedError(Exception):
    """What a pruner raises."""


def failing(
    asking: int, event: str, kind: type[Exception], place: tuple[int, int] = (1, 2), strategy: str = "ddp"
) -> str:
    """A run in which one rank fails; the reason of the end as the state has it."""

    def fail(trainer: Any, *_: Any) -> None:
        if kind is PrunedError:
            trainer.state.stop_reason = "pruned"
        raise kind("no more")

    def due(trainer: Any) -> bool:
        return rank() == asking and (trainer.state.epoch, trainer.state.batch_index) == place

    trainer, train, val = build("mlp", [At(event, fail, due)], strategy=strategy)
    try:
        trainer.fit(train, val)
    except (RankError, kind) as error:
        return f"{type(error).__name__}: {error} ({trainer.state.stop_reason})"
    return "no error"


def failing_at_its_end(asking: int, strategy: str, kind: type[BaseException], folder: str) -> tuple[Any, ...]:
    """A run in which one rank fails in `on_fit_end`, before all evaluate there: how it ended, and its weights."""

    def end(trainer: Any) -> None:
        if rank() == asking:
            raise kind("no more")
        trainer.test(val)

    callbacks = [
        At("on_fit_end", end),
        BestWeights("val_loss", "max"),
        Checkpoint(folder, mode="max", max_overhead=1e-9),
    ]
    trainer, train, val = build("mlp", callbacks, strategy=strategy)
    try:
        trainer.fit(train, val)
    except (RankError, kind) as error:
        return f"{type(error).__name__}: {error}", trainer.state.stop_reason, weights_of(trainer)
    return "no error", trainer.state.stop_reason, weights_of(trainer)


def failing_as_it_evaluates(asking: Sequence[int], strategy: str, *, caught: bool = False) -> tuple[Any, ...]:
    """A run in which some ranks fail amid an evaluation that all make in `on_fit_end`: how it ended."""

    def fail(trainer: Any) -> None:
        raise ZeroDivisionError("no more")

    def end(trainer: Any) -> None:
        with suppress(ZeroDivisionError) if caught else nullcontext():
            trainer.test(val)

    callbacks = [At("on_fit_end", end), At("on_test_batch_end", fail, lambda t: rank() in asking)]
    trainer, train, val = build("mlp", callbacks, strategy=strategy, max_epochs=2)
    try:
        trainer.fit(train, val)
    except (RankError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}", trainer.state.stop_reason
    return "no error", trainer.state.stop_reason


def computing_alone(asking: int, event: str, strategy: str = "fsdp") -> str:
    """What becomes of a run where a hook of one rank computes with a split model, or evaluates a whole one."""

    def look(trainer: Any) -> None:
        if strategy == "ddp":
            trainer.test(val)
        with torch.no_grad():
            trainer.model(torch.zeros(4, 8))

    alone = At(event, look, lambda t: rank() == asking and t.state.step in {7, 12})
    trainer, train, val = build("mlp", [alone], strategy=strategy)
    try:
        trainer.fit(train, val)
    except RuntimeError as error:
        return f"{error} ({trainer.state.stop_reason}, {trainer.state.epoch})"
    return "no error"


class Routed(nn.Module):
    """A model of which some processes use a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.first(inputs) + (0 if rank() == 1 else self.second(inputs))


def routed() -> str:
    """What becomes of a run with a split model that uses other parameters in each process."""
    trainer, train, val = build("mlp", model=Routed(), strategy="fsdp")
    try:
        trainer.fit(train, val)
    except RuntimeError as error:
        return str(error)
    return "no error"


def skipping(event: str, action: str) -> str:
    """A run in which a hook of rank 1 alone skips something."""
    at = At(
        event,
        lambda t: t.state.skip(action),
        lambda t: rank() == 1 and (t.state.epoch, t.state.batch_index) == (1, 2),
    )
    start = At(
        event,
        lambda t: t.state.skip(action),
        lambda t: rank() == 1 and t.state.epoch == 1 and not t.state.batch_index,
    )
    trainer, train, val = build("mlp", [start if action == "epoch" else at])
    try:
        trainer.fit(train, val)
    except RuntimeError as error:
        return f"{error} ({trainer.state.stop_reason}, {trainer.state.epoch})"
    return "no error"


def validated(asking: int) -> list[bool]:
    """Which epochs of a run are validated in which one rank skips the second validation just before it."""
    at = At(
        "on_train_epoch_end",
        lambda t: t.state.skip("validation"),
        lambda t: rank() == asking and t.state.epoch == 1,
    )
    trainer, train, val = build("mlp", [at], max_epochs=3)
    return ["val_loss" in metrics for metrics in trainer.fit(train, val).history]


def killed(asking: int, event: str, strategy: str = "ddp", *, tested: bool = False) -> str:
    """A run in which one rank is killed: its error, and that of an evaluation that a hook of the end tries."""
    at = At(
        event, lambda *_: os.kill(os.getpid(), signal.SIGKILL), lambda t: rank() == asking and t.state.step == 7
    )
    trainer, train, val = build("mlp", [at], strategy=strategy)
    errors: list[str] = []

    def noted(work: Callable[[], Any]) -> None:
        try:
            work()
        except RankError as error:
            errors.append(str(error))

    if tested:
        trainer.callbacks.register("on_fit_end", lambda trainer: noted(lambda: trainer.test(val)))
    noted(lambda: trainer.fit(train, val))
    return ", ".join(errors)


def failing_as_on_devices() -> tuple[list[str], bool]:
    """A run in which rank 1 fails, and which ends as one on GPUs does, whose process group can't be used any more.

    Returns:
        The errors of what a hook of the end asks of the others there, and of the run; and whether a second run
        finds what the first one's process group has left behind.
    """
    errors: list[str] = []
    first: list[bool] = [True]

    def start(trainer: Any) -> None:
        trainer.group._on_cuda = True
        if first:
            c10d._get_default_store().set("left", "behind")

    def fail(trainer: Any) -> None:
        raise ZeroDivisionError("no more")

    def noted(work: Callable[[], Any]) -> None:
        try:
            work()
        except (RankError, ZeroDivisionError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    def end(trainer: Any) -> None:
        noted(lambda: trainer.group.gather(0))

    callbacks = [
        At("on_fit_start", start),
        At("on_before_backward", fail, lambda t: first and rank() == 1 and t.state.step == 7),
        At("on_fit_end", end, lambda t: t.state.failed),
    ]
    trainer, train, val = build("mlp", callbacks, max_epochs=2)
    noted(lambda: trainer.fit(train, val))
    first.clear()
    noted(lambda: trainer.fit(train, val))
    return errors, c10d._get_default_store().check(["left"])


def waiting_on_devices(event: str) -> tuple[str, int]:
    """A run as on GPUs in whose second epoch rank 1 fails: its error, and how often it waits there then."""
    waits = 0

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def count(*given: Any) -> Any:
            nonlocal waits
            waits += trainer.state.epoch == 1
            return work(*given)

        return count

    def start(trainer: Any) -> None:
        trainer.group._on_cuda = True
        patched.setattr(trainer.group, "sum", counted(trainer.group.sum))
        patched.setattr(_Accumulator, "result", counted(_Accumulator.result))

    def fail(trainer: Any) -> None:
        raise ZeroDivisionError("no more")

    callbacks = [At("on_fit_start", start), At(event, fail, lambda t: rank() == 1 and t.state.epoch == 1)]
    trainer, train, val = build("mlp", callbacks, max_epochs=2, samples=16)
    with pytest.MonkeyPatch.context() as patched:
        try:
            trainer.fit(train, val)
        except (RankError, ZeroDivisionError) as error:
            return f"{type(error).__name__}: {error}", waits
    return "no error", waits


def killed_and_tested() -> str:
    """A run in which rank 1 is killed, and a hook of the end evaluates."""
    return killed(1, "on_before_backward", tested=True)


def interrupted(
    folder: str,
    name: str,
    stop_at: int | None,
    every: int | None = None,
    resume: bool = False,
    strategy: str = "ddp",
) -> Any:
    """A run with checkpoints that is interrupted after a step, or resumes; what it came to."""
    callbacks: list[Callback] = [Checkpoint(folder, max_overhead=1, every_n_steps=every)]
    if stop_at is not None:
        callbacks.append(interrupt_at(stop_at))
    trainer, train, val = build(name, callbacks, strategy=strategy)
    drawn: list[float] = []
    draw = lambda trainer: drawn.append(float(torch.rand(()) + random.random() + np.random.rand()))  # noqa: E731
    trainer.callbacks.register("on_before_forward", draw)
    trainer.fit(train, val, ckpt="last" if resume else None)
    state = trainer.state
    return [dict(item) for item in state.history], weights_of(trainer), drawn, state.step


def stopped_at_its_start(folder: str, other: str) -> None:
    """A run that resumes, stops before its first batch, and leaves a checkpoint of that in another folder."""
    stop = At("on_fit_start", lambda trainer: trainer.state.stop("interrupted", now=True))
    trainer, train, val = build("mlp", [Checkpoint(other, max_overhead=1), stop])
    trainer.fit(train, val, ckpt=folder)


def lazy(action: str, strategy: str, part: str = "model") -> str:
    """What a Trainer says to a model, or a loss, whose first layer has no weights yet."""
    changes: dict[str, Any] = {"model": nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 2))}
    if part == "loss":
        changes = {"loss": Projected(nn.LazyLinear(2))}
    trainer, train, val = build("mlp", strategy=strategy, **changes)
    try:
        trainer.fit(train, val) if action == "fit" else trainer.validate(val)
    except ValueError as error:
        return str(error)
    return "nothing"


def refused(what: str) -> str:
    """What a Trainer says to what can't be done in several processes."""
    changes: dict[str, Any] = {}
    if what == "ready loader":
        changes["wrap"] = lambda data: DataLoader(data, 4)
    elif what == "wrapped model":
        changes["model"] = nn.DataParallel(mlp())
    elif what == "metric":
        metric = Spread()
        metric.merge_state = None
        changes["metrics"] = {"spread": metric}
    elif what == "sparse":
        changes |= {"model": Words(), "data": words, "metrics": {}}
    elif what == "cuda_graph":
        changes["cuda_graph"] = True
    try:
        trainer, train, val = build("mlp", **changes)
        trainer.fit(train, val)
    except ValueError as error:
        return str(error)
    except RankError as error:
        return str(error)
    return "nothing"


class Words(nn.Module):
    """A model with an embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.table(inputs)


def words(samples: int, seed: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(samples) % 5, torch.arange(samples) % 2)


class Shifted(nn.Module):
    """A loss with a weight of its own, which begins elsewhere in each process."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((2,), float(rank())))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs + self.shift, targets)


class Projected(nn.Module):
    """A loss with weights that are not trained, and a mean that it follows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.mean.lerp_(outputs.detach().mean(0), 0.1)
        return nn.functional.cross_entropy(self.layer(outputs) - self.mean, targets)


def with_a_loss_of_its_own(strategy: str) -> tuple[list[float], list[Tensor]]:
    """The losses of a run with a loss that each process has drawn for itself, and what that holds at the end."""
    torch.manual_seed(rank())
    loss = Projected(nn.Linear(2, 2))
    trainer, train, val = build("mlp", loss=loss, strategy=strategy, max_epochs=2)
    history = trainer.fit(train, val).history
    return [metrics["train_loss"] for metrics in history], [item.clone() for item in loss.state_dict().values()]


def learned_by_the_loss() -> list[Tensor]:
    """The weights of loss and model at the end of a run that trains both."""
    loss = Shifted()
    optimizer = lambda weights: torch.optim.SGD([*weights, *loss.parameters()], lr=0.05)  # noqa: E731
    trainer, train, val = build("mlp", loss=loss, optimizer=optimizer)
    trainer.fit(train, val)
    return [loss.shift.detach(), *weights_of(trainer).values()]


def evaluated_untrained(strategy: str = "ddp") -> tuple[Any, ...]:
    """What a new trainer has learnt of a model and a loss that each process has drawn for itself."""
    loss = Shifted()
    trainer, train, val = build(
        "mlp",
        seed=rank(),
        loss=loss,
        optimizer=lambda weights: torch.optim.SGD([*weights, *loss.parameters()], lr=0.05),
        strategy=strategy,
    )
    numbers = trainer.validate(val), trainer.test({"one": train, "two": val})
    return *numbers, loss.shift.detach().clone()


def scaled(strategy: str = "ddp") -> tuple[Any, ...]:
    """A run in fp16 in which the gradients of rank 1 overflow once."""

    def overflow(trainer: Any) -> None:
        for parameter in trainer.model.parameters():
            parameter.grad.fill_(float("inf"))

    at = At("on_after_backward", overflow, lambda t: rank() == 1 and t.state.data_batch == 3 and not t.state.epoch)
    trainer, train, val = build("mlp", [at], precision="fp16", max_epochs=1, strategy=strategy)
    state = trainer.fit(train, val)
    weights = list(weights_of(trainer).values())
    return state.step, trainer.precision.state_dict()["scale"], weights


def defaults_before_the_group() -> bool:
    """Whether the default callbacks know of the other processes before a process group is there."""
    return any(isinstance(each, GarbageCollection) for each in default_callbacks())


def statistics(sync_batchnorm: bool) -> tuple[Tensor, list[str]]:
    """The running mean of a batch norm at the end of a run, and the classes of the model's modules."""
    trainer, train, val = build("cnn", sync_batchnorm=sync_batchnorm)
    trainer.fit(train, val)
    return trainer.model[1].running_mean.clone(), [type(module).__name__ for module in trainer.model]


def looked_at_by_one() -> int:
    """The steps of a run where a hook of rank 0 alone computes the model in training mode, with no gradients."""

    def look(trainer: Any) -> None:
        if rank() == 0:
            with torch.no_grad():
                trainer.model(torch.zeros(4, 1, 6, 6))

    events = ("on_fit_start", "on_before_forward", "on_after_forward", "on_train_batch_end", "on_epoch_end")
    trainer, train, val = build("cnn", [At(event, look) for event in events], max_epochs=1)
    return trainer.fit(train, val).step


def numbered_elsewhere(place: str | None) -> float:
    """What a second session of a run gives whose rank 1 has the number of a process that ends, or has ended.

    Args:
        place: Where that number means another process; None: its place can't be distinguished from rank 0's.
    """
    with subprocess.Popen(["sleep", "60"]) as other, pytest.MonkeyPatch.context() as patched:
        if rank() == 1:
            patched.setattr(os, "getpid", lambda: other.pid)
            if place is not None:
                patched.setattr(processes, "place_of_process", lambda: (place, other.pid))
        if place is None:
            other.kill()
            other.wait()
        trainer, train, val = build("mlp", max_epochs=1)
        trainer.fit(train, val)
        other.kill()
        other.wait()
        return trainer.validate(val)["val_loss"]


def under_contract(name: str, folder: str, strategy: str = "ddp") -> Any:
    """A run with a shipped callback: what it came to, in plain values."""
    os.environ |= {"WANDB_MODE": "disabled", "COMET_AUTO_LOG_DISABLE": "true", "COMET_START_ONLINE": "false"}
    callbacks = [ALL[name][0](Path(folder))] if name else []
    if rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
    model = make_model()
    trainer = make_trainer(
        callbacks, model=model, metrics={"mae": nn.functional.l1_loss}, max_epochs=3, strategy=strategy
    )
    state = trainer.fit(regression(11), regression(7, seed=8))
    history = [{key: item for key, item in metrics.items() if key not in CLOCKED} for metrics in state.history]
    return history, weights_of(trainer), state.stop_reason, trainer.test(regression())["test_loss"]
