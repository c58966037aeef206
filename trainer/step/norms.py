"""Computes the norms of a step's gradients without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


def norms_of(optimizer: Optimizer) -> tuple[Tensor, ...]:
    """The L2 norm of each gradient of an optimizer's parameters; empty if there are none.

    Not for a model that is split over processes: there `ShardGradients` measures the norms in each step.
    """
    gradients = [
        gradient.coalesce().values() if gradient.is_sparse else gradient
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (gradient := parameter.grad) is not None
    ]
    # What torch.nn.utils.get_total_norm calls, without its grouping, stacking and second norm per step.
    return torch._foreach_norm(gradients) if gradients else ()  # noqa: SLF001


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together, from those of each; on the device of the last."""
    if len(norms) == 1:
        return norms[0]
    device = norms[-1].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
    return total
