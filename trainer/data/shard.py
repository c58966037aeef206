"""Shard: splits the rows of each batch among the processes of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sized
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from trainer.state import TrainState

logger = logging.getLogger(__name__)


class Rows(NamedTuple):
    """One process's rows of one batch.

    Attributes:
        start: Index of the first row among the rows of the pass.
        stop: Index after the last row.
        absent: Whether the batch has fewer rows than there are processes, and none for this process. It then gets
            the rows of rank 0, which it computes with but does not count.
    """

    start: int
    stop: int
    absent: bool


class Shard:
    """Selects the part of each batch that one of several processes works on.

    The rows of a batch are dealt in order; if they can't be split evenly, the first processes get one more.

    Args:
        rank: Number of the process.
        size: Number of processes.
        state: The run's state; `mark` sets its ``absent`` for each batch that is handed out.
    """

    def __init__(self, rank: int, size: int, state: TrainState) -> None:
        self.rank = rank
        self.size = size
        self._state = state

    def rows(self, samples: int, batch_size: int) -> Iterator[Rows]:
        """This process's rows of each batch of a pass.

        Args:
            samples: Samples of the pass, or of the rest of it.
            batch_size: Samples per batch, of all processes together.
        """
        for first in range(0, samples, batch_size):
            yield self.of_batch(first, min(batch_size, samples - first))

    def of_batch(self, first: int, length: int) -> Rows:
        """This process's rows of one batch of ``length`` rows, whose first row has the index ``first``."""
        start, stop = dealt(length, self.rank, self.size)
        absent = start == stop
        if absent:
            start, stop = dealt(length, 0, self.size)
        return Rows(first + start, first + stop, absent)

    @property
    def absent(self) -> bool:
        """Whether the rows of the current batch are another process's."""
        return self._state.absent

    def mark(self, *, absent: bool) -> None:
        """Note whether the rows of the batch that is handed out next are another process's."""
        self._state.absent = absent


def dealt(length: int, rank: int, size: int) -> tuple[int, int]:
    """Start and stop of the rows that process ``rank`` of ``size`` gets out of ``length``."""
    each, more = divmod(length, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def check_sharded(data: Any, shard: Shard) -> None:
    """Refuse data that would give each process the same batches.

    Data with items by number is split by these numbers. A ready DataLoader needs a `DistributedSampler`. Any other
    data must declare by the attribute ``sharded = True`` that it gives each process its own part, and needs a
    length, the same in all processes.

    Raises:
        ValueError: The data does not declare that, or has no length.
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
    """Warn if a DistributedSampler gives some samples to two processes so that all get equally many."""
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
    """The objects that may draw a loader's samples: sampler, batch sampler and its sampler; None if absent."""
    return loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)


def is_batches(data: Any) -> bool:
    """Whether data are `trainer.data.batches.Batches`; a Dataset never is, even if it has a method ``epoch``."""
    return not isinstance(data, Dataset) and callable(getattr(data, "epoch", None))
