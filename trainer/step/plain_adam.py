"""Takes the step of a fused Adam or AdamW on the CPU without torch's preparations.

Torch makes lists of parameters and state, sorts them by device and type, and checks a dozen times whether it is
being compiled or differentiated. For a model of a few thousand parameters, that takes as long as the step. This
module calls the same kernels with the same tensors if all parameters of a group are on the CPU and of one type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.optim import adam as torch_adam

from trainer.distributed.tensor_shards import held

_ADD: Any = torch._foreach_add_
_ADAM: Any = torch._fused_adam_
_ADAMW: Any = torch._fused_adamw_


def _parts() -> tuple[Any, ...]:
    """The functions of torch's step that this module bypasses, without torch.compile's wrappers."""
    parts = (Adam._init_group, torch_adam.adam, torch_adam._fused_adam)  # noqa: SLF001
    return tuple([getattr(part, "_torchdynamo_orig_callable", part) for part in parts])


_TORCHS = _parts()


class _Tensors(NamedTuple):
    """The kernel's tensors for a group; each list has one per parameter."""

    params: list[Tensor]
    grads: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


def take_plain_step(optimizer: Optimizer) -> bool:
    """Take the step of an Adam or AdamW, with gradients disabled.

    Returns:
        Whether the step was taken. False, and nothing is done, if a group needs torch's own step (the first step
        always does), or if a part of that step was replaced.
    """
    scaled = (
        getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    )
    if scaled or _parts() != _TORCHS or "_init_group" in vars(optimizer):
        return False
    found = []
    for group in optimizer.param_groups:
        tensors = _tensors(group, optimizer.state) if _is_plain(group) else None
        if tensors is None:
            return False
        found.append(tensors)
    for group, tensors in zip(optimizer.param_groups, found, strict=True):
        if tensors.params:
            _step(group, tensors)
    return True


def _is_plain(group: Mapping[str, Any]) -> bool:
    other = group["amsgrad"] or group["capturable"] or group["differentiable"] or group["foreach"]
    beta1, beta2 = group["betas"]
    return bool(group["fused"]) and not other and type(group["lr"]) is type(beta1) is type(beta2) is float


def _tensors(group: Mapping[str, Any], states: Mapping[Tensor, Any]) -> _Tensors | None:
    """The tensors of a group's parameters that have a gradient; None if torch has to prepare or sort them."""
    found = _Tensors([], [], [], [], [])
    dtype = None
    for parameter in group["params"]:  # a plain loop, because it is part of every step
        gradient, state = parameter.grad, states.get(parameter)
        if gradient is None:
            continue
        if not state or not parameter.is_cpu:
            return None
        average, square, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
        if type(gradient) is not Tensor:  # it may be split over processes: take what this one holds
            parameter, gradient, average, square = map(held, (parameter, gradient, average, square))
        dtype = dtype or parameter.dtype
        if not (parameter.dtype is gradient.dtype is average.dtype is square.dtype is dtype and step.is_cpu):
            return None
        found.params.append(parameter)
        found.grads.append(gradient)
        found.averages.append(average)
        found.squares.append(square)
        found.steps.append(step)
    return found


def _step(group: Mapping[str, Any], tensors: _Tensors) -> None:
    _ADD(tensors.steps, 1)
    beta1, beta2 = group["betas"]
    (_ADAMW if group["decoupled_weight_decay"] else _ADAM)(
        tensors.params,
        tensors.grads,
        tensors.averages,
        tensors.squares,
        [],
        tensors.steps,
        amsgrad=False,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )
