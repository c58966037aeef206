"""Switches optimizers to torch's fused kernels where the user chose no form and the result is the same.

The kernels walk through memory: parameters, gradients and state must be dense and in the same order, or a kernel
combines values that do not belong together and writes outside of the parameters. They take no sparse gradients.
The kernel of SGD with momentum does not support a parameter whose first gradient comes later than that of others,
and on the CPU it leaves most 16-bit weights unchanged (https://github.com/pytorch/pytorch/issues/191763).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adam, AdamW, Optimizer

from trainer.distributed.tensor_shards import is_sharded
from trainer.step.optimizers import count_on_cpu

logger = logging.getLogger(__name__)

# Exact classes: a subclass may do anything in its step.
_FUSIBLE = (SGD, Adam, AdamW)
_DEVICES = frozenset({"cpu", "cuda"})
_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def use_fused(optimizer: Optimizer) -> bool:
    """Switch a new optimizer to its fused form, as if it was built with ``fused=True``.

    Optimizers that have no fused form or have stepped already stay as they are, and so do groups that were given
    ``fused``, ``foreach``, ``differentiable`` or ``capturable``, or hold a parameter that does not fit.

    Returns:
        Whether a group was switched.
    """
    if type(optimizer) not in _FUSIBLE or optimizer.state:
        return False
    switched = False
    for group in optimizer.param_groups:
        if not _has_a_form(group) and all(_fits(parameter, group) for parameter in group["params"]):
            group["fused"] = switched = True
    return switched


def leave_fused(optimizer: Optimizer) -> None:
    """Switch off the fused form of groups whose parameters or state do not fit.

    To be called when either may have been replaced: a loaded state has the ``fused`` setting and the memory layout
    of the run that saved it.
    """
    kept = optimizer.state
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        if _is_sgd(group) and any(map(is_sharded, group["params"])):
            _switch_off(optimizer, group, "torch has no fused SGD of parameters that are split over processes")
            continue
        for parameter in group["params"]:
            state = kept.get(parameter, {})
            if not _fits(parameter, group) or not all(_is_flat(value) for value in state.values()):
                _switch_off(optimizer, group, "type or layout of a parameter or its state do not fit the kernel")
                break


def check_gradients(optimizer: Optimizer) -> None:
    """Switch off the fused form of groups whose present gradients the kernel can't take."""
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        for parameter in group["params"]:  # a plain loop, because it is part of every step
            gradient = parameter.grad
            if gradient is not None and (gradient.layout is not torch.strided or not gradient.is_contiguous()):
                _switch_off(optimizer, group, "a gradient is sparse or not contiguous")
                break
        if group.get("momentum") and len(_begun(optimizer, group)) > 1:
            _switch_off(optimizer, group, "a parameter has its first gradient after others")


def _has_a_form(group: Mapping[str, Any]) -> bool:
    chosen = group.get("fused") is not None or group.get("foreach") is not None
    return bool(chosen or group.get("differentiable") or group.get("capturable"))


def _switch_off(optimizer: Optimizer, group: dict[str, Any], reason: str) -> None:
    """Leave the fused form, and move its step counts from the device to the CPU so that no step waits for them."""
    logger.info("the optimizer's step is not fused for %d parameters: %s", len(group["params"]), reason)
    group["fused"] = None
    if not group.get("capturable"):
        for parameter in group["params"]:
            count_on_cpu(optimizer.state.get(parameter))


def _fits(parameter: Tensor, group: Mapping[str, Any]) -> bool:
    known = parameter.dtype in _TYPES and parameter.device.type in _DEVICES
    if parameter.device.type == "cpu" and parameter.itemsize < 4 and _is_sgd(group):
        return False
    return known and (is_lazy(parameter) or _is_dense(parameter))  # a lazy one will be dense


def _is_sgd(group: Mapping[str, Any]) -> bool:
    return "dampening" in group


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous()


def _is_flat(value: Any) -> bool:
    """Whether a value of a parameter's state is dense, or no tensor."""
    return not isinstance(value, Tensor) or _is_dense(value)


def _begun(optimizer: Optimizer, group: Mapping[str, Any]) -> set[bool]:
    """Whether parameters with a gradient have momentum from an earlier step; both values if only some do."""
    state = optimizer.state
    return {
        state.get(parameter, {}).get("momentum_buffer") is not None
        for parameter in group["params"]
        if parameter.grad is not None
    }
