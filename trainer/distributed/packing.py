"""Packs Python values into byte tensors, which processes send to each other."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    """Moves tensors to the CPU first: otherwise the reader would load them onto the sender's GPU."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return value.detach().cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented


def bytes_of(value: Any) -> Tensor:
    """Pack a value."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def value_of(packed: Tensor) -> Any:
    """Unpack a value; it comes from a process of this run, which is as trusted as this one."""
    return pickle.loads(packed.numpy().tobytes())
