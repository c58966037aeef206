"""GradientAccumulation: takes one optimizer step for the gradients of several batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.callback import Callback, TrainerView
from trainer.distributed.ranks import world_size
from trainer.distributed.tensor_shards import held, held_as
from trainer.state import OPTIMIZER_STEP, ZERO_GRAD, TrainState
from trainer.step.supervised import Weight


class GradientAccumulation(Callback):
    """Takes one optimizer step per ``batches`` batches: the step of one batch that holds all their samples.

    The step is that of the loss of the whole group, to rounding, also where its batches differ in what their
    losses are the mean of (``state.weight``): in size, in the class weights of their targets, in the targets that
    are ignored. A model whose output depends on the other samples of its batch (batch norm) still sees the small
    ones. Gradients are averaged before any other callback looks at them; those of a loss that is a sum are added
    up. The batches left over at an epoch's end make a smaller group with a step of its own; with
    ``drop_last`` they make no step. The recorded loss does not change.

    A batch whose backward pass another callback skips does not count. If it is the one at which the step is due,
    the step is taken with the gradients there are; if that callback skips the step too, the group waits for the
    next batch. Skipping only a step that is due drops the group's gradients, as it drops those of a batch, and so
    does a step that overflows in fp16. An error in a backward pass or a step drops those of the open group.

    ``state.total_steps`` counts steps, not batches. A scheduler that goes with the step must be built for it; in a
    study file, ``${trainer.total_steps}`` is that number.

    Args:
        batches: Batches per step, at least 1.
        drop_last: Whether to drop the gradients of the batches left over at an epoch's end, without a step.

    Raises:
        ValueError: ``batches`` is below 1; an epoch has fewer with ``drop_last``, and trains nothing.

    Example::

        Trainer(model, optimizer, loss, callbacks=[GradientAccumulation(4)])

        callbacks: {gradient_accumulation: {batches: 4}}  # in a study file
    """

    priority = 2
    rank_state = True
    transient = ("_sums",)

    def __init__(self, batches: int, drop_last: bool = False) -> None:
        if not isinstance(batches, int) or isinstance(batches, bool) or batches < 1:
            raise ValueError(f"batches is {batches}: give the number of batches a step, at least 1")
        self.batches = batches
        self.drop_last = drop_last
        self._gradients = 0  # number of batches of the open group with gradients
        self._weight: Weight = None  # the total weight of these batches; None if their losses are sums
        # The gradients are the sum over the batches, each times its weight, divided by this unit.
        self._unit: Weight = None
        self._batch_weight: Weight = None
        self._in_backward = False
        self._sums = False  # whether the gradients stay a sum, which several processes then average
        self._loaded: list[Tensor | None] | None = None
        self._optimizer: Optimizer | None = None

    def setup(self, trainer: TrainerView) -> None:
        """Tell the state how many batches make a step."""
        trainer.state.batches_per_step = self.batches
        trainer.state.drops_last_step = self.drop_last

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Restore the gradients of a group that was open; drop a group of another trainer's run."""
        refuse_no_step(trainer.state, trainer.state.batches_per_epoch)
        self._optimizer = trainer.optimizer
        self._sums = world_size() > 1
        if trainer.state.is_new:
            self._loaded = None
            self._close()
        if self._loaded is not None:
            for parameter, gradient in zip(_parameters(trainer.optimizer), self._loaded, strict=True):
                if gradient is not None:
                    gradient = held_as(gradient.to(parameter.device, copy=True), parameter)
                parameter.grad = gradient
            self._loaded = None

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        """Check that the epoch makes a step: with larger batches, it has fewer of them."""
        refuse_no_step(trainer.state, trainer.state.batches_per_epoch)

    def on_train_batch_start(self, trainer: TrainerView) -> None:
        """Skip clearing the gradients of an open group, and skip the step until the group is full."""
        if self._gradients:
            trainer.state.skip(ZERO_GRAD)
        if self._gradients + 1 < self.batches:
            trainer.state.skip(OPTIMIZER_STEP)

    def on_before_backward(self, trainer: TrainerView) -> None:
        """Set the factor by which the gradients of a batch with a mean loss count by its weight."""
        state = trainer.state
        self._in_backward = True
        self._batch_weight = weight = state.weight
        if weight is None:
            return
        if self._sums:  # all processes sum these gradients
            self._unit = 1.0
            state.gradient_share = weight
            return
        # As long as a group has no weight, its gradients are 0, and another unit may be chosen.
        self._unit = weight if not self._gradients else _first_above_zero(self._unit, weight)
        state.gradient_share = _ratio(weight, self._unit)

    def on_after_backward(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Count the batch."""
        self._in_backward = False
        if self._batch_weight is not None:
            self._weight = self._batch_weight if self._weight is None else self._weight + self._batch_weight
        self._gradients += 1

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        """Turn the sum of the gradients into their mean."""
        trainer.state.step_weight = self._weight
        if self._gradients and self._weight is not None and not self._sums:
            self._scale(trainer.optimizer, _ratio(self._unit, self._weight))
        self._close()

    def on_train_batch_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Drop a full group whose step was skipped."""
        self._in_backward = False
        if self._gradients >= self.batches:
            self._close()

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:  # noqa: ARG002
        """Drop a full group, and one that may hold a part of a batch's gradients."""
        if self._in_backward or self._gradients >= self.batches:
            self._close()
        self._in_backward = False

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Take the step of the batches left over; no group continues in the next epoch."""
        if self._gradients:
            if not self.drop_last:
                trainer.step_optimizer()
            self._close()

    def state_dict(self) -> dict[str, Any]:
        """The open group with its gradients."""
        return {
            "gradients": self._gradients,
            "weight": self._weight,
            "unit": self._unit,
            "open": self._open_gradients(),
        }

    def redealt(self, states: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
        """The sum over the processes for rank 0; for the others, the same number of batches without gradients."""
        count, weight = states[0]["gradients"], _total([state["weight"] for state in states])
        opened = [(state["open"], state["unit"]) for state in states if state["open"] is not None]
        if rank:
            return {"gradients": count, "weight": None if weight is None else 0.0, "unit": 1.0, "open": None}
        sums = [
            _total([_times(gradient, unit, weight) for gradient, unit in of_parameter])
            for of_parameter in zip(*([(each, unit) for each in part] for part, unit in opened), strict=True)
        ]
        return {"gradients": count, "weight": weight, "unit": 1.0, "open": sums or None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume inside the saved group; its gradients are restored when the fit starts."""
        if not state:  # from a run of several processes whose states can't be redealt
            self._close()
            self._loaded = None
            return
        self._gradients = state["gradients"]
        self._weight = state["weight"]
        self._unit = state["unit"]
        self._loaded = state["open"]

    def on_load_checkpoint(self, trainer: TrainerView, checkpoint: Mapping[str, Any]) -> None:
        """Convert the open group's gradients to the loss scale of this run's precision."""
        factor = _loss_scale(trainer.precision.state_dict()) / _loss_scale(checkpoint["precision"])
        if self._loaded is not None and factor != 1:
            self._loaded = [None if gradient is None else gradient * factor for gradient in self._loaded]

    def _open_gradients(self) -> list[Tensor | None] | None:
        if self._loaded is not None or not self._gradients or self._optimizer is None:
            return self._loaded
        gradients = [parameter.grad for parameter in _parameters(self._optimizer)]
        return [None if gradient is None else held(gradient) for gradient in gradients]

    def _close(self) -> None:
        self._gradients, self._weight = 0, None

    def _scale(self, optimizer: Optimizer, factor: Tensor | float) -> None:
        if isinstance(factor, float) and factor == 1:
            return
        gradients = [parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)  # one call for all, as in torch's clipping


def refuse_no_step(state: TrainState, epoch: int | None) -> None:
    """Refuse an epoch whose number of batches is too small for a step; None if the number is unknown.

    Raises:
        ValueError: The epoch would make no step.
    """
    if epoch is not None and not state.steps_of(epoch):
        raise ValueError(
            f"an epoch has {epoch} batches, fewer than the {state.batches_per_step} of a step, and drop_last "
            f"drops them: give batches of at most {epoch}, or leave drop_last out"
        )


def _loss_scale(precision: Mapping[str, Any]) -> float:
    """The loss scale in the state of a precision."""
    return float(precision.get("scale", 1.0))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _total(parts: Sequence[Any]) -> Any:
    """The sum of the parts that are not None; None if all are."""
    there = [part for part in parts if part is not None]
    return sum(there[1:], start=there[0]) if there else None


def _times(gradient: Tensor | None, unit: Weight, weight: Weight) -> Tensor | None:
    """A gradient times its unit; unchanged if the gradient or a weight is None."""
    return gradient if gradient is None or weight is None or unit is None else gradient * unit


def _first_above_zero(first: Weight, second: Tensor | float) -> Tensor | float:
    """The first weight, or the second if the first is None or 0; nothing is read from the device."""
    if isinstance(first, Tensor):
        return torch.where(first > 0, first, second)
    return first or second


def _ratio(weight: Weight, whole: Weight) -> Tensor | float:
    """One weight divided by another, or 0 if that is 0; nothing is read from the device."""
    assert weight is not None
    assert whole is not None
    if isinstance(weight, Tensor) or isinstance(whole, Tensor):
        share = torch.as_tensor(weight / whole)
        return torch.where(torch.isfinite(share), share, 0.0)
    return weight / whole if whole else 0.0
