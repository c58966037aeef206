"""Shard: which rows of each batch are those of one process of several."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sized
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from trainer.state import TrainState

logger = logging.getLogger(__name__)


class Rows(NamedTuple):
    """Rows of one batch in a pass.

    Attributes:
        start: The first one's place among the rows of the pass.
        stop: The place after the last one's.
        absent: Whether the batch has fewer rows than there are processes, and none for this one. The rows are then
            those of rank 0, to compute with but not to count.
    """

    start: int
    stop: int
    absent: bool


class Shard:
    """The part of each batch that one process of several works on.

    The rows of a batch are dealt in order, and the first processes get one more where they do not come out even.

    Args:
        rank: Number of the process.
        size: Number of processes.
        state: ``state.absent`` is kept up for the batch that is handed out.
    """

    def __init__(self, rank: int, size: int, state: TrainState) -> None:
        self.rank = rank
        self.size = size
        self._state = state

    def rows(self, samples: int, batch_size: int) -> Iterator[Rows]:
        """This process's rows of each batch of so many samples.

        Args:
            samples: Samples of the pass, or of what is left of it.
            batch_size: Samples a batch, of all processes together.
        """
        for first in range(0, samples, batch_size):
            yield self.of_batch(first, min(batch_size, samples - first))

    def of_batch(self, first: int, length: int) -> Rows:
        """This process's rows of one batch of ``length`` rows, of which the first is at ``first``."""
        start, stop = dealt(length, self.rank, self.size)
        absent = start == stop
        if absent:
            start, stop = dealt(length, 0, self.size)
        return Rows(first + start, first + stop, absent)

    @property
    def absent(self) -> bool:
        """Whether the batch that was handed out is another process's."""
        return self._state.absent

    def mark(self, *, absent: bool) -> None:
        """Say of the batch that is handed out whether it is another process's."""
        self._state.absent = absent


def dealt(length: int, rank: int, size: int) -> tuple[int, int]:
    """Start and stop of the rows, out of ``length``, that the process of a rank gets of ``size`` processes."""
    each, more = divmod(length, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def check_sharded(data: Any, shard: Shard) -> None:
    """Refuse data of which each process would get the same batches.

    What has places is dealt by them. A ready DataLoader has to have a `DistributedSampler`. Other data say by an
    attribute ``sharded = True`` that each process gets a part of its own; they need a length, equal in all.

    Raises:
        ValueError: The data does not say so, or has no length.
    """
    loader = isinstance(data, DataLoader)
    iterable = isinstance(data, IterableDataset)
    if not (loader or iterable or is_batches(data)):
        return
    sharded = getattr(data, "sharded", False) or getattr(getattr(data, "dataset", None), "sharded", False)
    if loader and any(isinstance(item, DistributedSampler) for item in samplers_of(data)):
        sharded = True
    kind = type(data).__name__
    if not sharded:
        advice = "its Dataset, or give it a DistributedSampler" if loader else "a Dataset with items by number"
        raise ValueError(
            f"the data is a {kind}, of which each of the {shard.size} processes would get the same batches: hand "
            f"over {advice}; what gives each process a part of its own says so by an attribute `sharded = True`"
        )
    if iterable or not isinstance(data, Sized):
        raise ValueError(
            f"the data is a {kind} without a length, so that the processes could come to its end at different "
            "batches: hand over a Dataset with items by number"
        )


def warn_of_repeats(loader: DataLoader[Any]) -> None:
    """Warn where a DistributedSampler gives some samples to two processes, so that all get as many."""
    for sampler in samplers_of(loader):
        if not isinstance(sampler, DistributedSampler):
            continue
        samples = len(sampler.dataset)  # type: ignore[arg-type]
        if (more := sampler.total_size - samples) > 0:
            logger.warning(
                "a DistributedSampler repeats %d of the %d samples that are evaluated, and these count twice in "
                "each number: hand over the Dataset, of which each sample is dealt once",
                more,
                samples,
            )
            return


def samplers_of(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Whatever may draw the samples of a loader; None where it has no such one."""
    return loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)


def is_batches(data: Any) -> bool:
    """Whether data are `trainer.data.batches.Batches`; a Dataset never is, whatever it is called by."""
    return not isinstance(data, Dataset) and callable(getattr(data, "epoch", None))
