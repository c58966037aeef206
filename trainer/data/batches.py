"""Where batches come from: tensors in memory cut into views, or a DataLoader; both in a resumable order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from trainer.data.loading import SeededBatches, loader_of
from trainer.data.moving import holds_objects, map_tensors, tensors_in, to_device
from trainer.data.options import BatchOptions
from trainer.data.own_generators import kept_generators, own_generators, seed_own, seeds_of
from trainer.data.seeding import derive_seed
from trainer.data.shard import Rows, Shard, check_sharded, is_batches, samplers_of, warn_of_repeats

# Beyond this size a shuffled copy of the data is not made; each batch is gathered on its own.
_COPY_LIMIT = 2**30

# Keeps the generators of data order apart from other uses of the same seed.
_ORDER_STREAM = 0x0DE2


class Batches(Protocol):
    """Batches of one data set, on the device of the run."""

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Batches of the given epoch (from 0), without the first ``skip``, which are drawn before this returns."""
        ...


class TensorBatches:
    """Batches of tensors in memory: one permutation an epoch, then views.

    Args:
        tensors: Tensors of equal first dimension [samples, …]; moved to ``device`` once.
        batch_size: Samples a batch.
        device: Where the batches are to lie.
        shuffle: A new order each epoch, from (seed, epoch).
        drop_last: Leave out a last, smaller batch.
        seed: Seed of the order.
        shard: Which part of each batch is this process's, of several; ``batch_size`` is that of all together.
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
        """Batches of a pass behind its first ``offset`` samples."""
        return batch_count(max(0, self._samples - offset), self._batch_size, drop_last=self._drop_last)

    def epoch(self, epoch: int, skip: int = 0, offset: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """See `Batches.epoch`; the first ``offset`` samples are left out, too."""
        end = min(self._samples, offset + self.remaining(offset) * self._batch_size)
        if offset >= end:
            return iter(())
        if self._shard is not None:
            return self._of_shard(self._shard, self._order(epoch), offset, end, skip)
        if not self._shuffle:
            views = self._views(tuple(tensor[offset:end] for tensor in self._tensors), skip)
            # Copies: a model that changes its inputs in place would change the data.
            return (map_tensors(torch.clone, batch) for batch in views)
        order = self._order(epoch)[offset:end].to(self._tensors[0].device)
        if sum(tensor.nbytes for tensor in self._tensors) > _COPY_LIMIT:
            return self._gathered(order, skip)
        return self._views(tuple(tensor.index_select(0, order) for tensor in self._tensors), skip)

    def _order(self, epoch: int) -> Tensor:
        """Places of the samples in the order of a pass."""
        if not self._shuffle:
            return torch.arange(self._samples)
        generator = torch.Generator().manual_seed(derive_seed(self._seed, _ORDER_STREAM, epoch))
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


def batch_count(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Batches that so many samples make."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


class LoaderBatches:
    """Batches of a DataLoader, moved to the device.

    Its order is made to depend on (seed, epoch) alone: a random sampler without a generator is given one, the
    loader's and the samplers' generators are seeded at each epoch, as are those that the data set, its transforms
    and the collate function hold, and ``set_epoch`` of the samplers and the data set is called where there is such
    a method. An iterable dataset must draw its order from what that says, from a
    generator of its own, or before its first item: the global ones serve the model in between. Persistent workers
    continue the random numbers of the epochs before, which a resumed run has not drawn.

    Args:
        loader: The DataLoader; with a shard it is one of `loader_of`, or shards itself.
        device: Where the batches are to lie.
        seed: Seed of the order.
        shard: Which part of each batch is this process's, of several; of a loader that shards itself which process
            this is.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, *, seed: int = 0, shard: Shard | None = None
    ) -> None:
        self._shard = shard
        self._loader: Any = loader
        self._device = device
        self._seed = seed
        self._iterator: Any = None
        for sampler in samplers_of(self._loader):
            if isinstance(sampler, RandomSampler | WeightedRandomSampler) and sampler.generator is None:
                # Left alone it would draw a seed from the global generator, at its first batch.
                sampler.generator = torch.Generator()

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def cuttable(self) -> bool:
        """Whether a pass can begin behind any sample: not that of iterable data."""
        return isinstance(self._loader.batch_sampler, SeededBatches)

    def remaining(self, offset: int) -> int:
        """Batches of a pass behind its first ``offset`` samples.

        Raises:
            ValueError: The data is iterable.
        """
        seeded = self._loader.batch_sampler
        if not self.cuttable:
            raise ValueError("the batch size of iterable data can't change inside a pass: let it change by passes")
        samples = max(0, len(seeded.sampler) - offset)
        return batch_count(samples, seeded.batch_size, drop_last=seeded.drop_last)

    def epoch(self, epoch: int, skip: int = 0, offset: int = 0) -> Iterator[Any]:
        """See `Batches.epoch`; the first ``offset`` samples are left out, too; iterable data leave out batches."""
        for generator in {id(item): item for item in self._generators()}.values():
            generator.manual_seed(derive_seed(self._seed, _ORDER_STREAM, epoch))
        self._set_epoch(epoch)
        self._seed_own(epoch)
        seeded = self._loader.batch_sampler
        if isinstance(seeded, SeededBatches):
            seeded.offset = offset
            if self._loader.num_workers:  # what is trained already need not be loaded
                seeded.offset, skip = offset + skip * seeded.batch_size, 0
        elif offset:
            skip += offset // (self._loader.batch_size or 1)
        batches = self._iterator = iter(self._loader)
        for _ in range(skip):
            next(batches, None)
        if self._shard is not None and isinstance(seeded, SeededBatches):
            samples: Any = seeded.sampler
            left = len(samples) - seeded.offset - skip * seeded.batch_size
            return self._marked(self._moved(batches), self._shard.rows(left, seeded.batch_size))
        return self._moved(batches)

    def _marked(self, batches: Iterator[Any], rows: Iterator[Rows]) -> Iterator[Any]:
        assert self._shard is not None
        for batch, own in zip(batches, rows, strict=False):
            self._shard.mark(absent=own.absent)
            yield batch

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._device.type == "cuda":
            return _transferred(batches, self._device)
        return batches if self._device.type == "cpu" else (to_device(batch, self._device) for batch in batches)

    def close(self) -> None:
        """End the loader's worker processes, persistent ones too; the next epoch starts new ones."""
        iterator, self._iterator = self._iterator, None
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()  # noqa: SLF001 - else they live as long as the iterator is referenced
            if self._loader._iterator is iterator:  # noqa: SLF001 - which a loader keeps for its next epoch
                self._loader._iterator = None  # noqa: SLF001

    def _set_epoch(self, epoch: int) -> None:
        # A streamed data set draws its order itself.
        for each in (*samplers_of(self._loader), self._loader.dataset):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def _seed_own(self, epoch: int) -> None:
        """Of several processes each draws other numbers for its samples, and all draw the same order."""
        rank = () if self._shard is None or not self._shard.rank else (self._shard.rank,)
        data, own = self._loader.dataset, self._own()
        # Iterable data make the order themselves, of which each process may take every so many.
        holders = () if isinstance(data, IterableDataset) else (data, self._loader.collate_fn)
        of_samples = {id(generator) for generator in own_generators(*holders)}
        seed_own([each for each in own if id(each) in of_samples], self._seed, epoch, *rank)
        seed_own([each for each in own if id(each) not in of_samples], self._seed, _ORDER_STREAM, epoch)

    def _own(self) -> list[Any]:
        """The generators that data set, samplers and collate function hold, but for those of the order."""
        order = {id(generator) for generator in self._generators()}
        holders = (self._loader.dataset, *samplers_of(self._loader), self._loader.collate_fn)
        return [generator for generator in own_generators(*holders) if id(generator) not in order]

    def _generators(self) -> Iterator[torch.Generator]:
        for owner in (self._loader, *samplers_of(self._loader)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                yield generator


class EvaluatedLoader(LoaderBatches):
    """Batches of a DataLoader that is evaluated: its generators are afterwards as they were, and no ``set_epoch``
    is called.

    A pass of training may be drawing from the same generators still, as a RandomSampler with replacement does, and
    from the same data set. A sampler that is evaluated, such as a DistributedSampler, keeps the epoch that it has.
    """

    def epoch(self, epoch: int, skip: int = 0, offset: int = 0) -> Iterator[Any]:
        """See `Batches.epoch`."""
        with kept_generators((*self._generators(), *self._own())):
            yield from super().epoch(epoch, skip, offset)

    def _set_epoch(self, epoch: int) -> None:
        """The epochs are those of training."""

    def _seed_own(self, epoch: int) -> None:  # noqa: ARG002 - what is evaluated is the same in all
        """What is drawn follows from the data's own seed: so it is the same each time, and in all trials.

        Workers learn where the generators stand now: training draws from those that it shares with a validation.
        """
        if isinstance(self._loader.batch_sampler, SeededBatches) and self._loader.num_workers:
            self._loader.batch_sampler.own_seeds = seeds_of(self._own())


def _transferred(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Batches on a GPU, copied there on a stream of their own.

    The next batch is fetched and copied as soon as the loop asks for it; the GPU is then still busy with the batch
    before, whose kernels have only been launched. So the copy runs beside them, and the order of random numbers is
    the same as on a CPU.
    """
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for batch in batches:
        if holds_objects(batch):  # whose tensors can't be marked as below
            yield to_device(batch, device)
            continue
        with torch.cuda.stream(side):
            moved = to_device(batch, device)
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        for tensor in (item for item in tensors_in(moved) if item.is_cuda):
            tensor.record_stream(current)  # its memory is not to be used again before the step is done with it
        yield moved


def make_batches(
    data: Batches | DataLoader[Any] | Dataset[Any] | tuple[Tensor, ...],
    options: BatchOptions,
    device: torch.device,
    *,
    train: bool,
    seed: int = 0,
    shard: Shard | None = None,
) -> Batches:
    """Batches of the data that a person gives.

    Args:
        data: A TensorDataset or a tuple of tensors (kept in memory on the device), any other Dataset (iterable
            too; goes through a DataLoader) or object with items by number, such as a `datasets.Dataset`, a ready
            DataLoader (its own batching stays), or Batches as they are.
        options: How to batch what is not batched yet.
        device: Where the batches are to lie.
        train: Whether to shuffle and drop as the options say; otherwise every sample, in order.
        seed: Seed of the training order.
        shard: Which part of each batch is this process's, of several.

    Raises:
        TypeError: ``data`` is none of these.
        ValueError: The data set is empty, or comes in batches of its own, or without places, that would be the
            same in each of several processes.
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
    if isinstance(data, Sized) and not len(data):
        raise ValueError(f"the data set is empty: there is nothing to {'train on' if train else 'evaluate'}")
    # The exact type: a subclass may change what an item is.
    if type(data) is TensorDataset and options.collate_fn is None:
        return _tensor_batches(data, options, device, train=train, seed=seed, shard=shard)
    loader = loader_of(data, options, device, train=train, seed=seed, shard=shard)
    return kind(loader, device, seed=seed, shard=shard)


def has_items(data: Any) -> bool:
    """Whether data has items by number, as a Dataset has; other libraries' data sets are no class of torch's."""
    other = isinstance(data, Mapping | Tensor | str | bytes | list | tuple | np.ndarray)
    return not other and all(hasattr(type(data), name) for name in ("__getitem__", "__len__"))


def _with_items(data: Any) -> Any:
    """Data that are no Dataset of torch's; those of Hugging Face may hold lists, which a DataLoader transposes."""
    if not has_items(data):
        raise TypeError(f"no batches can be made of {type(data).__name__}: hand over a Dataset or a DataLoader")
    form = getattr(data, "format", None)
    if hasattr(data, "with_format") and isinstance(form, Mapping) and form.get("type") is None:
        raise TypeError('its items hold lists and no tensors: hand over `dataset.with_format("torch")`')
    return data


def refuse_shuffled(data: Any) -> None:
    """Refuse a DataLoader that draws its samples, where the order of what comes of them means something.

    Raises:
        ValueError: It does.
    """
    if not isinstance(data, DataLoader):
        return
    for sampler in samplers_of(data):
        drawn = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
        if drawn or getattr(sampler, "shuffle", False) is True:  # as that of a DistributedSampler
            raise ValueError(
                f"the DataLoader takes samples in the random order of its {type(sampler).__name__}, so "
                "predictions could not be matched to the data: hand over `loader.dataset`, or a DataLoader with "
                "shuffle=False"
            )


def close_batches(batches: Any) -> None:
    """Free what batches hold, if they have a ``close``."""
    close = getattr(batches, "close", None)
    if callable(close):
        close()


def is_batched(data: Any) -> bool:
    """Whether data comes in batches of its own, which no batch size changes."""
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


def pass_length(batches: Batches) -> int | None:
    """Batches of one pass; None where the data does not know."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
