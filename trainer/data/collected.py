"""Collected: keeps tensors of each batch and joins them at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.data.moving import map_tensors, tensors_in


class Collected:
    """Keeps tensors, or tuples, lists and mappings of tensors, of shape [samples, …].

    Args:
        take: Makes what is kept from a detached tensor.
    """

    def __init__(self, take: Callable[[Tensor], Tensor]) -> None:
        self._take = take
        self._shape: Any = None
        self._kept: list[list[Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def add(self, value: Any) -> None:
        """Keep the tensors of the next batch; a tensor without dimensions counts as one sample."""
        leaves = [self._take(tensor.detach()) for tensor in tensors_in(value)]
        if not self._kept:
            self._shape = map_tensors(lambda tensor: tensor.new_empty(0), value)
            self._kept = [[] for _ in leaves]
        for kept, tensor in zip(self._kept, leaves, strict=True):
            kept.append(tensor if tensor.dim() else tensor.reshape(1))

    def joined(self, what: str) -> Any:
        """The tensors of all batches, joined along the first dimension.

        Args:
            what: What the error text calls the owner of the tensors.

        Raises:
            ValueError: The batches differ in another dimension.
        """
        try:
            whole = iter([torch.cat(kept) for kept in self._kept])
        except RuntimeError as error:
            raise ValueError(
                f"{what} can't join its batches: {error}; let the step return outputs that differ in their first "
                "dimension only"
            ) from error
        return map_tensors(lambda _: next(whole), self._shape)
