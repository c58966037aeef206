"""The callback base, function callbacks, and callbacks that reach every Trainer of the process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.data.plan import Plan
from trainer.events import LOG_PRIORITY
from trainer.metrics.epoch import EpochMetrics
from trainer.metrics.objects import Metric
from trainer.state import TrainState
from trainer.step.precision import Precision

DEFAULT_PRIORITY = 50


class TrainerView(Protocol):
    """The side of the Trainer that callbacks see; the attributes are described there."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    device: torch.device
    seed: int
    plan: Plan
    precision: Precision
    state: TrainState
    metrics: Mapping[str, Metric]
    recorder: EpochMetrics

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact continuation needs."""
        ...

    def load_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Resume from what ``state_dict`` returned."""
        ...

    def fire(self, event: str, *args: Any) -> None:
        """Call the hooks of an event."""
        ...

    def step_optimizer(self) -> None:
        """Take the optimizer's step, with its events, and the scheduler's where that goes with it."""
        ...

    def set_batch_size(self, batch_size: int) -> None:
        """Samples per training batch from the next pass over the data on."""
        ...


class Callback:
    """Base of all callbacks: every hook does nothing; override what you need.

    Attributes:
        priority: Lower runs earlier within an event. The shipped ones lie at 1 to 99.
        writes: Names of the metrics it puts into ``trainer.state.metrics``, or patterns such as ``grad_*``.
        reads: Names of the metrics it uses; ``("*",)`` for all. The runner refuses an order in which a
            reader would run before the writer.
        writes_in: The event in which it writes.
        reads_in: The event in which it reads.
        rank_zero_only: Its hooks run in the process of rank 0 only; right for callbacks that print or write files.
        graph_safe: Between zero_grad and the optimizer's step it only looks, so that with a CUDA graph, which does
            all that in one go, its hooks may be called afterwards.
        saves: It writes checkpoints. With one of these, the state of the others is checked.
        transient: Attributes that change while training and that a resumed run can do without.

    A callback with state implements ``state_dict`` and ``load_state_dict`` with plain values and tensors; its
    state is kept under ``name``. What changes, is not in there and is not ``transient`` would be forgotten by a
    resumed run: with a callback that saves among them, the first epoch's end refuses it.
    """

    priority: int = DEFAULT_PRIORITY
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes_in: ClassVar[str] = "on_epoch_end"
    reads_in: ClassVar[str] = "on_epoch_end"
    rank_zero_only: ClassVar[bool] = False
    graph_safe: ClassVar[bool] = False
    saves: ClassVar[bool] = False
    transient: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        """Key of its state in a checkpoint; must differ between the stateful callbacks of one trainer."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """State to checkpoint: plain Python values and tensors only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""

    def setup(self, trainer: TrainerView) -> None:
        """See `trainer.events.EVENTS` for when each hook fires and what it may change."""

    def on_before_load_checkpoint(self, trainer: TrainerView, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, trainer: TrainerView, checkpoint: Mapping[str, Any]) -> None: ...
    def on_fit_start(self, trainer: TrainerView) -> None: ...
    def on_train_epoch_start(self, trainer: TrainerView) -> None: ...
    def on_train_batch_start(self, trainer: TrainerView) -> None: ...
    def on_before_zero_grad(self, trainer: TrainerView) -> None: ...
    def on_after_zero_grad(self, trainer: TrainerView) -> None: ...
    def on_before_forward(self, trainer: TrainerView) -> None: ...
    def on_after_forward(self, trainer: TrainerView) -> None: ...
    def on_before_backward(self, trainer: TrainerView) -> None: ...
    def on_after_backward(self, trainer: TrainerView) -> None: ...
    def on_before_optimizer_step(self, trainer: TrainerView) -> None: ...
    def on_after_optimizer_step(self, trainer: TrainerView) -> None: ...
    def on_before_scheduler_step(self, trainer: TrainerView) -> None: ...
    def on_after_scheduler_step(self, trainer: TrainerView) -> None: ...
    def on_train_batch_end(self, trainer: TrainerView) -> None: ...
    def on_train_epoch_end(self, trainer: TrainerView) -> None: ...
    def on_validation_start(self, trainer: TrainerView) -> None: ...
    def on_validation_batch_start(self, trainer: TrainerView) -> None: ...
    def on_validation_batch_end(self, trainer: TrainerView) -> None: ...
    def on_validation_end(self, trainer: TrainerView) -> None: ...
    def on_epoch_end(self, trainer: TrainerView) -> None: ...
    def on_before_log_metrics(self, trainer: TrainerView, metrics: dict[str, float]) -> None: ...
    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None: ...
    def on_save_checkpoint(self, trainer: TrainerView, checkpoint: dict[str, Any]) -> None: ...
    def on_after_save_checkpoint(self, trainer: TrainerView, path: Path) -> None: ...
    def on_test_start(self, trainer: TrainerView) -> None: ...
    def on_test_batch_start(self, trainer: TrainerView) -> None: ...
    def on_test_batch_end(self, trainer: TrainerView) -> None: ...
    def on_test_end(self, trainer: TrainerView) -> None: ...
    def on_exception(self, trainer: TrainerView, error: BaseException) -> None: ...
    def on_fit_end(self, trainer: TrainerView) -> None: ...
    def teardown(self, trainer: TrainerView) -> None: ...


class FunctionCallback(Callback):
    """One function as one hook: what ``runner.register`` makes."""

    def __init__(self, event: str, function: Callable[..., None], priority: int = DEFAULT_PRIORITY) -> None:
        self.event = event
        self.function = function
        self.priority = priority


class LogDispatch(Callback):
    """Fires the log events at their place among the hooks of ``on_epoch_end``; every Trainer has one."""

    priority = LOG_PRIORITY

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """One record an epoch."""
        trainer.fire("on_before_log_metrics", trainer.state.metrics)
        trainer.fire("on_log_metrics", trainer.state.metrics)


class Handle(AbstractContextManager["Handle"]):
    """Takes a registration back, by ``remove()`` or at the end of a ``with`` block; twice does no harm."""

    def __init__(self, registry: list[Callback], callback: Callback) -> None:
        self._registry = registry
        self._callback = callback

    def remove(self) -> None:
        """Take the callback out of where it was registered."""
        self._registry[:] = [item for item in self._registry if item is not self._callback]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


_global_callbacks: list[Callback] = []


def register_global_callback(callback: Callback) -> Handle:
    """Let ``callback`` take part in every fit of this process that starts while it is registered."""
    _global_callbacks.append(callback)
    return Handle(_global_callbacks, callback)


def global_callbacks() -> tuple[Callback, ...]:
    """The globally registered callbacks, in the order of registration."""
    return tuple(_global_callbacks)
