"""A callback that watches a run's first batches: which values are finite, what gets a gradient, the times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from hpo.config.paths import join_path
from trainer.callback import Callback, TrainerView
from trainer.data.lengths import attributes_of
from trainer.data.moving import tensors_in
from trainer.metrics.objects import Metric, is_object, measured_alone
from trainer.recorded import MetricError, number
from trainer.state import PREFLIGHT

#: The phases of a run, which tell where an error came from.
START: Final = "start"
BATCH: Final = "batch"
FORWARD: Final = "forward"
METRICS: Final = "metrics"
BACKWARD: Final = "backward"
OPTIMIZER: Final = "optimizer"
SCHEDULER: Final = "lr_scheduler"
VALIDATION: Final = "validation"
EPOCH_END: Final = "epoch end"

#: Batches enough to measure the time of one: this many, or as many as take this many seconds.
_BATCHES: Final = 50
_SECONDS: Final = 2.0

Complaint = Callable[[str, str, str], Exception]


class Probe(Callback):
    """Ends the run after its first, short epoch; raises an error at the first problem.

    Args:
        complain: Creates the exception for (problem, path in the study file, fix).
        loss_path: The path of the loss in the study file.
        precision: ``fp16`` lets gradients overflow, which its scaling is for.

    Attributes:
        metrics: The trainer's metrics; to be set before the run.
        warmup: How many first batches are not timed; to be set before the run.
        phase: The last phase of the run.
        shapes: The shapes of the first batch's tensors.
        outputs: The shapes of the model's outputs for it.
        without_gradient: Parameters that got no gradient.
        untrained: Parameters that got a gradient but are in no optimizer, by the path of their section.
        batches: How many batches were trained.
        batch_s: Seconds of a training batch, without the first ones unless there are no others.
        ended: The clock at the end of training; ``validated``: at the end of validation.
        failed: The batch in which it failed.
    """

    priority = 98
    graph_safe = True
    transient = (
        *("phase", "shapes", "outputs", "without_gradient", "untrained", "batches"),
        *("batch_s", "ended", "validated", "failed", "_warm", "_started"),
    )

    def __init__(self, complain: Complaint, *, loss_path: str, precision: str) -> None:
        self._complain = complain
        self.metrics: Mapping[str, Metric] = {}
        self.warmup = 1
        self._loss_path = loss_path
        self._precision = precision
        self.phase = START
        self.shapes: list[tuple[int, ...]] = []
        self.outputs: list[tuple[int, ...]] = []
        self.without_gradient: list[str] = []
        self.untrained: dict[str, list[str]] = {}
        self.batches = 0
        self.failed: Any = None
        self.batch_s = math.nan
        self.ended = self.validated = self._started = self._warm = math.nan

    # ---- a batch

    def on_train_epoch_start(self, trainer: TrainerView) -> None:  # noqa: ARG002 - the hook's signature
        """Start the clock."""
        self.phase = BATCH
        self._started = time.perf_counter()

    def on_train_batch_start(self, trainer: TrainerView) -> None:
        """Look at the first batch."""
        self.phase = BATCH
        if self.batches:
            return
        tensors = _tensors_of(trainer.state.batch)
        self.shapes = [tuple(tensor.shape) for tensor in tensors]
        for position, tensor in enumerate(tensors):
            if bad := _not_finite(tensor):
                problem = (
                    f"{bad} of {tensor.numel()} values of a training batch's tensor {position} are not finite"
                )
                raise self._complain(problem, "data", "clean the data, or fill in what is missing")

    def on_before_forward(self, trainer: TrainerView) -> None:  # noqa: ARG002 - the hook's signature
        """Enter the phase of model and loss."""
        self.phase = FORWARD

    def on_after_forward(self, trainer: TrainerView) -> None:
        """Look at the loss and the metrics of the first batch."""
        self.phase = METRICS
        if self.batches:
            return
        state = trainer.state
        self.outputs = [tuple(tensor.shape) for tensor in tensors_in(state.outputs)]
        assert state.loss is not None
        self._check_loss(state.loss, counts=_counts(trainer), manual=state.manual)
        if state.outputs is not None and isinstance(state.batch, tuple | list):
            with torch.no_grad():
                for name, metric in self.metrics.items():
                    if not is_object(metric):  # it may have no value for a single batch
                        self._check_metric(name, measured_alone(metric, state.outputs, state.batch[-1]))

    def on_before_backward(self, trainer: TrainerView) -> None:  # noqa: ARG002 - the hook's signature
        """Enter the phase of the gradients."""
        self.phase = BACKWARD

    def on_after_backward(self, trainer: TrainerView) -> None:
        """Check the gradients of the first batch; skipped for a step with its own updates: more may follow."""
        if not self.batches and not trainer.state.manual:
            self._check_gradients(trainer.model)
            self._look_for_untrained(trainer)

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:  # noqa: ARG002 - the hook's signature
        """Enter the phase of the optimizer."""
        self.phase = OPTIMIZER

    def on_after_optimizer_step(self, trainer: TrainerView) -> None:
        """Look at the weights after the first step."""
        if trainer.state.step == 0:
            for name, parameter in trainer.model.named_parameters():
                if _not_finite(parameter):
                    problem = f"after one step the weights of `{name}` are not finite"
                    raise self._complain(problem, "optimizer", "lower the learning rate")

    def on_before_scheduler_step(self, trainer: TrainerView) -> None:  # noqa: ARG002 - the hook's signature
        """Enter the phase of the scheduler."""
        self.phase = SCHEDULER

    def on_after_scheduler_step(self, trainer: TrainerView) -> None:
        """Look at the learning rates."""
        rates = [float(group["lr"]) for group in trainer.optimizer.param_groups]
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            shown = ", ".join(f"{rate:g}" for rate in rates)
            raise self._complain(
                f"after one step the learning rate is {shown}", "lr_scheduler", "see its arguments"
            )

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """End the epoch once enough batches are timed."""
        self.phase = BATCH
        state = trainer.state
        if not self.batches and state.manual:
            self._check_gradients(trainer.model)
            self._look_for_untrained(trainer)
        self.batches += 1
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        now = time.perf_counter()
        if self.batches <= self.warmup:
            self.batch_s = now - (self._started if self.batches == 1 else self._warm)
            self._warm = now
            return
        self.batch_s = (now - self._warm) / (self.batches - self.warmup)
        stepped = state.step > 0 and self.batches > state.batches_per_step
        if stepped and (self.batches >= _BATCHES or now - self._started > _SECONDS):
            state.stop_epoch()

    # ---- the epoch's end

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Record the time, and check that the metrics' states can be saved inside an epoch."""
        trainer.recorder.state_dict()
        self.phase = VALIDATION
        self.ended = self.validated = time.perf_counter()

    def on_validation_batch_end(self, trainer: TrainerView) -> None:
        """Look at the loss and the metrics of a validation batch."""
        state = trainer.state
        assert state.loss is not None
        if _counts(trainer) and _not_finite(state.loss):
            fix = "look at the validation data, and at what the model does differently in eval mode"
            raise self._complain("the loss of a validation batch is not finite", self._loss_path, fix)

    def on_validation_end(self, trainer: TrainerView) -> None:
        """Note the time."""
        self.phase = EPOCH_END
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        self.validated = time.perf_counter()

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:  # noqa: ARG002
        """Keep the batch, which the trainer will drop."""
        self.failed = trainer.state.batch

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """End the run."""
        self.phase = EPOCH_END
        trainer.state.stop(PREFLIGHT)

    # ---- what is wrong

    def _check_loss(self, loss: Tensor, *, counts: bool, manual: bool) -> None:
        shape = tuple(loss.shape)
        if loss.numel() != 1:
            fix = "return the mean over the batch, such as `loss.mean()`"
            raise self._complain(f"the loss has the shape {shape}, and must be one number", self._loss_path, fix)
        if counts and _not_finite(loss):
            fix = "look for a division by zero or a logarithm of zero in model and loss"
            raise self._complain(f"the loss of the first batch is {float(loss)}", self._loss_path, fix)
        if not (loss.requires_grad or manual):
            fix = "compute it from the model's outputs, without `.item()`, `.detach()` or `torch.no_grad()`"
            raise self._complain("the loss does not depend on the model's parameters", self._loss_path, fix)

    def _check_metric(self, name: str, value: Any) -> None:
        path = join_path(("metrics", name))
        single = value.reshape(()) if isinstance(value, Tensor) and value.numel() == 1 else value
        try:
            found = number(name, single)
        except MetricError as error:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else ""
            problem = f"returned a {type(value).__name__}{shape}, and must return one number"
            raise self._complain(problem, path, "return the mean over the batch") from error
        if not math.isfinite(found):
            problem = f"is {found} for the first batch"
            raise self._complain(problem, path, "look for a division by zero in it")

    def _check_gradients(self, model: nn.Module) -> None:
        trained = [(name, item) for name, item in model.named_parameters() if item.requires_grad]
        self.without_gradient = [name for name, parameter in trained if parameter.grad is None]
        if len(self.without_gradient) == len(trained):
            fix = "let the outputs depend on the parameters, and set requires_grad where it is off"
            raise self._complain("no parameter of the model gets a gradient", "model", fix)
        if self._precision == "fp16":
            return
        for name, parameter in trained:
            if parameter.grad is not None and (bad := _not_finite(parameter.grad)):
                problem = f"{bad} of {parameter.numel()} gradients of `{name}` are not finite"
                fix = "look at what the model computes there: a square root, a logarithm or a norm of zero"
                raise self._complain(problem, "model", fix)

    def _look_for_untrained(self, trainer: TrainerView) -> None:
        held = {id(item) for group in trainer.optimizer.param_groups for item in group["params"]}
        for path, part in (("model", trainer.model), (self._loss_path, _module_of(trainer.step))):
            named = part.named_parameters() if part is not None else ()
            missed = [name for name, item in named if item.grad is not None and id(item) not in held]
            if missed:
                self.untrained[path] = missed


def _module_of(step: Any) -> nn.Module | None:
    """The module that computes the loss, if it is one."""
    found = step if isinstance(step, nn.Module) else getattr(step, "loss", None)
    return found if isinstance(found, nn.Module) else None


def _tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, including those in the attributes of a batch object."""
    return list(tensors_in(value)) or list(tensors_in(list(attributes_of(value))))


def shapes_of(value: Any) -> str:
    """Shapes and types of the tensors in a value."""
    found = [f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in _tensors_of(value)]
    return ", ".join(found) or type(value).__name__


def _counts(trainer: TrainerView) -> bool:
    """Whether the batch has any weight: if all its targets are ignored, its loss is 0 / 0."""
    weight = trainer.state.weight
    return weight is None or float(weight) > 0


def _not_finite(tensor: Tensor) -> int:
    """How many values are NaN or infinite."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    elif values.layout is not torch.strided:  # sparse or jagged
        values = values.values()
    return int((~torch.isfinite(values)).sum())
