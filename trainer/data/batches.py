"""Makes batches in a resumable order, from tensors in memory or from a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from trainer.data.loader_batches import EvaluatedLoader, LoaderBatches
from trainer.data.loading import loader_of
from trainer.data.moving import map_tensors
from trainer.data.options import BatchOptions, batch_count
from trainer.data.seeding import ORDER_STREAM, derive_seed
from trainer.data.shard import Shard, check_sharded, is_batches, samplers_of, warn_of_repeats

# Data of more bytes than this are not copied in shuffled order; each batch is gathered on its own instead.
_COPY_LIMIT = 2**30


class Batches(Protocol):
    """Batches of one data set, on the device of the run."""

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """The batches of a pass (from 0) without the first ``skip``, which are drawn before this returns."""
        ...


class TensorBatches:
    """Batches of tensors in memory: views of a copy that is permuted once per pass.

    Args:
        tensors: Tensors of equal first dimension [samples, …]; moved to ``device`` once.
        batch_size: Samples per batch, of all processes together.
        device: The device of the batches.
        shuffle: Whether each pass has a new order, from (seed, pass).
        drop_last: Whether to leave out a last, smaller batch.
        seed: Seed of the order.
        shard: With several processes, this process's part of each batch.
    """

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        batch_size: int,
        device: torch.device,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        shard: Shard | None = None,
    ) -> None:
        self._shard = shard
        self._tensors = tuple(tensor.to(device) for tensor in tensors)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._samples = len(tensors[0])
        self._drop_last = drop_last

    def __len__(self) -> int:
        return self.remaining(0)

    def remaining(self, offset: int) -> int:
        """The number of batches of a pass after its first ``offset`` samples."""
        return batch_count(max(0, self._samples - offset), self._batch_size, drop_last=self._drop_last)

    def epoch(self, epoch: int, skip: int = 0, offset: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """See `Batches.epoch`; the first ``offset`` samples are left out too."""
        end = min(self._samples, offset + self.remaining(offset) * self._batch_size)
        if offset >= end:
            return iter(())
        if self._shard is not None:
            return self._of_shard(self._shard, self._order(epoch), offset, end, skip)
        if not self._shuffle:
            views = self._views(tuple(tensor[offset:end] for tensor in self._tensors), skip)
            # Copies, as a model that changes its inputs in place would change the data.
            return (map_tensors(torch.clone, batch) for batch in views)
        order = self._order(epoch)[offset:end].to(self._tensors[0].device)
        if sum(tensor.nbytes for tensor in self._tensors) > _COPY_LIMIT:
            return self._gathered(order, skip)
        return self._views(tuple(tensor.index_select(0, order) for tensor in self._tensors), skip)

    def _order(self, epoch: int) -> Tensor:
        """The indices of the samples in the order of a pass."""
        if not self._shuffle:
            return torch.arange(self._samples)
        generator = torch.Generator().manual_seed(derive_seed(self._seed, ORDER_STREAM, epoch))
        return torch.randperm(self._samples, generator=generator)

    def _of_shard(
        self, shard: Shard, order: Tensor, offset: int, end: int, skip: int
    ) -> Iterator[tuple[Tensor, ...]]:
        device = self._tensors[0].device
        for rows in islice(shard.rows(end - offset, self._batch_size), skip, None):
            own = order[offset + rows.start : offset + rows.stop].to(device)
            shard.mark(absent=rows.absent)
            yield tuple(tensor.index_select(0, own) for tensor in self._tensors)

    def _views(self, tensors: tuple[Tensor, ...], skip: int) -> Iterator[tuple[Tensor, ...]]:
        batches = zip(*(torch.split(tensor, self._batch_size) for tensor in tensors), strict=True)
        return islice(batches, skip, None)

    def _gathered(self, order: Tensor, skip: int) -> Iterator[tuple[Tensor, ...]]:
        for rows in torch.split(order, self._batch_size)[skip:]:
            yield tuple(tensor.index_select(0, rows) for tensor in self._tensors)


def make_batches(
    data: Batches | DataLoader[Any] | Dataset[Any] | tuple[Tensor, ...],
    options: BatchOptions,
    device: torch.device,
    *,
    train: bool,
    seed: int = 0,
    shard: Shard | None = None,
) -> Batches:
    """Batches of the data that the user gives.

    Args:
        data: A TensorDataset or a tuple of tensors (kept in memory on the device), any other Dataset (iterable
            too; goes through a DataLoader) or object with items by number, such as a `datasets.Dataset`, a ready
            DataLoader (which keeps its batching), or Batches, returned as they are.
        options: How to batch data that is not batched yet.
        device: The device of the batches.
        train: Whether to shuffle and drop as the options say; otherwise the batches have every sample, in order.
        seed: Seed of the training order.
        shard: With several processes, this process's part of each batch.

    Raises:
        TypeError: ``data`` is none of these.
        ValueError: The data set is empty, or would give several processes the same batches.
    """
    if shard is not None:
        check_sharded(data, shard)
    kind = LoaderBatches if train else EvaluatedLoader
    if isinstance(data, DataLoader):
        if shard is not None and not train:
            warn_of_repeats(data)
        return kind(data, device, seed=seed, shard=shard)
    if is_batches(data):
        return data  # type: ignore[return-value]
    if isinstance(data, tuple) and data and all(isinstance(item, Tensor) for item in data):
        data = TensorDataset(*data)
    data = data if isinstance(data, Dataset) else _with_items(data)
    if known_length(data) == 0:
        raise ValueError(f"the data set is empty: there is nothing to {'train on' if train else 'evaluate'}")
    # The exact type: a subclass may change what an item is.
    if type(data) is TensorDataset and options.collate_fn is None:
        return _tensor_batches(data, options, device, train=train, seed=seed, shard=shard)
    loader = loader_of(data, options, device, train=train, seed=seed, shard=shard)
    return kind(loader, device, seed=seed, shard=shard)


def has_items(data: Any) -> bool:
    """Whether data has items by number, as a Dataset has; for other libraries' data sets, not of torch's class."""
    other = isinstance(data, Mapping | Tensor | str | bytes | list | tuple | np.ndarray)
    return not other and all(hasattr(type(data), name) for name in ("__getitem__", "__len__"))


def _with_items(data: Any) -> Any:
    """Check data that is no torch Dataset; that of Hugging Face may hold lists, which a DataLoader transposes."""
    if not has_items(data):
        raise TypeError(f"no batches can be made of {type(data).__name__}: hand over a Dataset or a DataLoader")
    form = getattr(data, "format", None)
    if hasattr(data, "with_format") and isinstance(form, Mapping) and form.get("type") is None:
        raise TypeError('its items hold lists and no tensors: hand over `dataset.with_format("torch")`')
    return data


def refuse_shuffled(data: Any) -> None:
    """Refuse a DataLoader with a random order, for results that must match the order of the data.

    Raises:
        ValueError: The DataLoader has a random order.
    """
    if not isinstance(data, DataLoader):
        return
    for sampler in samplers_of(data):
        drawn = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
        if drawn or getattr(sampler, "shuffle", False) is True:  # a DistributedSampler has ``shuffle``
            raise ValueError(
                f"the DataLoader takes samples in the random order of its {type(sampler).__name__}, so "
                "predictions could not be matched to the data: hand over `loader.dataset`, or a DataLoader with "
                "shuffle=False"
            )


def close_batches(batches: Any) -> None:
    """Free the resources of batches that have a ``close``."""
    close = getattr(batches, "close", None)
    if callable(close):
        close()


def is_batched(data: Any) -> bool:
    """Whether data comes in batches of its own, so that ``batch_size`` has no effect."""
    return isinstance(data, DataLoader) or is_batches(data)


def _tensor_batches(
    data: TensorDataset,
    options: BatchOptions,
    device: torch.device,
    *,
    train: bool,
    seed: int,
    shard: Shard | None,
) -> TensorBatches:
    if train:
        return TensorBatches(
            data.tensors,
            options.batch_size,
            device,
            shuffle=options.shuffle,
            drop_last=options.drop_last,
            seed=seed,
            shard=shard,
        )
    return TensorBatches(data.tensors, options.eval_batch_size, device, shard=shard)


def known_length(data: Any) -> int | None:
    """The length of data or batches; None if they have none, as torch's ChainDataset of iterable data."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
