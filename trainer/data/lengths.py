"""Counts the samples in a batch, by which its loss and metrics are weighted if the step gives no weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_PLAIN = (str, bytes, int, float, complex, type(None))


def samples_in(batch: Any) -> int:
    """The number of samples in a batch.

    Raises:
        ValueError: It can't be determined.
    """
    length = known_samples(batch)
    if length is None:
        raise ValueError(
            f"a batch is a {type(batch).__name__} that does not say how many samples it holds, and its loss "
            "and metrics count by that: let the step return 'weight', the number of samples (tokens, nodes) that "
            "its loss is the mean of; or let batches be (inputs, targets) with targets that are a tensor"
        )
    return length


def batch_length(batch: Any) -> int:
    """The number of samples in a batch; 1 if it can't be determined."""
    length = known_samples(batch)
    return 1 if length is None else length


def known_samples(batch: Any) -> int | None:
    """The number of samples in a batch; None if it can't be determined.

    It is the first dimension of a leading tensor, or else of a pair's targets. Otherwise it is the first dimension
    of all tensors, if they agree, or the length of lists of samples, such as images of different sizes. A batch
    that is a single value, such as a number, counts as one sample.
    """
    kind = type(batch)
    if (kind is tuple or kind is list) and batch and isinstance(first := batch[0], Tensor) and first.dim():
        return first.shape[0]  # the usual case
    if isinstance(batch, _PLAIN):
        return 1
    if _is_array(batch):
        own = _own_length(batch)
        return 1 if own is None else own
    if isinstance(batch, Mapping):
        for value in batch.values():
            if isinstance(value, Tensor) and value.dim():
                return value.shape[0]
        return _by_elements(batch, tuple(batch.values()))
    if isinstance(batch, list | tuple):
        return _of_sequence(batch)
    return _by_agreement(tuple(attributes_of(batch)))


def _of_sequence(batch: Sequence[Any]) -> int | None:
    if not batch:
        return 1
    if isinstance(batch[0], Tensor) and batch[0].dim():
        return batch[0].shape[0]
    if len(batch) == 2 and (of_targets := _own_length(batch[1])) is not None:
        return of_targets
    if all(isinstance(element, _PLAIN) for element in batch):
        return len(batch) if isinstance(batch, list) else 1
    return _by_elements(batch, batch)


def _by_elements(batch: Any, elements: Sequence[Any]) -> int | None:
    """The number of samples by the elements of a batch, none of which is known to be of shape [samples, …]."""
    lists = [element for element in elements if isinstance(element, list | tuple) and not _is_array(element)]
    for element in lists:
        # A list of strings or numbers can only be one of samples.
        if element and all(isinstance(item, _PLAIN) for item in element):
            return len(element)
    entries = {len(element) for element in lists} if len(lists) == len(elements) else set()
    # Such as images, and a mapping with the boxes of each.
    one_by_one = len(lists) > 1 and all(isinstance(item, Mapping) for item in lists[-1])
    if len(entries) == 1 and one_by_one and all(isinstance(item, Tensor) for item in lists[0]):
        return entries.pop()
    if (common := _by_agreement(elements)) is not None:
        return common
    if isinstance(batch, list) and all(isinstance(element, Mapping) for element in elements):
        return len(batch)
    if len(entries) == 1 and all(map(_are_samples, lists)):
        return entries.pop()
    # The first array of each element: there may be a hidden state, a mask or a number beside inputs and targets.
    if (common := _by_agreement([next(_arrays(element), None) for element in elements])) is not None:
        return common
    if len(entries) == 1:
        return entries.pop()
    telling = (element for element in elements if isinstance(element, Mapping) or _is_array(element))
    return next((length for element in telling if (length := known_samples(element)) is not None), None)


def _are_samples(items: Sequence[Any]) -> bool:
    """Whether arrays may be samples of one kind: sequences of different lengths, or images of different sizes."""
    shapes = [tuple(item.shape) for item in items if isinstance(item, Tensor | np.ndarray)]
    alike = len({len(shape) for shape in shapes}) == 1
    kinds = min(len({shape[:1] for shape in shapes}), len({shape[1:] for shape in shapes}))
    return len(shapes) == len(items) and alike and kinds == 1


def _by_agreement(elements: Sequence[Any]) -> int | None:
    """The first dimension of all tensors; None if they differ."""
    lengths = {_own_length(array) for element in elements for array in _arrays(element)}
    return lengths.pop() if len(lengths) == 1 else None


def _arrays(element: Any) -> Iterator[Any]:
    if _is_array(element):
        yield element
    elif isinstance(element, Mapping | list | tuple):
        for item in element.values() if isinstance(element, Mapping) else element:
            yield from _arrays(item)


def _is_array(item: Any) -> bool:
    return isinstance(item, Tensor | PackedSequence | np.ndarray)


def _own_length(item: Any) -> int | None:
    if isinstance(item, PackedSequence):  # its data has the steps of all sequences; its batch sizes are on the CPU
        return int(item.batch_sizes[0])
    return int(item.shape[0]) if _is_array(item) and item.ndim else None


def attributes_of(batch: Any) -> Iterator[Any]:
    """The attributes of an object that is no list, tuple or mapping, such as a dataclass."""
    if is_dataclass(batch):
        yield from (getattr(batch, field.name) for field in fields(batch))
    else:
        yield from getattr(batch, "__dict__", {}).values()
