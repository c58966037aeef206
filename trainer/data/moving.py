"""Finds the tensors in a batch, replaces them, or moves them to another device."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on ``device``, and every object that has a method ``to``."""

    def moved(item: Any) -> Any:
        if isinstance(item, Tensor | PackedSequence):
            return item.to(device, non_blocking=True)  # type: ignore[arg-type]
        there = item.to(device)
        return item if there is None else there

    return map_batch(moved, batch, _moves_itself)


def _moves_itself(item: Any) -> bool:
    """Whether an item of a batch is moved as a whole, by its method ``to``."""
    if isinstance(item, PackedSequence):  # its own ``to`` keeps its lengths on the CPU
        return True
    looked_through = isinstance(item, dict | UserDict | list | tuple | Tensor | type)
    return not looked_through and callable(getattr(item, "to", None))


def holds_objects(batch: Any) -> bool:
    """Whether a batch holds objects with their own ``to``, whose tensors `tensors_in` does not find."""
    if _moves_itself(batch):
        return not isinstance(batch, PackedSequence)
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return any(not isinstance(item, Tensor) and holds_objects(item) for item in items)


def map_batch(function: Callable[[Any], Any], batch: Any, whole: Callable[[Any], bool] | None = None) -> Any:
    """The batch with each tensor replaced, also in tuples, lists and mappings, which keep their class.

    Args:
        function: Returns the replacement of a tensor.
        batch: The batch.
        whole: Tells which other items are passed to the function.
    """
    if isinstance(batch, Tensor) or (whole is not None and whole(batch)):
        return function(batch)
    if isinstance(batch, Mapping):
        return _of_kind(batch, {key: map_batch(function, value, whole) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        return _sequence_of(batch, (map_batch(function, item, whole) for item in batch))
    return batch


def map_tensors(function: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with each tensor replaced, also in tuples, lists and mappings; mappings become dicts."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return _sequence_of(batch, (map_tensors(function, item) for item in batch))
    return batch


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The tensors in a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
        return
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    for item in items:
        yield from tensors_in(item)


def _of_kind(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same class and attributes with these values; a dict if such a mapping can't be made."""
    if type(mapping) is dict:
        return values
    try:
        if not isinstance(mapping, dict | UserDict):  # a shallow copy might share its storage
            return type(mapping)(values)  # type: ignore[call-arg]
        made = copy(mapping)
        made.update(values)
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return values
    return made


def _sequence_of(batch: Any, items: Iterator[Any]) -> Any:
    """A list or tuple of the same class as ``batch`` with these items."""
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
