"""The base class of callbacks, function callbacks, and callbacks for every Trainer of the process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.data.plan import Plan
from trainer.distributed.group import Group
from trainer.events import EVENTS, LOG_PRIORITY
from trainer.foreign import nearest
from trainer.metrics.epoch import EpochMetrics
from trainer.metrics.objects import Metric
from trainer.state import TrainState
from trainer.step.optimizers import Scheduler
from trainer.step.precision import Precision
from trainer.step.supervised import Step
from trainer.step_log import StepRecord

DEFAULT_PRIORITY = 50


class EvaluationView(Protocol):
    """The part of `trainer.evaluation.Evaluation` that callbacks use.

    Attributes:
        apart: The prefixes of the validation sets that are not evaluated at the end of each epoch.
    """

    apart: set[str]

    @property
    def names(self) -> Mapping[str, str]:
        """The prefix of each validation set's metrics, by the set's name; the first also has the name ``""``."""
        ...

    def now(self, prefix: str, batches: int | None = None) -> dict[str, float]:
        """Evaluate a validation set of the running fit, apart from what the epoch records.

        Args:
            prefix: The prefix of the set, one of the values of ``names``.
            batches: Evaluate only this number of its first batches; None: all.

        Returns:
            Its metrics by name.
        """
        ...


class CallbacksView(Protocol):
    """The part of `trainer.runner.CallbackRunner` that callbacks use."""

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """All callbacks in the order in which they run."""
        ...


class TrainerView(Protocol):
    """The part of the Trainer that callbacks use; `Trainer` describes the attributes."""

    model: nn.Module
    optimizer: Optimizer
    step: Step
    scheduler: Scheduler | None
    device: torch.device
    seed: int
    plan: Plan
    precision: Precision
    state: TrainState
    metrics: Mapping[str, Metric]
    recorder: EpochMetrics
    group: Group

    @property
    def callbacks(self) -> CallbacksView:
        """The callbacks of the run."""
        ...

    @property
    def evaluation(self) -> EvaluationView:
        """The object that evaluates the validation sets of the fit."""
        ...

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
        """Step the optimizer, with its events, and a scheduler that steps with it."""
        ...

    def set_batch_size(self, batch_size: int, *, now: bool = False) -> None:
        """Change the batch size of training from the next pass on, or with ``now`` from the next batch on."""
        ...


class Callback:
    """Base of all callbacks: every hook does nothing; override what you need.

    Attributes:
        priority: Lower runs earlier within an event. The built-in callbacks have 1 to 99.
        writes: Names of the metrics that it adds to ``trainer.state.metrics``, or patterns such as ``grad_*``.
        reads: Names of the metrics that it uses; ``("*",)`` for all. The runner refuses an order in which a
            reader would run before the writer.
        writes_in: The event in which it writes.
        reads_in: The event in which it reads.
        rank_zero_only: Its hooks run only in the process of rank 0; set it for callbacks that print or write
            files.
        graph_safe: Its hooks between zero_grad and the optimizer step change nothing, so that with a CUDA graph,
            which does all of that at once, they may be called afterwards.
        saves: It writes checkpoints. If there is such a callback, the state of the others is checked (see below).
        rank_state: With several processes, its state inside an epoch differs between them, and a checkpoint holds
            the states of all. If another number of processes resumes it, each loads what ``redealt`` returns.
        reads_batches: It reads the loss of single batches. With several processes, ``state.loss`` and what is
            recorded of it are then those of the whole batch; otherwise those of this process's part.
        needs_whole_model: Why it can't work if each process holds only a part of the model, as with strategy
            ``"fsdp"``; None if it can.
        transient: Attributes that change during training and that a resumed run does not need.

    A callback with state implements ``state_dict`` and ``load_state_dict``, with plain values and tensors; a
    checkpoint stores its state under ``name``. A resumed run would lose an attribute that changes and is neither
    in that state nor ``transient``: if checkpoints are saved, such a callback is refused, see `trainer.declared`.

    ``with NaNDetection():`` adds the callback to every fit of this process that starts inside the block.
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
    rank_state: ClassVar[bool] = False
    reads_batches: ClassVar[bool] = False
    needs_whole_model: ClassVar[str | None] = None

    def __enter__(self) -> Self:
        register_global_callback(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Handle(_global_callbacks, (self,)).remove()

    @property
    def name(self) -> str:
        """The key of its state in a checkpoint; no two callbacks with state of one trainer may share it."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint: only plain Python values and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""

    def redealt(self, states: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:  # noqa: ARG002
        """The state that a process loads if another number of processes wrote the checkpoint (``rank_state``).

        Args:
            states: What ``state_dict`` returned in each process that wrote the checkpoint, by rank.
            rank: The rank of the process that loads.

        Returns:
            The state to load; ``{}`` to start without one.
        """
        return {}

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
    def on_log_steps(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None: ...
    def on_train_epoch_end(self, trainer: TrainerView) -> None: ...
    def on_validation_start(self, trainer: TrainerView) -> None: ...
    def on_validation_batch_start(self, trainer: TrainerView) -> None: ...
    def on_before_validation_forward(self, trainer: TrainerView) -> None: ...
    def on_after_validation_forward(self, trainer: TrainerView) -> None: ...
    def on_validation_batch_end(self, trainer: TrainerView) -> None: ...
    def on_validation_end(self, trainer: TrainerView) -> None: ...
    def on_epoch_end(self, trainer: TrainerView) -> None: ...
    def on_before_log_metrics(self, trainer: TrainerView, metrics: dict[str, float]) -> None: ...
    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None: ...
    def on_save_checkpoint(self, trainer: TrainerView, checkpoint: dict[str, Any]) -> None: ...
    def on_after_save_checkpoint(self, trainer: TrainerView, path: Path) -> None: ...
    def on_test_start(self, trainer: TrainerView) -> None: ...
    def on_test_batch_start(self, trainer: TrainerView) -> None: ...
    def on_before_test_forward(self, trainer: TrainerView) -> None: ...
    def on_after_test_forward(self, trainer: TrainerView) -> None: ...
    def on_test_batch_end(self, trainer: TrainerView) -> None: ...
    def on_test_end(self, trainer: TrainerView) -> None: ...
    def on_predict_start(self, trainer: TrainerView) -> None: ...
    def on_predict_batch_start(self, trainer: TrainerView) -> None: ...
    def on_predict_batch_end(self, trainer: TrainerView) -> None: ...
    def on_predict_end(self, trainer: TrainerView) -> None: ...
    def on_exception(self, trainer: TrainerView, error: BaseException) -> None: ...
    def on_fit_end(self, trainer: TrainerView) -> None: ...
    def teardown(self, trainer: TrainerView) -> None: ...


class FunctionCallback(Callback):
    """One function as one hook: what ``runner.register`` makes, for a list of callbacks.

    Args:
        event: Name of the event.
        function: Called with the trainer, and with what else the event's hooks get.
        priority: Lower runs earlier within the event.

    Raises:
        ValueError: There is no such event; the text names the nearest one.
    """

    def __init__(self, event: str, function: Callable[..., Any], priority: int = DEFAULT_PRIORITY) -> None:
        check_event(event)
        self.event = event
        self.function = function
        self.priority = priority


class LogDispatch(Callback):
    """Fires the log events within ``on_epoch_end``, at ``LOG_PRIORITY``; every Trainer has one."""

    priority = LOG_PRIORITY

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Fire both log events: loggers write one record per epoch."""
        trainer.fire("on_before_log_metrics", trainer.state.metrics)
        trainer.fire("on_log_metrics", trainer.state.metrics)


class Handle(AbstractContextManager["Handle"]):
    """Removes a registration, by ``remove()`` or at the end of a ``with`` block; doing so twice is harmless."""

    def __init__(self, registry: list[Callback], callbacks: Iterable[Callback]) -> None:
        self._registry = registry
        self._callbacks = tuple(callbacks)

    def remove(self) -> None:
        """Remove the callbacks from the list in which they were registered."""
        self._registry[:] = [item for item in self._registry if not any(item is own for own in self._callbacks)]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def check_event(event: str) -> None:
    """Refuse a name that is no event.

    Raises:
        ValueError: There is no such event; the text names the one that is meant.
    """
    if event not in EVENTS:
        raise ValueError(f"no event is called {event!r}{nearest(event)}")


_global_callbacks: list[Callback] = []


def register_global_callback(callback: Callback) -> Handle:
    """Add ``callback`` to every fit of this process that starts while it is registered.

    Raises:
        ValueError: It is registered already, and its hooks would run twice.
    """
    if any(item is callback for item in _global_callbacks):
        raise ValueError(f"{callback.name} is registered for every Trainer already: its hooks would run twice")
    _global_callbacks.append(callback)
    return Handle(_global_callbacks, (callback,))


def global_callbacks() -> tuple[Callback, ...]:
    """The globally registered callbacks, in the order of registration."""
    return tuple(_global_callbacks)
