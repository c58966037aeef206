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

from trainer.metrics import EpochMetrics
from trainer.state import TrainState

DEFAULT_PRIORITY = 50


class TrainerView(Protocol):
    """The side of the Trainer that callbacks see; the attributes are described there."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    device: torch.device
    seed: int
    state: TrainState
    recorder: EpochMetrics

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact continuation needs."""
        ...

    def fire(self, event: str, *args: Any) -> None:
        """Call the hooks of an event."""
        ...


class Callback:
    """Base of all callbacks: every hook does nothing; override what you need.

    Attributes:
        priority: Lower runs earlier within an event. The shipped ones lie at 5 to 95.
        writes: Names of the metrics it puts into ``trainer.state.metrics``.
        reads: Names of the metrics it uses; ``("*",)`` for all. The runner refuses an order in which a
            reader would run before the writer.
        writes_in: The event in which it writes.
        reads_in: The event in which it reads.

    A callback with state implements ``state_dict`` and ``load_state_dict`` with plain values and tensors; its
    state is kept under ``name``.
    """

    priority: int = DEFAULT_PRIORITY
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes_in: ClassVar[str] = "on_epoch_end"
    reads_in: ClassVar[str] = "on_epoch_end"

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
