"""Each sample of each batch belongs to one process, whatever their numbers."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from tests.unit.trainer.support import quick
from trainer import BatchOptions
from trainer.data.batches import make_batches
from trainer.data.shard import Shard, dealt
from trainer.state import TrainState

CPU = torch.device("cpu")


@quick(200)
@given(length=st.integers(0, 50), size=st.integers(1, 9))
def test_rows_are_dealt_once_and_evenly(length: int, size: int) -> None:
    parts = [dealt(length, rank, size) for rank in range(size)]
    assert [row for start, stop in parts for row in range(start, stop)] == list(range(length))
    counts = [stop - start for start, stop in parts]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@quick(100)
@given(
    samples=st.integers(1, 40),
    batch=st.integers(1, 12),
    size=st.integers(1, 5),
    kind=st.sampled_from(["memory", "loader"]),
    train=st.booleans(),
    skip=st.integers(0, 3),
    drop_last=st.booleans(),
)
def test_the_parts_of_a_batch_are_the_batch(
    samples: int, batch: int, size: int, kind: str, train: bool, skip: int, drop_last: bool
) -> None:
    values = torch.arange(samples)
    options = BatchOptions(
        batch_size=batch,
        eval_batch_size=batch,
        drop_last=drop_last,
        collate_fn=torch.stack if kind == "loader" else None,
    )
    data: object = TensorDataset(values) if kind == "memory" else list_of(values)
    whole = [flat(item) for item in make_batches(data, options, CPU, train=train, seed=4).epoch(2, skip)]
    parts = []
    for rank in range(size):
        state = TrainState(1)
        shard = Shard(rank, size, state)
        batches = make_batches(data, options, CPU, train=train, seed=4, shard=shard)
        parts.append([[] if state.absent else flat(item) for item in batches.epoch(2, skip)])
        assert not whole or len(batches) == skip + len(whole)
    assert [[row for part in pieces for row in part] for pieces in zip(*parts, strict=True)] == whole


class Items(torch.utils.data.Dataset):
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index]


def list_of(values: torch.Tensor) -> Items:
    return Items(values)


def flat(batch: object) -> list[int]:
    return (batch[0] if isinstance(batch, tuple | list) else batch).tolist()


class Endless(IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(1)])


class Own:
    """Batches that come as they are."""

    sharded = False

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def epoch(self, epoch: int, skip: int = 0):
        return iter([torch.zeros(1)])


class OwnPart(Own):
    sharded = True

    def __len__(self) -> int:
        return 1


class TestDataThatNobodyCanDeal:
    def make(self, data: object) -> None:
        make_batches(data, BatchOptions(), CPU, train=True, shard=Shard(0, 2, TrainState(1)))

    def test_a_ready_loader_is_refused_unless_it_shards(self) -> None:
        data = Items(torch.arange(6))
        with pytest.raises(
            ValueError, match="each of the 2 processes would get the same batches: hand over its D"
        ):
            self.make(DataLoader(data, 2))
        self.make(DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=2, rank=0)))

    @pytest.mark.parametrize(
        ("samples", "train", "warned"), [(7, False, True), (6, False, False), (7, True, False)]
    )
    def test_a_loader_that_repeats_samples_of_an_evaluation_is_a_warning(
        self, samples: int, train: bool, warned: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        data = Items(torch.arange(samples))
        loader = DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=2, rank=0))
        make_batches(loader, BatchOptions(), CPU, train=train, shard=Shard(0, 2, TrainState(1)))
        assert ("repeats 1 of the 7 samples that are evaluated" in caplog.text) == warned

    def test_data_without_places_is_refused(self) -> None:
        with pytest.raises(ValueError, match="is a Endless, of which each of the 2 processes"):
            self.make(Endless())
        with pytest.raises(ValueError, match="hand over a Dataset with items by number"):
            self.make(Own())

    def test_what_says_that_it_is_sharded_is_taken(self) -> None:
        self.make(OwnPart())


class Noisy(Items):
    """Draws from a generator of its own for each sample."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(6))
        self.generator = random.Random(1)

    def __getitem__(self, index: int) -> Any:
        return self.generator.random()


class OwnOrder(DistributedSampler[Any]):
    """Draws an order from a generator of its own, and takes every second place of it."""

    def __init__(self, data: Any, rank: int) -> None:
        super().__init__(data, num_replicas=2, rank=rank)
        self.draws = random.Random(1)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.draws.sample(range(6), 6)[self.rank :: 2])


class OwnStream(IterableDataset):
    """Draws its order from a generator of its own, and has every second place of it."""

    sharded = True

    def __init__(self, rank: int) -> None:
        self.rank, self.draws = rank, random.Random(1)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.draws.sample(range(6), 6)[self.rank :: 2])

    def __len__(self) -> int:
        return 3


class TestGeneratorsThatTheDataHold:
    def both(self, data_of: Callable[[int], Any]) -> list[list[float]]:
        """What each of two processes gets."""
        made = (
            make_batches(
                data_of(rank), BatchOptions(batch_size=2), CPU, train=True, shard=Shard(rank, 2, TrainState(1))
            )
            for rank in range(2)
        )
        return [[float(batch) for batch in each.epoch(0)] for each in made]

    @pytest.mark.parametrize("ready", [False, True])
    def test_each_process_draws_other_numbers_for_its_samples(self, ready: bool) -> None:
        def data(rank: int) -> Any:
            items = Noisy()
            return DataLoader(items, sampler=DistributedSampler(items, 2, rank)) if ready else items

        one, other = self.both(data)
        assert len({*one, *other}) == 6

    @pytest.mark.parametrize("kind", ["sampler", "stream"])
    def test_all_draw_the_same_order(self, kind: str) -> None:
        def data(rank: int) -> Any:
            if kind == "sampler":
                return DataLoader(Items(torch.arange(6)), sampler=OwnOrder(range(6), rank))
            return DataLoader(OwnStream(rank))

        one, other = self.both(data)
        assert sorted(one + other) == [0, 1, 2, 3, 4, 5]
