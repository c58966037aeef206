"""Optimizers whose step evaluates the loss several times: LBFGS, SAM and their like."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from trainer.callback import Callback, TrainerView
from trainer.state import BACKWARD, ZERO_GRAD
from trainer.step.compute import Compute


def step_with_closure(trainer: TrainerView, evaluate: Callable[[], None]) -> None:
    """Step the optimizer with a closure whose first evaluation is the one that was made before the step.

    After the step the state has the loss and outputs of that first one; ``state.evaluation`` counts the others.

    Args:
        trainer: Whose optimizer it is.
        evaluate: Puts the loss at the weights as they are then on the state, and its gradients in their place.
    """
    state = trainer.state
    first = state.loss, state.outputs, state.weight, state.scalars
    begun = False

    def closure() -> Tensor:
        nonlocal begun
        if begun:
            state.evaluation += 1
            with torch.enable_grad():
                evaluate()
        begun = True
        assert state.loss is not None
        return state.loss.detach()

    try:
        trainer.optimizer.step(closure)  # type: ignore[arg-type]
    finally:
        state.evaluation = 0
        state.loss, state.outputs, state.weight, state.scalars = first


def check_closure(trainer: TrainerView) -> None:
    """See that a step with a closure has gradients of their true size, of its own batch.

    Raises:
        ValueError: Batches are accumulated, or the precision is fp16.
    """
    if trainer.state.batches_per_step != 1:
        raise ValueError(
            "an optimizer that takes a closure evaluates its batch several times a step, so batches can't be "
            "accumulated: leave GradientAccumulation out, and take larger batches"
        )
    if trainer.precision.kind == "fp16":
        raise ValueError(
            "an optimizer that takes a closure can't have its loss scaled for fp16: use precision 'bf16' or 'fp32'"
        )


class ClosureCompute(Compute):
    """Trains with an optimizer that takes a closure; the loss of a batch is recorded as it is before the step.

    Each further evaluation fires the events from ``on_before_zero_grad`` to ``on_before_optimizer_step`` again, so
    that what hooks do to loss and gradients holds for all of them.
    """

    def prepare(self, callbacks: Iterable[Callback]) -> None:  # noqa: ARG002
        """See `check_closure`."""
        check_closure(self._trainer)

    def _take_step(self) -> None:
        step_with_closure(self._trainer, self._evaluate_again)

    def _evaluate_again(self) -> None:
        fire = self._trainer.fire
        self._act(ZERO_GRAD, self._clear_gradients)
        fire("on_before_forward")
        self._forward()
        fire("on_after_forward")
        self._act(BACKWARD, self._backward)
        fire("on_before_optimizer_step")
