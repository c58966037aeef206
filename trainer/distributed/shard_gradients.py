"""ShardGradients: turns the gradients that torch's FSDP2 has summed over the processes into those of the mean."""

from __future__ import annotations

import torch

from trainer.callback import TrainerView
from trainer.distributed.gradients import GradientSum
from trainer.distributed.splitting import follow_requirements
from trainer.distributed.tensor_shards import held
from trainer.step.supervised import Weight


class ShardGradients(GradientSum):
    """Divides the sum of the gradients by the sum of the weights, as `GradientSum` does; each process its shard.

    FSDP2 sums the gradients in each backward pass, also with `GradientAccumulation`, so a process never keeps a
    whole gradient. The squared norms of the shards are sent together with the weights, so that reading the norms
    of the gradients needs no exchange.

    Args:
        group: The processes.
    """

    def on_before_forward(self, trainer: TrainerView) -> None:
        """Update which gathered parameters require gradients, see `follow_requirements`."""
        follow_requirements(trainer.model)

    def _put_together(self, trainer: TrainerView, weight: Weight) -> None:
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
        trainer.state.norms[trainer.state.optimizer_name] = tuple(norms.float().unbind())
