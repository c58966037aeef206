"""GradientClipping: clips the gradients before each optimizer step."""

from typing import Final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from trainer.callback import Callback, TrainerView
from trainer.distributed.tensor_shards import held
from trainer.step.norms import total_norm

#: Added to a norm so that it is never 0, as in torch's clip_grad_norm_.
_LEAST_NORM: Final = 1e-6


class GradientClipping(Callback):
    """Clips the gradients of all parameters by their norm or by value, without waiting for the device.

    It runs after `GradientMonitor`, which thus records the norm before clipping. Gradients that are not finite
    stay as they are.

    Args:
        max_norm: All gradients together are scaled down to this norm if theirs is larger. Give either this or
            ``max_value``.
        max_value: Each element is clipped to [-max_value, max_value].
        norm_type: p of the norm, above 0; ``inf`` is the largest element's magnitude. Used with ``max_norm`` only.

    Raises:
        ValueError: Neither or both of ``max_norm`` and ``max_value`` are given, or a number is not above 0.

    Example::

        Trainer(model, optimizer, loss, callbacks=[GradientClipping(max_norm=1.0)])

        callbacks: {gradient_clipping: {max_norm: 1.0}}  # in a study file
    """

    priority = 20

    def __init__(
        self, max_norm: float | None = None, max_value: float | None = None, norm_type: float = 2.0
    ) -> None:
        if (max_norm is None) == (max_value is None):
            raise ValueError(f"max_norm is {max_norm} and max_value {max_value}: give exactly one of them")
        for name, value in (("max_norm", max_norm), ("max_value", max_value), ("norm_type", norm_type)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}: give a number above 0")
        self.max_norm = max_norm
        self.max_value = max_value
        self.norm_type = norm_type

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Check that the norm is available.

        Raises:
            ValueError: The model is split over processes, where only the L2 norm of the gradients is available.
        """
        if trainer.group.strategy == "fsdp" and self.max_norm is not None and self.norm_type != 2:
            raise ValueError(f"norm_type is {self.norm_type}: with strategy 'fsdp' only the norm 2 is known")

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        """Clip this step's gradients."""
        parameters = [
            parameter
            for group in trainer.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not parameters:
            return
        if trainer.group.strategy == "fsdp":
            self._clip_each([held(parameter.grad) for parameter in parameters], trainer)
        elif any(parameter.grad.is_sparse for parameter in parameters):  # torch's functions do not support these
            self._clip_each([_numbers_of(parameter) for parameter in parameters], trainer)
        elif self.max_norm is not None:
            norm = clip_grad_norm_(parameters, self.max_norm, self.norm_type)
            if self.norm_type == 2:  # norms measured earlier stay
                trainer.state.norms.setdefault(trainer.state.optimizer_name, (norm,))
        elif self.max_value is not None:
            clip_grad_value_(parameters, self.max_value)

    def _clip_each(self, gradients: list[Tensor], trainer: TrainerView) -> None:
        """Clip this process's parts of the gradients, or the values of sparse ones, by their total norm."""
        if self.max_value is not None:
            for gradient in gradients:
                gradient.clamp_(-self.max_value, self.max_value)
        elif self.max_norm is not None:
            if self.norm_type == 2:
                norm = total_norm(trainer.state.gradient_norms(trainer.optimizer))
            else:
                norm = get_total_norm(gradients, self.norm_type)
            factor = torch.clamp(self.max_norm / (norm + _LEAST_NORM), max=1.0)  # as torch's clip_grad_norm_
            torch._foreach_mul_(gradients, factor)


def _numbers_of(parameter: Tensor) -> Tensor:
    """The values of a gradient, to be changed in place; of a sparse one, its stored values."""
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient = gradient.coalesce()
    return gradient.values()
