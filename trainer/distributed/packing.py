"""Values as bytes, in which processes hand them to each other."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    """Takes tensors from the host: one that lies on this process's GPU would come there again where it is read."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return value.detach().cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented


def bytes_of(value: Any) -> Tensor:
    """A value as bytes."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def value_of(packed: Tensor) -> Any:
    """The value again; from a process of this run, which is trusted as this one is."""
    return pickle.loads(packed.numpy().tobytes())
