"""Batches: every sample once, in an order that (seed, epoch) decides, from every kind of data."""

from collections import OrderedDict, UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from tests.unit.trainer.support import assert_same, make_trainer, quick
from trainer import BatchOptions
from trainer.data.batches import Batches, TensorBatches, is_batched, make_batches
from trainer.data.lengths import batch_length
from trainer.data.limits import SameBatches
from trainer.data.loader_batches import LoaderBatches
from trainer.data.moving import to_device
from trainer.data.random_state import seed_all

CPU = torch.device("cpu")


def numbered(samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(samples), -torch.arange(samples))


class Numbers(Dataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


def flat(batches: Iterator[Any]) -> list[int]:
    """The samples of an epoch in order."""
    return [number for batch in batches for number in (batch if isinstance(batch, Tensor) else batch[0]).tolist()]


def sizes(batches: Iterator[Any]) -> list[int]:
    return [batch_length(batch) for batch in batches]


def training_batches(kind: str, samples: int, batch_size: int, seed: int = 0, **options: Any) -> Batches:
    data: Any = {
        "tensors": lambda: numbered(samples),
        "gathered": lambda: numbered(samples),
        "map": lambda: Numbers(samples),
        "loader": lambda: DataLoader(Numbers(samples), batch_size, shuffle=True),
        "loader with a generator": lambda: DataLoader(
            Numbers(samples), batch_size, shuffle=True, generator=torch.Generator()
        ),
        "batch sampler with a generator": lambda: DataLoader(
            Numbers(samples),
            batch_sampler=BatchSampler(
                RandomSampler(Numbers(samples), generator=torch.Generator()), batch_size, drop_last=False
            ),
        ),
    }[kind]()
    return make_batches(data, BatchOptions(batch_size=batch_size, **options), CPU, train=True, seed=seed)


KINDS = ["tensors", "gathered", "map", "loader", "loader with a generator", "batch sampler with a generator"]


@pytest.fixture(autouse=True)
def _small_copy_limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gathered" in request.node.name:
        monkeypatch.setattr("trainer.data.batches._COPY_LIMIT", 1)


def epoch_of(batches: Batches, seed: int, epoch: int, skip: int = 0) -> list[int]:
    """An epoch as the Trainer draws it, with the global generators seeded first."""
    seed_all(1000 * seed + epoch)
    return flat(batches.epoch(epoch, skip=skip))


@pytest.mark.parametrize("kind", KINDS)
class TestTrainingOrder:
    @quick(12)
    @given(samples=st.integers(1, 40), batch_size=st.integers(1, 12), epoch=st.integers(0, 3))
    def test_covers_each_sample_exactly_once(self, kind: str, samples: int, batch_size: int, epoch: int) -> None:
        batches = training_batches(kind, samples, batch_size)
        assert sorted(epoch_of(batches, 0, epoch)) == list(range(samples))
        assert max(sizes(batches.epoch(epoch))) <= batch_size
        assert len(batches) == -(-samples // batch_size)  # type: ignore[arg-type]

    def test_depends_on_seed_and_epoch_only(self, kind: str) -> None:
        batches = training_batches(kind, 50, 7, seed=1)
        first = epoch_of(batches, 1, 0)
        second = epoch_of(batches, 1, 1)
        assert first != second
        assert epoch_of(batches, 1, 0) == first
        fresh = training_batches(kind, 50, 7, seed=1)
        assert epoch_of(fresh, 1, 1) == second
        assert epoch_of(training_batches(kind, 50, 7, seed=2), 2, 0) != first

    @quick(12)
    @given(samples=st.integers(1, 40), batch_size=st.integers(1, 12), skip=st.integers(0, 45))
    def test_skip_leaves_out_the_first_batches(self, kind: str, samples: int, batch_size: int, skip: int) -> None:
        batches = training_batches(kind, samples, batch_size)
        whole = epoch_of(batches, 0, 2)
        assert epoch_of(batches, 0, 2, skip) == whole[skip * batch_size :]


@pytest.mark.parametrize("kind", ["tensors", "gathered", "map"])
class TestOptions:
    @pytest.mark.parametrize(("samples", "expected"), [(10, [4, 4]), (8, [4, 4]), (3, [])])
    def test_drop_last_leaves_out_a_smaller_batch(self, kind: str, samples: int, expected: list[int]) -> None:
        batches = training_batches(kind, samples, 4, drop_last=True)
        assert sizes(batches.epoch(0)) == expected
        assert len(batches) == len(expected)  # type: ignore[arg-type]

    def test_without_shuffle_the_order_is_that_of_the_data(self, kind: str) -> None:
        batches = training_batches(kind, 10, 4, shuffle=False)
        assert flat(batches.epoch(3)) == list(range(10))
        assert flat(batches.epoch(3, skip=1)) == list(range(4, 10))


def test_gathered_batches_equal_the_copied_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = [*training_batches("tensors", 23, 4).epoch(1)]
    monkeypatch.setattr("trainer.data.batches._COPY_LIMIT", 1)
    assert_same([*training_batches("tensors", 23, 4).epoch(1)], copied)


def test_samples_stay_with_their_targets() -> None:
    for inputs, targets in training_batches("tensors", 23, 4).epoch(1):
        assert torch.equal(inputs, -targets)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_that_is_changed_in_place_changes_nothing_of_the_data(shuffle: bool) -> None:
    data = numbered(8)
    before = [tensor.clone() for tensor in data.tensors]
    for inputs, targets in TensorBatches(data.tensors, 4, CPU, shuffle=shuffle).epoch(0):
        inputs.mul_(0)
        targets.add_(5)
    assert all(map(torch.equal, data.tensors, before))


class TestEvaluation:
    @pytest.mark.parametrize("data", [numbered(9), Numbers(9), Stream(9)], ids=["tensors", "map", "stream"])
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_takes_every_sample_in_order(self, data: Any, drop_last: bool) -> None:
        options = BatchOptions(batch_size=2, drop_last=drop_last)
        assert flat(make_batches(data, options, CPU, train=False).epoch(0)) == list(range(9))

    @pytest.mark.parametrize("data", [numbered(600), Numbers(600)], ids=["tensors", "map"])
    @pytest.mark.parametrize("batch_size", [2, 512])
    def test_goes_in_batches_of_a_size_of_its_own(self, data: Any, batch_size: int) -> None:
        batches = make_batches(data, BatchOptions(batch_size=batch_size), CPU, train=False)
        assert sizes(batches.epoch(0)) == [256, 256, 88]

    @pytest.mark.parametrize("data", [numbered(9), Numbers(9)], ids=["tensors", "map"])
    def test_keeps_to_the_given_batch_size(self, data: Any) -> None:
        batches = make_batches(data, BatchOptions(batch_size=2, eval_batch_size=4), CPU, train=False)
        assert sizes(batches.epoch(0)) == [4, 4, 1]


class TestWhatIsData:
    def test_a_tuple_of_tensors(self) -> None:
        batches = make_batches((torch.arange(5), torch.arange(5)), BatchOptions(batch_size=2), CPU, train=True)
        assert sorted(flat(batches.epoch(0))) == [0, 1, 2, 3, 4]

    def test_a_ready_loader_keeps_its_batching(self) -> None:
        loader = DataLoader(Numbers(5), batch_size=3)
        batches = make_batches(loader, BatchOptions(batch_size=1), CPU, train=True)
        assert sizes(batches.epoch(0)) == [3, 2]

    def test_batches_stay_as_they_are(self) -> None:
        batches = TensorBatches((torch.arange(5),), 2, CPU)
        assert make_batches(batches, BatchOptions(), CPU, train=True) is batches

    def test_a_data_set_may_have_an_attribute_called_epoch(self) -> None:
        data = Numbers(5)
        data.epoch = 0  # type: ignore[attr-defined]
        assert isinstance(make_batches(data, BatchOptions(), CPU, train=True), LoaderBatches)

    def test_a_subclass_of_tensor_dataset_keeps_its_own_items(self) -> None:
        class Doubled(TensorDataset):
            def __getitem__(self, index: int) -> tuple[Tensor, ...]:
                return tuple(2 * tensor for tensor in super().__getitem__(index))

        batches = make_batches(Doubled(torch.arange(3)), BatchOptions(), CPU, train=False)
        assert flat(batches.epoch(0)) == [0, 2, 4]

    @pytest.mark.parametrize("data", [[1, 2, 3], "text", (), (torch.arange(3), 1)], ids=str)
    def test_anything_else_is_refused_by_its_type(self, data: Any) -> None:
        with pytest.raises(TypeError, match=type(data).__name__):
            make_batches(data, BatchOptions(), CPU, train=True)

    @pytest.mark.parametrize("train", [True, False])
    @pytest.mark.parametrize("data", [numbered(0), Numbers(0)], ids=["tensors", "map"])
    def test_an_empty_data_set_is_refused(self, data: Any, train: bool) -> None:
        with pytest.raises(ValueError, match="the data set is empty"):
            make_batches(data, BatchOptions(), CPU, train=train)


class TestLoaders:
    def test_a_sampler_with_set_epoch_is_told_the_epoch(self) -> None:
        class Epochs(RandomSampler):
            def set_epoch(self, epoch: int) -> None:
                self.seen = epoch

        sampler = Epochs(Numbers(4))
        make_batches(DataLoader(Numbers(4), 2, sampler=sampler), BatchOptions(), CPU, train=True).epoch(6)
        assert sampler.seen == 6

    def test_workers_draw_the_same_numbers_in_an_epoch_whether_or_not_the_ones_before_ran(self) -> None:
        options = BatchOptions(batch_size=2, num_workers=1)
        through = make_batches(Noise(4), options, CPU, train=True)
        first, second = [*through.epoch(0)], [*through.epoch(1)]
        assert_same([*make_batches(Noise(4), options, CPU, train=True).epoch(1)], second)
        assert not torch.equal(first[0], second[0])


class Noise(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(())


def test_to_device_looks_through_containers_and_keeps_their_types() -> None:
    from collections import namedtuple

    Pair = namedtuple("Pair", "left right")  # noqa: PYI024
    tensor = torch.zeros(2)
    batch = {"a": [tensor, "text"], "b": (tensor, 3), "c": Pair(tensor, None)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == moved["b"][0].device.type == moved["c"].left.device.type == "meta"
    assert (type(moved["a"]), type(moved["b"]), type(moved["c"])) == (list, tuple, Pair)
    assert (moved["a"][1], moved["b"][1], moved["c"].right) == ("text", 3, None)


class Encoding(UserDict[str, Any]):
    """As those of tokenizers: a mapping with attributes."""

    def __init__(self, data: Any, kind: str = "") -> None:
        super().__init__(data)
        self.kind = kind

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError
        return self.data[name]


class Graph:
    """No container, and moves itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> "Graph":
        return Graph(self.x.to(device))


class InPlace(Graph):
    def to(self, device: torch.device) -> None:  # type: ignore[override]
        self.x = self.x.to(device)


class Fixed(Mapping[str, Any]):
    """A mapping that can't be made of another one."""

    def __init__(self) -> None:
        self.x = torch.zeros(2)

    def __getitem__(self, name: str) -> Any:
        return {"x": self.x}[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("x",))

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("kind", [Graph, InPlace])
def test_what_moves_itself_is_moved(kind: type[Graph]) -> None:
    whole = to_device(kind(torch.zeros(2)), torch.device("meta"))
    inner = to_device([{"graph": kind(torch.zeros(2))}], torch.device("meta"))[0]["graph"]
    assert (type(whole), type(inner)) == (kind, kind)
    assert whole.x.device.type == inner.x.device.type == "meta"


def test_mappings_that_are_moved_keep_their_class_and_attributes() -> None:
    before = Encoding({"ids": torch.zeros(2), "name": "a"}, "tokens")
    moved = to_device(before, torch.device("meta"))
    assert (type(moved), moved.kind, moved.name, moved.ids.device.type) == (Encoding, "tokens", "a", "meta")
    assert before.ids.device.type == "cpu"
    ordered = to_device(OrderedDict(x=torch.zeros(2)), torch.device("meta"))
    assert (type(ordered), ordered["x"].device.type) == (OrderedDict, "meta")
    fixed = to_device(Fixed(), torch.device("meta"))
    assert (type(fixed), fixed["x"].device.type) == (dict, "meta")


def test_batches_that_are_given_again_keep_their_class() -> None:
    def collate(items: list[Any]) -> Encoding:
        return Encoding({"ids": torch.stack(items)}, "tokens")

    loader = DataLoader([torch.zeros(2), torch.ones(2)], 2, collate_fn=collate)  # type: ignore[arg-type]
    same = SameBatches(LoaderBatches(loader, torch.device("cpu")), 1, 0)
    (first,) = same.epoch(0)
    first.ids.fill_(7)
    (again,) = same.epoch(1)
    assert (type(again), again.kind, again.ids.tolist()) == (Encoding, "tokens", [[0, 0], [1, 1]])


def test_a_packed_sequence_is_moved_and_its_lengths_stay_on_the_cpu() -> None:
    packed = pack_sequence([torch.zeros(2, 3), torch.zeros(4, 3)], enforce_sorted=False)
    (moved,), _ = to_device([(packed,), torch.zeros(2)], torch.device("meta"))
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")
    assert moved.sorted_indices is not None
    assert moved.sorted_indices.device.type == "meta"
    assert moved.batch_sizes.tolist() == [2, 2, 1, 1]


def test_loader_batches_are_moved_to_the_device() -> None:
    batches = LoaderBatches(DataLoader(Numbers(4), 2), torch.device("meta"))
    assert [batch.device.type for batch in batches.epoch(0)] == ["meta", "meta"]


class Rows:
    """Items by number, as `datasets.Dataset` has them: of no class of torch's, lists unless it has a format."""

    def __init__(self, kind: str | None) -> None:
        self.format = {"type": kind, "columns": ["x"]}

    def with_format(self, kind: str) -> "Rows":
        return Rows(kind)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"x": [at, at] if self.format["type"] is None else torch.tensor([at, at])}


def test_data_of_another_library_goes_through_a_dataloader_and_lists_in_it_are_refused() -> None:
    made = make_batches(Rows(None).with_format("torch"), BatchOptions(), torch.device("cpu"), train=False)
    (batch,) = made.epoch(0)
    assert_same(batch, {"x": torch.arange(6).unsqueeze(1).expand(6, 2)})
    with pytest.raises(TypeError, match=r'hand over `dataset.with_format\("torch"\)`'):
        make_batches(Rows(None), BatchOptions(), torch.device("cpu"), train=False)


@pytest.mark.parametrize("data", [[(1, 2)], {"x": 1}, "rows", 7])
def test_what_has_no_samples_is_refused(data: Any) -> None:
    with pytest.raises(TypeError, match="hand over a Dataset or a DataLoader"):
        make_batches(data, BatchOptions(), torch.device("cpu"), train=False)


class Rounds:
    """Items by number, and the epoch that they are of."""

    epoch = 3

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(4), torch.ones(1)


def test_items_with_an_epoch_that_is_no_method_are_no_batches() -> None:
    assert not is_batched(Rounds())
    assert make_trainer().fit(Rounds()).step == 4
