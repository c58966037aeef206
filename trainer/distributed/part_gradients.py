"""PartGradients: the gradients that torch's FSDP2 has added up over the processes, made those of the mean."""

from __future__ import annotations

import torch

from trainer.callback import Callback, TrainerView
from trainer.distributed.gradients import weight_of_batch
from trainer.distributed.parts import held
from trainer.distributed.processes import Processes
from trainer.distributed.splitting import follow_requirements


class PartGradients(Callback):
    """Divides the sum of the gradients by that of the weights, as `GradientSum` does, each process its part.

    The sum itself is made during each backward pass, also of a group that `GradientAccumulation` gathers: a
    process never keeps a whole gradient. With the weights travel the squares that make the norms of the gradients,
    so that who asks for these waits for nobody.

    Args:
        group: The processes.
    """

    priority = 3

    def __init__(self, group: Processes) -> None:
        self._group = group

    def on_before_forward(self, trainer: TrainerView) -> None:
        """Take over which parameters are to be trained."""
        follow_requirements(trainer.model)

    def on_before_backward(self, trainer: TrainerView) -> None:
        """Turn the loss from a mean into a sum; who accumulates batches has done so."""
        state = trainer.state
        if state.batches_per_step == 1:
            weight = weight_of_batch(trainer)
            state.gradient_share = 1.0 if weight is None else weight

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        """Divide."""
        state = trainer.state
        weight = state.step_weight if state.batches_per_step > 1 else weight_of_batch(trainer)
        gradients = [
            held(parameter.grad)
            for group in trainer.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not gradients:
            return
        squares = torch.stack([norm.double().square() for norm in torch._foreach_norm(gradients)])  # noqa: SLF001
        sums = torch.cat([squares, squares.new_ones(1) * (1.0 if weight is None else weight)])
        self._group.wait([self._group.sum(sums)])
        norms = sums[:-1].sqrt()
        if weight is not None:
            total = sums[-1] + (sums[-1] == 0)
            norms /= total
            for gradient in gradients:
                gradient.div_(total.to(gradient.dtype))
        state.norms[state.optimizer_name] = tuple(norms.float().unbind())
        for overflows in trainer.precision.overflow_marks(trainer.optimizer):  # those of all count for each
            self._group.wait([self._group.sum(overflows)])
