"""Handles tensors of which each process holds a shard (torch's DTensor, split along the first dimension).

The rest of the package uses such tensors through these functions, which return a plain tensor as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.versions import versioned
from trainer.step.optimizers import each_of


def is_sharded(value: Any) -> bool:
    """Whether a value is a tensor of which this process holds a shard."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


@torch.no_grad()
def held(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds; it can be read and written in place."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


@torch.no_grad()
def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """This process's shard of a tensor that every process has whole, on the device and with the split of ``like``.

    Args:
        whole: The tensor; one that is already sharded is only moved to the device.
        like: A tensor of the same shape; if it is plain, the whole tensor is returned.
    """
    if is_sharded(whole) or not is_sharded(like):
        return whole.to(like.device)
    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    pieces = whole.contiguous().chunk(mesh.size())  # as DTensor splits: the last ones may be smaller or missing
    place = mesh.get_local_rank()
    piece = pieces[place] if place < len(pieces) else whole[:0]
    return held_as(piece.to(like.device, copy=True), like)


@torch.no_grad()
def held_as(piece: Tensor, like: Tensor) -> Tensor:
    """Make a sharded tensor from the part that this process holds; the reverse of `held`.

    Args:
        piece: The part, as `held` returns it.
        like: A tensor of the whole shape and with the same split; if it is plain, the piece is returned.
    """
    if not is_sharded(like):
        return piece
    from torch.distributed.tensor import DTensor

    found: Tensor = DTensor.from_local(
        piece,
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return found


def shards_in(value: Any) -> Iterator[Tensor]:
    """The sharded tensors in mappings, lists and tuples, in order."""
    if is_sharded(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from shards_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from shards_in(item)


def replaced(value: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """Replace each sharded tensor in mappings, lists and tuples; a value without any is returned as it is."""
    if is_sharded(value):
        return make(value)
    if next(shards_in(value), None) is None:
        return value
    if isinstance(value, Mapping):
        return versioned({key: replaced(item, make) for key, item in value.items()}, value)
    return type(value)(replaced(item, make) for item in value)


def load_model(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a state dict of the whole model; of tensors that are split, this process takes its shards."""
    own = model.state_dict()
    if next(shards_in(own), None) is not None:
        split = {
            name: shard_like(value, own[name]) if is_sharded(own.get(name)) else value
            for name, value in state.items()
        }
        state = versioned(split, state)
    model.load_state_dict(state, strict=strict)


def split_state(optimizer: Optimizer) -> None:
    """Replace the optimizer's state of sharded parameters by this process's shard of it.

    Raises:
        ValueError: A tensor of the state has another shape than its parameter.
    """
    for each in each_of(optimizer).values():
        for parameter, state in each.state.items():
            if not is_sharded(parameter):
                continue
            for name, value in state.items():
                if not isinstance(value, Tensor) or is_sharded(value) or value.dim() == 0:
                    continue
                if value.shape != parameter.shape:
                    raise ValueError(
                        f"{type(each).__name__} keeps {name!r} of shape {list(value.shape)} for a parameter of "
                        f"shape {list(parameter.shape)}, which strategy 'fsdp' can't split: use strategy 'ddp', "
                        "or an optimizer that keeps tensors of the parameter's shape"
                    )
                state[name] = shard_like(value, parameter)
