"""SupervisedStep, the default step for one batch, and StepResult, the normal form of what any step returns."""

import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer.data.lengths import samples_in
from trainer.metrics.denominators import as_written, denominator_of

Weight = Tensor | float | None

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class StepResult(NamedTuple):
    """The parts of what a step returned.

    Attributes:
        loss: The loss.
        outputs: The outputs, for the metrics.
        weight: What the loss was divided by; None if the loss is a sum over the batch.
        extra: Further scalars by name.
        fixed: Whether a CUDA graph can replay the weight: it is a tensor, or follows from the batch's shapes.
    """

    loss: Tensor
    outputs: Any
    weight: Weight
    extra: Mapping[str, Any] = _NOTHING
    fixed: bool = True


StepOutput = Tensor | Mapping[str, Any] | StepResult
Step = Callable[[nn.Module, Any], StepOutput]


class SupervisedStep:
    """``loss(model(x), y)`` for batches ``(x, y)``.

    Args:
        loss: Takes (outputs, targets), returns a scalar: the mean over the batch. What torch's own losses divide
            by is known (`trainer.metrics.denominators`); any other loss counts as a mean over samples.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor]) -> None:
        self.loss = loss
        self._denominator = denominator_of(loss)
        self._built = {name: value.detach().clone() for name, value in _buffers(as_written(loss)).items()}

    def state_of_loss(self, trained: Collection[int]) -> dict[str, Tensor]:
        """What training has changed of a loss that is a module.

        The rest is left out: class weights, or a network that the loss only uses, come from its construction.

        Args:
            trained: The ids of the trained parameters.

        Returns:
            By name, the trained parameters, and the buffers that changed since the step was built.
        """
        loss = as_written(self.loss)
        if not isinstance(loss, nn.Module):
            return {}
        now, built = _buffers(loss), self._built
        changed = {name for name, value in now.items() if not _equals(value, built.get(name))}
        changed |= {name for name, item in loss.named_parameters() if id(item) in trained}
        return {name: value for name, value in loss.state_dict().items() if name in changed}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_of_loss` returned."""
        loss = as_written(self.loss)
        if isinstance(loss, nn.Module):
            # Older checkpoints have the prefix.
            plain = {name.removeprefix("_orig_mod."): value for name, value in state.items()}
            loss.load_state_dict(plain, strict=False)

    def __call__(self, model: nn.Module, batch: Any) -> StepResult:
        """Loss, outputs and weight of one batch."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(
                f"a batch is {type(batch).__name__}, not (inputs, targets): give the Trainer a `step` of your own "
                "in place of the loss"
            )
        inputs, targets = batch
        outputs = model(inputs)
        loss = self.loss(outputs, targets)
        if not isinstance(loss, Tensor):
            raise TypeError(f"a loss returns a tensor of one number, not {type(loss).__name__}")
        if self._denominator is None:
            return StepResult(loss, outputs, float(samples_in(batch)))
        return StepResult(loss, outputs, self._denominator(loss, outputs, targets))

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """The model's outputs for a batch of ``(inputs, targets)``, ``(inputs,)`` or inputs alone."""
        if isinstance(batch, Tensor):
            return model(batch)
        if not isinstance(batch, tuple | list) or not 1 <= len(batch) <= 2:
            raise TypeError(
                f"a batch is {type(batch).__name__}, not inputs or (inputs, targets): give the Trainer a `step` "
                "of your own in place of the loss"
            )
        return model(batch[0])


def _buffers(loss: object) -> dict[str, Tensor]:
    named = loss.named_buffers() if isinstance(loss, nn.Module) else ()
    return {name: value for name, value in named if not is_lazy(value)}


def _equals(value: Tensor, built: Tensor | None) -> bool:
    return built is not None and value.shape == built.shape and torch.equal(value.cpu(), built.cpu())


def split_output(output: StepOutput, batch: Any) -> StepResult:
    """Split what a step returned for a batch into loss, outputs, weight and further scalars.

    A step returns the loss, or a mapping with ``"loss"``, optional ``"outputs"`` (handed to the metrics), optional
    ``"weight"`` (what the loss is the mean of: tokens, nodes, valid targets; None for a loss that is a sum) and
    any other scalars, each recorded under its key. Without a weight, loss and scalars are means over samples.

    Raises:
        TypeError: It returned something else.
        ValueError: The weight is negative or not finite. A tensor is only checked at the end of the epoch.
    """
    if type(output) is StepResult:
        return output
    if isinstance(output, Tensor):
        return StepResult(output, None, float(samples_in(batch)))
    if not isinstance(output, Mapping) or not isinstance(output.get("loss"), Tensor):
        raise TypeError(f"a step returns a loss tensor or a mapping with 'loss', not {type(output).__name__}")
    loss = output["loss"]
    extra = {key: value for key, value in output.items() if key not in {"loss", "outputs", "weight"}}
    if "weight" not in output:
        return StepResult(loss, output.get("outputs"), float(samples_in(batch)), extra)
    weight = _checked_weight(output["weight"], loss.device)
    return StepResult(loss, output.get("outputs"), weight, extra, fixed=not isinstance(weight, float))


def _checked_weight(weight: Any, device: torch.device) -> Weight:
    """The weight as a number or a tensor of one element on the loss's device, from which nothing is read."""
    fix = "return the number of tokens, nodes or valid targets that its loss is the mean of"
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise TypeError(
                f"the step's weight is a tensor of shape {tuple(weight.shape)}, {weight.dtype}, not one number: "
                f"{fix}"
            )
        # A copy: the step may change its tensor in place before the weight is read.
        return weight.detach().to(device, non_blocking=True, copy=True).reshape(())
    if weight is None:
        return None
    try:
        number = float(weight)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the step's weight is {weight!r}, not one number: {fix}") from error
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"the step's weight is {weight!r}, and must be finite and not negative: {fix}")
    return number
