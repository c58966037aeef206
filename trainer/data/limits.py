"""Limits the data that a run uses: to the first batches of each pass, or to the same few batches in every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from trainer.data.batches import Batches, close_batches, known_length, make_batches
from trainer.data.moving import map_batch
from trainer.data.options import BatchOptions, Limit, fraction_of
from trainer.data.random_state import kept_rng, seed_all
from trainer.data.shard import Shard


def train_batches(
    data: Any, options: BatchOptions, device: torch.device, *, seed: int = 0, shard: Shard | None = None
) -> Batches:
    """The batches to train on, within the limits of the options; see `trainer.data.batches.make_batches`."""
    batches = make_batches(data, options, device, train=True, seed=seed, shard=shard)
    if options.overfit_batches is not None:
        return SameBatches(batches, options.overfit_batches, seed, shard)
    return limited(batches, options.limit_train_batches, "limit_train_batches")


def eval_batches(
    data: Any,
    options: BatchOptions,
    device: torch.device,
    kind: str,
    *,
    seed: int = 0,
    shard: Shard | None,
) -> Batches:
    """The batches to evaluate, within the limits of the options.

    Args:
        data: See `trainer.data.batches.make_batches`.
        options: How to batch it.
        device: The device of the batches.
        kind: ``"val"`` or ``"test"``: which limit applies.
        seed: Seed of the order of a DataLoader that shuffles.
        shard: With several processes, this process's part of each batch.
    """
    name = f"limit_{kind}_batches"
    batches = make_batches(data, options, device, train=False, seed=seed, shard=shard)
    return limited(batches, getattr(options, name), name)


def limited(batches: Batches, limit: Limit, name: str) -> Batches:
    """The first batches of each pass; all of them without a limit.

    Args:
        batches: All batches.
        limit: The number of batches, or the fraction of them (at least one batch).
        name: The name of the limit in error texts.

    Raises:
        ValueError: The limit is a fraction of an unknown length.
    """
    if isinstance(limit, float):
        length = known_length(batches)
        if length is None:
            raise ValueError(f"{name} is {limit}, but the data has no length: give a number of batches")
        limit = fraction_of(length, limit)
    return batches if limit is None else FirstBatches(batches, limit)


class FirstBatches:
    """Gives the first batches of each pass.

    Args:
        batches: All batches.
        count: How many of them.
    """

    def __init__(self, batches: Batches, count: int) -> None:
        self._batches = batches
        self._count = count

    def __len__(self) -> int:
        length = known_length(self._batches)
        if length is None:
            raise TypeError("the data has no length, and may have less than the limit")
        return min(length, self._count)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """See `Batches.epoch`."""
        if skip >= self._count:
            return iter(())
        return islice(self._batches.epoch(epoch, skip), self._count - skip)

    def close(self) -> None:
        """Free what the batches hold."""
        close_batches(self._batches)


class LatestBatches:
    """Looks up the batches anew for each pass, since a change of the batch size replaces them.

    Args:
        look: Returns the present batches.
    """

    #: The batches that it looks up may be evaluated in several processes.
    sharded = True

    def __init__(self, look: Callable[[], Batches]) -> None:
        self._look = look

    def __len__(self) -> int:
        return len(self._look())  # type: ignore[arg-type]

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """See `Batches.epoch`."""
        return iter(self._look().epoch(epoch, skip))


class SameBatches:
    """A few batches of the first pass, drawn once and repeated in every pass.

    Args:
        batches: All batches.
        count: How many of them.
        seed: Seed of the random generators while the batches are drawn.
        shard: With several processes, this process's part of each batch; ``batches`` are already split by it.
    """

    #: They may be evaluated in several processes too.
    sharded = True

    def __init__(self, batches: Batches, count: int, seed: int, shard: Shard | None = None) -> None:
        self._batches = batches
        self._count = count
        self._seed = seed
        self._shard = shard
        self._drawn: list[tuple[Any, bool]] | None = None

    def __len__(self) -> int:
        length = known_length(self._batches)
        return len(self._kept) if length is None else min(length, self._count)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:  # noqa: ARG002 - all passes are alike
        """See `Batches.epoch`."""
        return self._marked(self._kept[skip:])

    def close(self) -> None:
        """Free what the batches hold."""
        close_batches(self._batches)

    def _marked(self, kept: list[tuple[Any, bool]]) -> Iterator[Any]:
        for batch, absent in kept:
            if self._shard is not None:
                self._shard.mark(absent=absent)
            # Copies, as a model that changes its inputs in place would change the data.
            yield map_batch(torch.clone, batch)

    @property
    def _kept(self) -> list[tuple[Any, bool]]:
        """The batches, each with whether its rows are another process's."""
        if self._drawn is None:
            shard = self._shard
            with kept_rng():
                seed_all(self._seed)
                drawn = islice(self._batches.epoch(0), self._count)
                self._drawn = [(batch, shard is not None and shard.absent) for batch in drawn]
            close_batches(self._batches)
        return self._drawn
