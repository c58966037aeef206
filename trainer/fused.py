"""Torch's fused optimizers where nothing else was asked for."""

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

# Exact classes: what a subclass does in its step is not ours to know.
_FUSIBLE = (SGD, Adam, AdamW)
_DEVICES = frozenset({"cpu", "cuda"})


def use_fused(optimizer: Optimizer, model: nn.Module) -> bool:
    """Switch a fresh optimizer to its fused form, as its ``fused=True`` would have.

    Left alone are optimizers that have none, have stepped already, were given ``fused``, ``foreach``,
    ``differentiable`` or ``capturable``, or hold a parameter for which there is none; and all of a model that has
    layers with sparse gradients, for which there is none either.

    Returns:
        Whether it was switched.
    """
    if type(optimizer) not in _FUSIBLE or optimizer.state:
        return False
    groups = optimizer.param_groups
    if any(group.get("fused") is not None or group.get("foreach") is not None for group in groups):
        return False
    if any(group.get("differentiable") or group.get("capturable") for group in groups):
        return False
    if not all(_fits(parameter) for group in groups for parameter in group["params"]):
        return False
    if any(getattr(module, "sparse", False) for module in model.modules()):
        return False
    for group in groups:
        group["fused"] = True
    return True


def _fits(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and parameter.device.type in _DEVICES and not parameter.is_sparse
