"""Optimizers whose step evaluates the loss several times: LBFGS, SAM and their like."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.callback import Callback, TrainerView
from trainer.state import BACKWARD, ZERO_GRAD
from trainer.step.compute import Compute


def step_with_closure(trainer: TrainerView, evaluate: Callable[[], None]) -> None:
    """Step the optimizer with a closure whose first evaluation is the one that was made before the step.

    An optimizer that moves the weights or clears the gradients before it calls the closure has it evaluated anew:
    it asks for the loss somewhere else. After the step the state has the loss, outputs and norms of the one before
    it; ``state.evaluation`` counts the others.

    Args:
        trainer: Whose optimizer it is.
        evaluate: Puts the loss at the weights as they are then on the state, and its gradients in their place.
    """
    state = trainer.state
    first = state.loss, state.outputs, state.weight, state.scalars, dict(state.norms)
    before = _Marks(trainer.optimizer)
    begun = False

    def closure() -> Tensor:
        nonlocal begun
        if begun or before.changed():
            state.evaluation += 1
            state.norms.pop(state.optimizer_name, None)  # those of the gradients before
            with torch.enable_grad():
                evaluate()
        begun = True
        assert state.loss is not None
        return state.loss.detach()

    try:
        trainer.optimizer.step(closure)  # type: ignore[arg-type]
    finally:
        state.evaluation = 0
        state.loss, state.outputs, state.weight, state.scalars, state.norms = first


class _Marks:
    """Whether weights and gradients of an optimizer are still those that they were when this was made.

    Only what torch counts of in-place changes is looked at, which reads nothing from the device.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._gradients = [weight.grad for weight in self._weights]
        self._versions = self._now()

    def changed(self) -> bool:
        """Whether one was changed in place, or a gradient cleared or replaced."""
        pairs = zip(self._weights, self._gradients, strict=True)
        return any(weight.grad is not gradient for weight, gradient in pairs) or self._now() != self._versions

    def _now(self) -> list[tuple[int, int | None]]:
        pairs = zip(self._weights, self._gradients, strict=True)
        return [(weight._version, None if grad is None else grad._version) for weight, grad in pairs]  # noqa: SLF001


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
