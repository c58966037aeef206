"""How much of the data is used: the first batches of a pass, or a few that are trained on again and again."""

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
    """The batches to train on, as far as the options use them; see `trainer.data.batches.make_batches`."""
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
    """The batches to evaluate, as far as the options use them.

    Args:
        data: See `trainer.data.batches.make_batches`.
        options: How to batch it.
        device: Where the batches are to lie.
        kind: ``"val"`` or ``"test"``: whose limit holds.
        seed: Seed of the order of a DataLoader that shuffles.
        shard: Which part of each batch is this process's, of several.
    """
    name = f"limit_{kind}_batches"
    batches = make_batches(data, options, device, train=False, seed=seed, shard=shard)
    return limited(batches, getattr(options, name), name)


def limited(batches: Batches, limit: Limit, name: str) -> Batches:
    """The first batches of each pass; all of them without a limit.

    Args:
        batches: All batches.
        limit: How many, or which fraction of them, at least one.
        name: What an error calls the limit.

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
    """The first batches of each pass.

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
    """Batches that are looked up for each pass, since a change of their size replaces them.

    Args:
        look: Gives those of now.
    """

    #: Those that are looked up may be evaluated in several processes.
    sharded = True

    def __init__(self, look: Callable[[], Batches]) -> None:
        self._look = look

    def __len__(self) -> int:
        return len(self._look())  # type: ignore[arg-type]

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """See `Batches.epoch`."""
        return iter(self._look().epoch(epoch, skip))


class SameBatches:
    """A few batches of the first pass, drawn once and given in every pass.

    Args:
        batches: All batches.
        count: How many of them.
        seed: Seed of what drawing them needs of random numbers.
        shard: Which part of each batch is this process's, of several; the batches have been dealt by it.
    """

    #: They may be evaluated in several processes, too.
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

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:  # noqa: ARG002 - one pass is as the other
        """See `Batches.epoch`."""
        return self._marked(self._kept[skip:])

    def close(self) -> None:
        """Free what the batches hold."""
        close_batches(self._batches)

    def _marked(self, kept: list[tuple[Any, bool]]) -> Iterator[Any]:
        for batch, absent in kept:
            if self._shard is not None:
                self._shard.mark(absent=absent)
            # Copies: a model that changes its inputs in place would change the data.
            yield map_batch(torch.clone, batch)

    @property
    def _kept(self) -> list[tuple[Any, bool]]:
        """The batches, and of each whether it is another process's."""
        if self._drawn is None:
            shard = self._shard
            with kept_rng():
                seed_all(self._seed)
                drawn = islice(self._batches.epoch(0), self._count)
                self._drawn = [(batch, shard is not None and shard.absent) for batch in drawn]
            close_batches(self._batches)
        return self._drawn
