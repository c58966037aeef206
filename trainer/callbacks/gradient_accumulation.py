"""GradientAccumulation: one optimizer step for the gradients of several batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.callback import Callback, TrainerView
from trainer.data import batch_length
from trainer.state import OPTIMIZER_STEP, ZERO_GRAD


class GradientAccumulation(Callback):
    """Takes one optimizer step for every ``batches`` batches, as one batch of all their samples would.

    The step is that of the mean over all samples of the group, to rounding, also where its batches differ in
    size; a model whose output depends on the other samples of its batch (batch norm) still sees the small ones.
    Gradients are averaged before any other callback looks at them. What an epoch leaves over makes a smaller
    group and takes its step at the epoch's end. What is recorded as the loss is not touched.

    A batch whose backward pass another callback skips does not count. If it is the one at which the step is due,
    the step is taken with the gradients there are; if that callback skips the step too, the group waits for the
    next batch. Skipping only a step that is due drops the group's gradients, as it drops those of a batch.

    ``state.total_steps`` counts steps, not batches. A scheduler that goes with the step must be built for it; in a
    study file, ``${trainer.total_steps}`` is that number.

    Args:
        batches: Batches a step, at least 1.

    Raises:
        ValueError: ``batches`` is below 1.

    Example::

        Trainer(model, optimizer, loss, callbacks=[GradientAccumulation(4)])

        callbacks: {gradient_accumulation: {batches: 4}}  # in a study file
    """

    priority = 2

    def __init__(self, batches: int) -> None:
        if not isinstance(batches, int) or isinstance(batches, bool) or batches < 1:
            raise ValueError(f"batches is {batches}: give the number of batches a step, at least 1")
        self.batches = batches
        self._gradients = 0  # batches of the open group whose gradients are there
        self._samples = 0  # in those batches
        # The gradients hold the sum over these samples, divided by this number of samples.
        self._unit = 1
        self._loaded: list[Tensor | None] | None = None
        self._optimizer: Optimizer | None = None

    def setup(self, trainer: TrainerView) -> None:
        """Let the run be counted in steps."""
        trainer.state.batches_per_step = self.batches

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Put back the gradients of a group that was open."""
        self._optimizer = trainer.optimizer
        if self._loaded is not None:
            for parameter, gradient in zip(_parameters(trainer.optimizer), self._loaded, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
            self._loaded = None

    def on_train_batch_start(self, trainer: TrainerView) -> None:
        """Keep the gradients of an open group, and wait with the step until it is full."""
        if self._gradients:
            trainer.state.skip(ZERO_GRAD)
        if self._gradients + 1 < self.batches:
            trainer.state.skip(OPTIMIZER_STEP)

    def on_before_backward(self, trainer: TrainerView) -> None:
        """Weigh what is there against the batch to come, whose gradients are the mean over its own samples."""
        samples = batch_length(trainer.state.batch)
        if self._gradients and samples != self._unit:
            self._scale(trainer.optimizer, self._unit / samples)
        self._unit = samples

    def on_after_backward(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Count the batch."""
        self._gradients += 1
        self._samples += self._unit

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        """Turn the sum into the mean."""
        if self._gradients and self._unit != self._samples:
            self._scale(trainer.optimizer, self._unit / self._samples)
        self._close()

    def on_train_batch_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Give up a full group whose step was skipped."""
        if self._gradients >= self.batches:
            self._close()

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Take the step of what is left over; nothing goes into the next epoch."""
        if self._gradients:
            trainer.step_optimizer()
            self._close()

    def state_dict(self) -> dict[str, Any]:
        """The open group with its gradients."""
        return {
            "gradients": self._gradients,
            "samples": self._samples,
            "unit": self._unit,
            "open": self._open_gradients(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on inside the saved group; its gradients are put back when the fit starts."""
        self._gradients = state["gradients"]
        self._samples = state["samples"]
        self._unit = state["unit"]
        self._loaded = state["open"]

    def _open_gradients(self) -> list[Tensor | None] | None:
        if self._loaded is not None or not self._gradients or self._optimizer is None:
            return self._loaded
        return [parameter.grad for parameter in _parameters(self._optimizer)]

    def _close(self) -> None:
        self._gradients = self._samples = 0

    def _scale(self, optimizer: Optimizer, factor: float) -> None:
        gradients = [parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)  # one call for all, as torch's clipping does


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
