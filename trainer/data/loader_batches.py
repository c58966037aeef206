"""Gives the batches of a DataLoader in a resumable order, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from trainer.data.loading import SeededBatches
from trainer.data.moving import holds_objects, tensors_in, to_device
from trainer.data.options import batch_count
from trainer.data.own_generators import Generator, kept_generators, own_generators, seed_own, seeds_of
from trainer.data.seeding import ORDER_STREAM, derive_seed
from trainer.data.shard import Rows, Shard, samplers_of


class LoaderBatches:
    """Batches of a DataLoader, moved to the device.

    The order depends only on (seed, pass). A random sampler without a generator gets one. Each pass seeds the
    generators of the loader and the samplers, and those that the data set, its transforms and the collate function
    hold; it also calls ``set_epoch`` of the samplers and the data set, if they have it. An iterable data set must
    draw its order from the number given to ``set_epoch``, from a generator of its own, or before its first item:
    after that the model draws from the global generators too. The persistent workers of a user's own DataLoader
    continue the random numbers of earlier passes, which a resumed run has not drawn.

    Args:
        loader: The DataLoader; with a shard, one of `loader_of`, or one that splits its samples itself.
        device: The device of the batches.
        seed: Seed of the order.
        shard: With several processes, this process's part of each batch; for a loader that splits its samples
            itself, only the number of this process.
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
                # Without one, it would draw a seed from the global generator at its first batch.
                sampler.generator = torch.Generator()

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def cuttable(self) -> bool:
        """Whether a pass can begin after any sample: only for a loader of `loader_of` over data with items."""
        return isinstance(self._loader.batch_sampler, SeededBatches)

    def remaining(self, offset: int) -> int:
        """The number of batches of a pass after its first ``offset`` samples.

        Raises:
            ValueError: The data is iterable.
        """
        seeded = self._loader.batch_sampler
        if not self.cuttable:
            raise ValueError("the batch size of iterable data can't change inside a pass: let it change by passes")
        samples = max(0, len(seeded.sampler) - offset)
        return batch_count(samples, seeded.batch_size, drop_last=seeded.drop_last)

    def epoch(self, epoch: int, skip: int = 0, offset: int = 0) -> Iterator[Any]:
        """See `Batches.epoch`; the first ``offset`` samples are left out too (whole batches of iterable data)."""
        for generator in {id(item): item for item in self._generators()}.values():
            generator.manual_seed(derive_seed(self._seed, ORDER_STREAM, epoch))
        self._set_epoch(epoch)
        self._seed_own(epoch)
        seeded = self._loader.batch_sampler
        if isinstance(seeded, SeededBatches):
            seeded.offset = offset
            if self._loader.num_workers:  # batches that are already trained need not be loaded
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
            if self._loader._iterator is iterator:  # noqa: SLF001 - a loader keeps it for its next epoch
                self._loader._iterator = None  # noqa: SLF001

    def _set_epoch(self, epoch: int) -> None:
        # Also on the data set: a streamed one draws its order itself.
        for each in (*samplers_of(self._loader), self._loader.dataset):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def _seed_own(self, epoch: int) -> None:
        """Seed the data's own generators: processes draw the same order, but other numbers for their samples."""
        rank = () if self._shard is None or not self._shard.rank else (self._shard.rank,)
        of_samples, of_order = self._own()
        seed_own(of_samples, self._seed, epoch, *rank)
        seed_own(of_order, self._seed, ORDER_STREAM, epoch)

    def _own(self) -> tuple[list[Generator], list[Generator]]:
        """The generators in the data set and collate function, and those in the samplers, without `_generators`.

        Those of iterable data count as the samplers': it makes the order, from which each process takes its part.
        """
        data, order = [self._loader.dataset, self._loader.collate_fn], list(samplers_of(self._loader))
        if isinstance(self._loader.dataset, IterableDataset):
            data, order = [], data + order
        known = {id(generator) for generator in self._generators()}
        of_samples = [each for each in own_generators(*data) if id(each) not in known]
        known |= {id(generator) for generator in of_samples}
        return of_samples, [each for each in own_generators(*order) if id(each) not in known]

    def _generators(self) -> Iterator[torch.Generator]:
        for owner in (self._loader, *samplers_of(self._loader)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                yield generator


class EvaluatedLoader(LoaderBatches):
    """Batches of a DataLoader for an evaluation: restores its generators afterwards, and calls no ``set_epoch``.

    A training pass in progress may draw from the same generators, as a RandomSampler with replacement does, and
    from the same data set. A sampler of the evaluation, such as a DistributedSampler, keeps its epoch.
    """

    def epoch(self, epoch: int, skip: int = 0, offset: int = 0) -> Iterator[Any]:
        """See `Batches.epoch`."""
        with kept_generators(chain(self._generators(), *self._own())):
            yield from super().epoch(epoch, skip, offset)

    def _set_epoch(self, epoch: int) -> None:
        """Do nothing: an evaluation has no epoch."""

    def _seed_own(self, epoch: int) -> None:  # noqa: ARG002 - all evaluations are alike
        """Leave the data's own generators as they are, so that each evaluation, in all trials, draws the same.

        Workers get a seed from each generator's present state, as training may draw from the same generators.
        """
        if isinstance(self._loader.batch_sampler, SeededBatches) and self._loader.num_workers:
            self._loader.batch_sampler.own_seeds = seeds_of(chain(*self._own()))


def _transferred(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Copy each batch to the GPU on a side stream.

    When the loop asks for the next batch, the GPU still runs the kernels of the previous one, which have only been
    launched. The copy runs beside them, and the order of random numbers is the same as on a CPU.
    """
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for batch in batches:
        if holds_objects(batch):  # their tensors can't be recorded on the stream as below
            yield to_device(batch, device)
            continue
        with torch.cuda.stream(side):
            moved = to_device(batch, device)
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        for tensor in (item for item in tensors_in(moved) if item.is_cuda):
            tensor.record_stream(current)  # keeps its memory until the step is done with it
        yield moved
