"""Examines what a data function returns: the sets, what a batch is, the number of classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate, default_convert

from hpo.errors import InputError
from trainer.data.batches import has_items

#: How a study's sets are made of the function's result: used as they are, named, or split.
Making = Literal["ready", "pair", "split", "arrays"]

_BATCH: Final = 8
#: How many samples are read to count classes, if the targets are not in one tensor.
_LOOKED_AT: Final = 2000
_FIX: Final = (
    "return a mapping {'train': dataset, 'val': dataset}, a pair (train, val), one Dataset, or "
    "a pair of arrays (x, y)"
)


@dataclass(frozen=True)
class Look:
    """The properties of the training data.

    Attributes:
        making: How the study's sets are made of the function's result.
        sets: How many sets a pair has: 2, or 3 with a test set.
        loaders: Whether they are DataLoaders, which have their own batch size.
        samples: The number of training samples; None if not known.
        inputs: The inputs of a few samples, as a batch; None if a batch is not (inputs, targets).
        targets: Their targets.
        classes: The number of classes of whole-number targets; None for others.
        tokens: The largest whole number among the inputs plus one; None for others.
        counted: The number of samples in which classes and tokens were counted.
        binary: Whether all targets are 0 or 1.
        batch: A description of a batch that is not (inputs, targets).
    """

    making: Making
    sets: int
    loaders: bool
    samples: int | None
    inputs: Any = None
    targets: Any = None
    classes: int | None = None
    tokens: int | None = None
    counted: int = 0
    binary: bool = False
    batch: str = ""


def look_at(made: object, target: str) -> Look:
    """Examine the result of a data function, or an object of a data set's class.

    Raises:
        InputError: No training data can be made of it.
    """
    making, sets = _making(made)
    if making is None:
        raise InputError(
            f"`{target}` returned {_described(made)}, which is no data to train with",
            path="--data",
            value=target,
            fix=_FIX,
        )
    try:
        train = _train(made, making)
        batch = _batch(train) if _is_data(train) else None
    except Exception as error:
        problem = f"no batch can be made of what `{target}` returned: {type(error).__name__}: {error}"
        fix = "return data with samples, each of them tensors, arrays or numbers of one shape"
        raise InputError(problem, path="--data", value=target, fix=fix) from error
    if not _is_data(train):
        problem = f"the training set of `{target}` is {_described(train)}, and no Dataset"
        fix = "make it a torch.utils.data.Dataset, with `__len__` and `__getitem__`"
        raise InputError(problem, path="--data", value=target, fix=fix)
    loaders = isinstance(train, DataLoader)
    look = Look(making, sets, loaders, None if loaders else _length(train))
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        return replace(look, batch=_described(batch))
    inputs, targets = batch
    every = _every_target(train)
    if every is None and isinstance(targets, Tensor) and not targets.is_floating_point():
        every = targets
    counted = len(every) if isinstance(every, Tensor) else 0
    return replace(
        look,
        inputs=inputs,
        targets=targets,
        classes=_classes(every),
        tokens=_tokens(train, inputs),
        counted=counted,
        binary=_binary(every),
    )


def _making(made: object) -> tuple[Making | None, int]:
    if isinstance(made, Mapping):
        return ("ready" if {"train", "val"} <= made.keys() else None), 0
    if (isinstance(made, Dataset) or has_items(made)) and not isinstance(made, IterableDataset):
        return "split", 0
    if isinstance(made, tuple | list) and len(made) in (2, 3):
        if all(map(_is_data, made)):
            return "pair", len(made)
        if len(made) == 2 and all(isinstance(item, Tensor | np.ndarray) for item in made):
            return "arrays", 0
    return None, 0


def _is_data(made: object) -> bool:
    return isinstance(made, Dataset | DataLoader) or has_items(made)


def _train(made: Any, making: Making) -> Any:
    if making == "ready":
        return made["train"]
    if making == "pair":
        return made[0]
    return as_tensors(*made) if making == "arrays" else made


def as_tensors(x: Any, y: Any) -> TensorDataset:
    """A data set of arrays, made as the drafted module makes it, see `hpo.draft.parts`."""
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    x = x.float() if x.is_floating_point() else x
    return TensorDataset(x, y.float() if y.is_floating_point() else y.long())


def _length(train: Any) -> int | None:
    try:
        return len(train)
    except TypeError:
        return None


def _batch(train: Any) -> Any:
    if isinstance(train, DataLoader):
        return next(iter(train))
    count = _length(train)
    if isinstance(train, IterableDataset) or count is None:
        return default_collate(list(islice(iter(train), _BATCH)))
    return default_collate([train[at] for at in range(min(_BATCH, count))])


def _every_target(train: Any) -> Tensor | None:
    """All targets, or those of a sample, as one tensor; None if they can't be one."""
    if (tensors := _tensors(train)) is not None:
        return tensors[1]
    data = train.dataset if isinstance(train, DataLoader) else train
    try:
        if _collates(train):
            return _of_batches(train)
        given = getattr(data, "targets", getattr(data, "labels", None))
        if given is not None and not callable(given):
            return torch.as_tensor(given)
        count = _length(data)
        items = islice(iter(data), _LOOKED_AT) if count is None else (data[at] for at in _spread(count))
        return torch.stack([torch.as_tensor(target) for _, target in items])
    except Exception:  # noqa: BLE001 - a sample's code may raise anything; `hpo check` tries the data out
        return None


def _of_batches(loader: Any) -> Tensor:
    found, count = [], 0
    for _, targets in loader:
        found.append(torch.as_tensor(targets))
        count += len(found[-1])
        if count >= _LOOKED_AT:
            break
    return torch.cat(found)


def _collates(train: Any) -> bool:
    """Whether this is a loader with its own `collate_fn`, so that its data set does not show what a batch is."""
    return isinstance(train, DataLoader) and train.collate_fn not in (default_collate, default_convert)


def _tensors(train: Any) -> tuple[Tensor, ...] | None:
    """All inputs and all targets, if each is one tensor; else None."""
    data = train.dataset if isinstance(train, DataLoader) else train
    return data.tensors if isinstance(data, TensorDataset) and not _collates(train) else None


def _spread(count: int) -> Sequence[int]:
    """Positions spread over a whole data set, which may be sorted by class."""
    return range(0, count, max(1, -(-count // _LOOKED_AT)))


def _classes(targets: Tensor | None) -> int | None:
    if targets is None or targets.is_floating_point() or not targets.numel():
        return None
    return int(targets.max()) + 1


def _binary(targets: Tensor | None) -> bool:
    return targets is not None and bool(((targets == 0) | (targets == 1)).all())


def _tokens(train: Any, inputs: Any) -> int | None:
    if not isinstance(inputs, Tensor) or inputs.is_floating_point():
        return None
    tensors = _tensors(train)
    every = inputs if tensors is None else tensors[0]
    return int(every.max()) + 1


def _described(made: object) -> str:
    if isinstance(made, Mapping):
        return f"a mapping with {', '.join(map(str, made)) or 'nothing in it'}"
    if isinstance(made, tuple | list):
        return f"a {type(made).__name__} of {len(made)}: {', '.join(type(item).__name__ for item in made)}"
    return "nothing" if made is None else f"an object of type {type(made).__name__}"


def is_data_class(found: Callable[..., Any]) -> bool:
    """Whether a target is a data set's class."""
    return inspect.isclass(found) and issubclass(found, Dataset)
