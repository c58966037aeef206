"""DataLoaders of data sets, whose workers draw random numbers that depend on (seed, pass, batch) alone."""

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

# Keeps the random streams of workers apart from other uses of the same seed.
_WORKER_STREAM = 0x30AD
# And what they draw for an evaluation apart from what they draw for training.
_EVALUATION_STREAM = 0xE7A1
# How the names of SeededData's own attributes begin, as Python writes them; no data set has such names.
_SEEDED = "_SeededData__"


class Indices(list[int]):
    """Indices of one batch, with the pass and the place of its first sample in that."""

    place: tuple[int, int] = (0, 0)
    #: The pass of training; None where the batch is evaluated.
    epoch: int | None = None
    #: Where the generators stand that the data hold, at the begin of a pass that is evaluated.
    own_seeds: Sequence[int] = ()


class SeededBatches(BatchSampler):
    """Batches of indices that know their place.

    Args:
        sampler: The order of the samples.
        batch_size: Samples a batch.
        drop_last: Leave out a last, smaller batch.
        shard: Which part of each batch is this process's, of several; the others are not loaded.

    Attributes:
        offset: Samples at the beginning of the next pass that are left out.
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
    """A data set whose worker processes seed the generators for each batch that they load, and know its pass.

    Its other attributes are those of the data set, which a ``worker_init_fn`` may ask for and set.

    Args:
        data: The data set.
        seed: The run's seed.
        collate_fn: What makes batches of its samples, which may hold generators too.
    """

    def __init__(self, data: Any, seed: int, collate_fn: Any) -> None:
        self.__data = data
        self.__seed = seed
        self.__collate_fn = collate_fn
        self.__epoch: int | None = None
        self.__own: list[Generator] | None = None  # those of a worker

    def set_epoch(self, epoch: int) -> None:
        """Which pass comes next, for data that ask for it."""
        self.__epoch = epoch
        if hasattr(self.__data, "set_epoch"):
            self.__data.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.__data)

    def __getattr__(self, name: str) -> Any:
        # Unpickling asks before there is a data set; and pickling is not to find how the data set is pickled.
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
            if rows.epoch is not None and rows.epoch != self.__epoch:  # the worker lives on from the pass before
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
        # What is evaluated is the same for all seeds of a run, as it is without workers.
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
    """A DataLoader over a data set, as the options say.

    Without worker processes, and for iterable data, what is drawn while loading comes from generators that each
    pass seeds anew; workers of other data are seeded batch by batch, so that they may live on from pass to pass,
    and a resumed pass need not load what is trained already.

    Raises:
        ValueError: ``persistent_workers`` are asked for of iterable data, which draws its order in them.
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
    """A DataLoader whose workers live on, with others of its own: workers give one pass at a time."""
    if not isinstance(data, DataLoader) or not data.persistent_workers:
        return data
    own = copy(data)
    own._iterator = None  # noqa: SLF001 - the pass that the loader's workers are in
    return own
