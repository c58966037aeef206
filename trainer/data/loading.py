"""Makes DataLoaders whose workers draw random numbers that depend only on (seed, pass, batch)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from trainer.data.options import BatchOptions
from trainer.data.own_generators import Generator, own_generators, seed_own
from trainer.data.random_state import seed_all
from trainer.data.seeding import derive_seed
from trainer.data.shard import Shard

# Separates the seeds of workers from other uses of the same seed.
_WORKER_STREAM = 0x30AD
# Separates the seeds of workers in an evaluation from those in training.
_EVALUATION_STREAM = 0xE7A1
# The prefix of SeededData's own attributes, whose names Python mangles; no data set has such names.
_SEEDED = "_SeededData__"


class Indices(list[int]):
    """The indices of one batch, with what a worker needs to seed its generators."""

    #: The pass, and the index of the batch's first sample in it.
    place: tuple[int, int] = (0, 0)
    #: The training pass; None if the batch is evaluated.
    epoch: int | None = None
    #: For a batch that is evaluated: a seed from each of the data's own generators at the start of the pass.
    own_seeds: Sequence[int] = ()


class SeededBatches(BatchSampler):
    """Gives batches of indices with their position in the pass (`Indices`).

    Args:
        sampler: The order of the samples.
        batch_size: Samples per batch.
        drop_last: Whether to leave out a last, smaller batch.
        shard: With several processes, this process's part of each batch; the rest is not loaded.

    Attributes:
        offset: How many samples to leave out at the beginning of the next pass.
        own_seeds: See `Indices`.
    """

    def __init__(self, sampler: Sampler[int], batch_size: int, *, drop_last: bool, shard: Shard | None) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self._shard = shard
        self.offset = 0
        self.own_seeds: Sequence[int] = ()
        self._epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Which pass comes next."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order, start = islice(self.sampler, self.offset, None), self.offset
        while rows := Indices(islice(order, self.batch_size)):
            if self.drop_last and len(rows) < self.batch_size:
                return
            own, first, start = rows, start, start + len(rows)
            if self._shard is not None:
                span = self._shard.of_batch(0, len(rows))
                own, first = Indices(rows[span.start : span.stop]), first + span.start
            own.place, own.epoch, own.own_seeds = (self._epoch or 0, first), self._epoch, self.own_seeds
            yield own


class SeededData(Dataset[Any]):
    """Wraps a data set so that worker processes seed the generators for each batch, and call its ``set_epoch``.

    All other attributes are read from and set on the data set itself, for example by a ``worker_init_fn``.

    Args:
        data: The data set.
        seed: The run's seed.
        collate_fn: The collate function, which may hold generators too.
    """

    def __init__(self, data: Any, seed: int, collate_fn: Any) -> None:
        self.__data = data
        self.__seed = seed
        self.__collate_fn = collate_fn
        self.__epoch: int | None = None
        self.__own: list[Generator] | None = None  # the data's own generators, found in each worker

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the next pass to the data set, if it has ``set_epoch``."""
        self.__epoch = epoch
        if hasattr(self.__data, "set_epoch"):
            self.__data.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.__data)

    def __getattr__(self, name: str) -> Any:
        # Unpickling asks before the data set is set, and pickling must not find the data set's own pickle methods.
        if name.startswith((_SEEDED, "__")):
            raise AttributeError(name)
        return getattr(self.__data, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(_SEEDED):
            super().__setattr__(name, value)
        else:
            setattr(self.__data, name, value)

    def __getitems__(self, rows: Indices) -> list[Any]:
        """The samples of a batch; torch's fetcher prefers this method."""
        if get_worker_info() is not None:
            if rows.epoch is not None and rows.epoch != self.__epoch:  # the worker persists from an earlier pass
                self.set_epoch(rows.epoch)
            stream = _EVALUATION_STREAM if rows.epoch is None else _WORKER_STREAM
            seed_all(derive_seed(self.__seed, stream, *rows.place))
            self._seed_own(rows)
        together = getattr(self.__data, "__getitems__", None)
        samples: list[Any] = [self.__data[row] for row in rows] if together is None else together(rows)
        return samples

    def _seed_own(self, rows: Indices) -> None:
        if self.__own is None:
            self.__own = own_generators(self.__data, self.__collate_fn)
        # An evaluation does not depend on the run's seed, as without workers.
        seed_own(self.__own, *([self.__seed] if rows.epoch is not None else rows.own_seeds), *rows.place)


def loader_of(
    data: Dataset[Any],
    options: BatchOptions,
    device: torch.device,
    *,
    train: bool,
    seed: int,
    shard: Shard | None,
) -> DataLoader[Any]:
    """A DataLoader over a data set with these options.

    Without worker processes, and for iterable data, each pass seeds the generators that loading draws from. For
    other data, workers seed them for each batch, so that they may persist from pass to pass, and a resumed pass
    need not load the batches that are already trained.

    Raises:
        ValueError: ``persistent_workers`` is set for iterable data, which draws its order in the workers.
    """
    size = options.batch_size if train else options.eval_batch_size
    how: dict[str, Any] = {
        "num_workers": options.num_workers,
        "pin_memory": device.type == "cuda" if options.pin_memory is None else options.pin_memory,
        "collate_fn": options.collate_fn,
        "generator": torch.Generator(),
        "persistent_workers": options.persistent_workers,
        "prefetch_factor": options.prefetch_factor,
        "timeout": options.timeout,
        "worker_init_fn": options.worker_init_fn,
        "multiprocessing_context": options.multiprocessing_context,
    }
    drop_last, shuffle = train and options.drop_last, train and options.shuffle
    if isinstance(data, IterableDataset):
        if options.persistent_workers:
            raise ValueError(
                "persistent_workers can't be used with an iterable data set: its workers would continue the "
                "random numbers of the passes before, which a resumed run has not drawn; leave it out"
            )
        return DataLoader(data, size, drop_last=drop_last, **how)
    samples: Any = data
    order = RandomSampler(samples, generator=torch.Generator()) if shuffle else SequentialSampler(samples)
    batches = SeededBatches(order, size, drop_last=drop_last, shard=shard)
    return DataLoader(SeededData(data, seed, options.collate_fn), batch_sampler=batches, **how)


def with_own_workers(data: Any) -> Any:
    """A copy with its own workers of a DataLoader with persistent workers, as these serve only one pass at a time.

    Any other data is returned as it is.
    """
    if not isinstance(data, DataLoader) or not data.persistent_workers:
        return data
    own = copy(data)
    own._iterator = None  # noqa: SLF001 - the pass that the loader's workers are in
    return own
