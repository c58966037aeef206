"""Checks that ``torch.load(weights_only=True)`` can read back everything in a checkpoint."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.checkpoint.versions import versioned
from trainer.recorded import Metrics

_PLAIN = frozenset(
    {int, float, str, bool, type(None), complex, bytearray, torch.Size, torch.dtype, torch.device, torch.layout}
)
_LEAVES = _PLAIN | {Tensor, nn.Parameter, nn.Buffer}
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_SEQUENCES = frozenset({list, tuple, set})

# A value nested deeper than this contains itself, or is too deep for pickle.
_DEEPEST = 100

_Path = tuple[Any, ...]


class UnreadableError(TypeError):
    """A checkpoint holds something that can be written but not read back."""


def readable(value: Any, path: _Path = ()) -> Any:
    """A checkpoint, or a part of one, in a form that can be read back: NumPy scalars become Python's.

    The content of tensors is not checked, and parts that need no change are not copied.

    Args:
        value: Mappings, lists, tuples and sets of tensors and plain values.
        path: The keys that lead to it.

    Raises:
        UnreadableError: A value is of another type, or nested too deep; the text names the keys that lead to it.
    """
    kind = type(value)
    if kind in _LEAVES:
        return value
    if len(path) > _DEEPEST:
        raise _refusal("is nested too deep, or contains itself", path[:3])
    if kind in _MAPPINGS or kind is Metrics:
        return _readable_mapping(value, path)
    if kind in _SEQUENCES:
        if _LEAVES.issuperset(map(type, value)):  # Python's generator alone has 625 numbers
            return value
        items = [readable(item, (*path, index)) for index, item in enumerate(value)]
        same = all(one is other for one, other in zip(items, value, strict=True))
        return value if same else kind(items)
    if isinstance(value, np.generic) and type(plain := value.item()) in _PLAIN:
        return plain
    # torch.load refuses empty bytes.
    if (kind is bytes and value) or kind in torch.serialization.get_safe_globals():
        return value
    raise _refusal(f"is a {kind.__module__}.{kind.__qualname__}".replace(" builtins.", " "), path)


def _readable_mapping(value: Mapping[Any, Any], path: _Path) -> Any:
    if type(value) is Metrics:
        return dict(value)
    if _LEAVES.issuperset(map(type, value)) and _LEAVES.issuperset(map(type, value.values())):
        return value
    pairs = [(readable(key, (*path, key)), readable(item, (*path, key))) for key, item in value.items()]
    changed = any(
        key is not other or item is not value[other] for (key, item), other in zip(pairs, value, strict=True)
    )
    made: Any = type(value)
    return versioned(made(dict(pairs)), value) if changed else value


def _refusal(what: str, path: _Path) -> UnreadableError:
    owner = (
        f"the state of the callback {path[1]}" if path[:1] == ("callbacks",) and len(path) > 1 else "a checkpoint"
    )
    return UnreadableError(
        f"{_shown(path)} {what}, which can't be read back from a checkpoint: keep tensors and plain values in "
        f"{owner}, such as numbers, texts, lists and dicts of them; an array as torch.from_numpy(array)"
    )


def _shown(path: _Path) -> str:
    """Keys as one path: ``callbacks.EarlyStopping.best[0]``."""
    text = ""
    for key in path:
        dotted = isinstance(key, str)
        text += f".{key}" if dotted and text else key if dotted else f"[{key!r}]"
    return text or "it"
