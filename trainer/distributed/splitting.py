"""Splits a model, and its optimizer, over the processes by torch's fully_shard (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from trainer.distributed.tensor_shards import is_sharded, split_state
from trainer.step.optimizers import each_of, needs_closure
from trainer.step.parts import refuse_lazy

#: The fewest parameters with which a module in an nn.Sequential is gathered by itself.
LARGE: Final = 2**20
#: Optimizers whose step does not treat each element of a parameter independently.
_OF_MATRICES: Final = (torch.optim.Adafactor, torch.optim.Muon)


def split(model: nn.Module, optimizer: Optimizer, device: torch.device, size: int) -> None:
    """Split the parameters of a model, and the optimizer's state of them, over all processes.

    Args:
        model: The model, on any device; its parameters and buffers are moved to ``device``.
        optimizer: Built over the model's parameters.
        device: The device of this process.
        size: Number of processes.
    """
    mesh = init_device_mesh(device.type, (size,))
    before = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    for module in [*units(model), model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    _follow(optimizer, before, dict(model.named_parameters(remove_duplicate=False)))
    split_state(optimizer)


def units(model: nn.Module) -> list[nn.Module]:
    """The modules whose parameters are gathered by themselves, and freed after use; inner modules first.

    These are the modules in the outermost ModuleLists, such as the blocks of a transformer, and the modules of an
    nn.Sequential with at least 2²⁰ parameters and no such module inside. The rest of the model is one more unit. A
    module that shares a parameter with a module outside of it belongs to the rest.
    """
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    found = {id(module): module for module in _candidates(model)}
    return [module for module in found.values() if _stands_alone(module, owners)]


def _candidates(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        is_called = type(child).forward is not nn.Module.forward
        if isinstance(module, nn.ModuleList) and is_called:
            yield child
            continue
        inner = list(_candidates(child))
        size = sum(parameter.numel() for parameter in child.parameters())
        if not inner and isinstance(module, nn.Sequential) and is_called and size >= LARGE:
            yield child
        yield from inner


def _stands_alone(module: nn.Module, owners: Mapping[int, set[int]]) -> bool:
    inside = {id(each) for each in module.modules()}
    parameters = list(module.parameters())
    return bool(parameters) and all(owners[id(parameter)] <= inside for parameter in parameters)


def check_splits(model: nn.Module, optimizer: Optimizer) -> None:
    """Check, before anything is split, that the model and its optimizer can be.

    Raises:
        ValueError: They can't.
    """
    refuse_lazy(model, "strategy 'fsdp' splits it")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(f"parameter {name} is a scalar, which strategy 'fsdp' can't split: give it shape [1]")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{name} has sparse gradients, which can't be added up over several processes: build the "
                "embedding with sparse=False"
            )
    own = {id(parameter) for parameter in model.parameters()}
    for each in each_of(optimizer).values():
        held = {id(parameter) for group in each.param_groups for parameter in group["params"]}
        if reason := _why_not(each, held, own):
            raise ValueError(f"{type(each).__name__} {reason}")


def _why_not(optimizer: Optimizer, held: set[int], own: set[int]) -> str | None:
    """Why an optimizer can't be split, and what to do about it."""
    other = "use strategy 'ddp' or another optimizer"
    if needs_closure(optimizer):
        return f"takes a closure and works on all parameters at once, which strategy 'fsdp' splits: {other}"
    if isinstance(optimizer, _OF_MATRICES):
        return f"works on the rows and columns of whole matrices, which strategy 'fsdp' splits: {other}"
    if held - own:
        return (
            "holds parameters that are not the model's, and strategy 'fsdp' splits the model alone: make them "
            "part of it"
        )
    if kept := _kept_besides(optimizer, held):
        return f"keeps the parameters in {kept!r} too, where strategy 'fsdp' can't put the split ones: {other}"
    return None


def _kept_besides(optimizer: Optimizer, held: set[int]) -> str | None:
    """The attribute, besides groups and state, in which an optimizer keeps parameters; None if there is none."""
    for name, value in vars(optimizer).items():
        if name not in {"param_groups", "state"} and isinstance(value, list | tuple | set | Mapping):
            items = [*value, *value.values()] if isinstance(value, Mapping) else value
            if any(id(item) in held for item in items):
                return name
    return None


def _follow(optimizer: Optimizer, before: Mapping[int, str], after: Mapping[str, Tensor]) -> None:
    """Replace the parameters that the model had before by those that it has now, in groups and state."""
    for each in each_of(optimizer).values():
        for group in each.param_groups:
            group["params"] = [after[before[id(parameter)]] for parameter in group["params"]]
        for parameter in list(each.state):
            each.state[after[before[id(parameter)]]] = each.state.pop(parameter)


def check_split(model: nn.Module, size: int) -> None:
    """Refuse a model that is not split over all processes along the first dimension.

    Raises:
        ValueError: It is not.
    """
    for name, parameter in model.named_parameters():
        placed: Any = parameter
        if not is_sharded(parameter) or placed.device_mesh.ndim != 1 or placed.device_mesh.size() != size:
            raise ValueError(
                f"{name} is not split over all {size} processes alone: hand over the whole model, or one on which "
                "fully_shard was called with a mesh of one dimension"
            )
        if not placed.placements[0].is_shard(0):
            raise ValueError(f"{name} is not split along its first dimension: leave out shard_placement_fn")


def follow_requirements(model: nn.Module) -> None:
    """Make gathered parameters require gradients if their shards do; torch takes that over only once."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001 - it has no public name
                for each in group.fsdp_params:
                    gathered = getattr(each, "_unsharded_param", None)
                    if gathered is not None and gathered.requires_grad != each.sharded_param.requires_grad:
                        gathered.requires_grad_(each.sharded_param.requires_grad)


def recover(model: nn.Module) -> None:
    """Reset torch's state of a step that an error interrupted."""
    if isinstance(model, FSDPModule) and model._get_fsdp_state()._is_root:  # noqa: SLF001 - None before its first call
        model.reset_iter_state()
