"""Trains with optimizers whose step evaluates the loss several times by a closure, such as LBFGS and SAM."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.callback import Callback, TrainerView
from trainer.state import BACKWARD, ZERO_GRAD
from trainer.step.compute import Compute


def step_with_closure(trainer: TrainerView, evaluate: Callable[[], None]) -> None:
    """Step the optimizer with a closure whose first call reuses the loss and gradients from before the step.

    If the optimizer changes weights or gradients before that first call, the closure computes them anew there too.
    ``state.evaluation`` counts these further evaluations during the step. Afterwards the state has the loss,
    outputs and norms from before the step.

    Args:
        trainer: The trainer of the optimizer.
        evaluate: Computes the loss and its gradients at the present weights, and puts the loss on the state.
    """
    state = trainer.state
    first = state.loss, state.outputs, state.weight, state.scalars, dict(state.norms)
    before = _Marks(trainer.optimizer)
    begun = False

    def closure() -> Tensor:
        nonlocal begun
        if begun or before.changed():
            state.evaluation += 1
            state.norms.pop(state.optimizer_name, None)  # the norms of the previous gradients
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
    """Tells whether an optimizer's weights and gradients have changed since this object was made.

    It compares torch's counts of in-place changes, which reads nothing from the device.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._gradients = [weight.grad for weight in self._weights]
        self._versions = self._now()

    def changed(self) -> bool:
        """Whether a weight or gradient was changed in place, or a gradient was cleared or replaced."""
        pairs = zip(self._weights, self._gradients, strict=True)
        return any(weight.grad is not gradient for weight, gradient in pairs) or self._now() != self._versions

    def _now(self) -> list[tuple[int, int | None]]:
        pairs = zip(self._weights, self._gradients, strict=True)
        return [(weight._version, None if grad is None else grad._version) for weight, grad in pairs]  # noqa: SLF001


def check_closure(trainer: TrainerView) -> None:
    """Check that a step with a closure gets unscaled gradients of one batch.

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
    """Trains with an optimizer that takes a closure; records the loss of a batch from before the step.

    Each further evaluation fires the events from ``on_before_zero_grad`` to ``on_before_optimizer_step`` again, so
    that hooks which change loss or gradients act on every evaluation.
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
