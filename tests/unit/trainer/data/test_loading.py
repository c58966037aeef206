"""DataLoader's options: each has its effect, and a run with workers resumes to the bit, persistent ones too."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset, get_worker_info

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_trainer,
    regression,
    through_file,
)
from trainer import BatchOptions, Trainer
from trainer.callbacks import Checkpoint
from trainer.data.batches import make_batches
from trainer.data.own_generators import own_generators, seed_own, seeds_of
from trainer.data.seeding import derive_seed

pytestmark = pytest.mark.full

CPU = torch.device("cpu")


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Draws from each global generator, and says which worker loaded what."""

    def __init__(self, samples: int = 12) -> None:
        self.data = regression(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.data[index]
        return inputs + 0.1 * random.random() + 0.1 * float(np.random.rand()) + 0.1 * torch.rand(4), target


class Noise:
    """A transform with a generator of each kind."""

    def __init__(self) -> None:
        self.plain, self.numpy, self.old = random.Random(1), np.random.default_rng(2), np.random.RandomState(3)
        self.torch = torch.Generator().manual_seed(4)

    def __call__(self, inputs: Tensor) -> Tensor:
        drawn = self.plain.random() + self.numpy.random() + self.old.random_sample()
        return inputs + 0.1 * drawn + 0.1 * torch.rand(4, generator=self.torch)


class OwnNoise(Augmented):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.transforms = [Noise()]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.data[index]
        return self.transforms[0](inputs), target


class NoisyBatches:
    """A collate function with generators."""

    def __init__(self) -> None:
        self.noise = Noise()

    def __call__(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        return noisy(samples, self.noise)


def noisy(samples: list[Any], noise: Noise) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*samples, strict=True)
    return torch.stack([noise(each) for each in inputs]), torch.stack(targets)


class OwnOrder(RandomSampler):
    """A sampler that draws the order from NumPy."""

    def __init__(self) -> None:
        super().__init__(range(12))
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(12).tolist()


class Together(Augmented):
    def __getitems__(self, rows: list[int]) -> list[Any]:
        assert get_worker_info() is not None
        return [self.data[row] for row in rows]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from regression()


class Ordered(IterableDataset[int]):
    """Draws its order from what ``set_epoch`` says, as streaming sets of Hugging Face do."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(8, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class OfPass(Dataset[int]):
    """Samples that depend on the pass; a worker has to open it first, and it is pickled in a way of its own."""

    def __init__(self, is_open: bool = False) -> None:
        self.epoch, self.is_open = 0, is_open

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        assert self.is_open
        return 10 * self.epoch + index

    def __getstate__(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "is_open": False}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def open(self) -> None:
        self.is_open = True


def opened(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.open()  # type: ignore[attr-defined]


def opened_by_attribute(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.is_open = True  # type: ignore[attr-defined]


class Connected(OfPass):
    """Has attributes that many data sets have."""

    def __init__(self) -> None:
        super().__init__(is_open=True)
        self._data, self._seed, self._epoch, self._own, self._collate_fn = 5 * ["given"]

    def __getitem__(self, index: int) -> int:
        assert {self._data, self._seed, self._epoch, self._own, self._collate_fn} == {"connected"}
        return super().__getitem__(index)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


def connected(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    for name in ("_data", "_seed", "_epoch", "_own", "_collate_fn"):
        assert getattr(info.dataset, name) == "given"
        setattr(info.dataset, name, "connected")


class Watched(OfPass):
    """Keeps the epochs that it was set to."""

    def __init__(self) -> None:
        super().__init__(is_open=True)
        self.seen: list[int] = []

    def __getitem__(self, index: int) -> Any:
        return regression()[super().__getitem__(index) % 4]

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.seen.append(epoch)


def drawn(batches: Any, epoch: int) -> list[int]:
    return [number for batch in batches.epoch(epoch) for number in batch.tolist()]


def twice(samples: list[Any]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*samples, strict=True)
    return 2 * torch.stack(inputs), torch.stack(targets)


def train(*callbacks: Any, checkpoint: Any = None, data: Any = None, **options: Any) -> Trainer:
    trainer = make_trainer(callbacks, batching=BatchOptions(batch_size=4, num_workers=1, **options))
    if checkpoint is not None:
        trainer.load_state_dict(through_file(checkpoint))
    trainer.fit(data or Augmented())
    return trainer


@pytest.mark.parametrize("at", [1, 4])
def test_a_run_with_persistent_workers_resumes_to_the_bit(at: int) -> None:
    whole = frozen(train(persistent_workers=True))
    assert_same(frozen(train()), whole)  # new workers in each pass draw the same
    stopped = train(interrupt_at(at), persistent_workers=True)
    assert_same(frozen(train(checkpoint=stopped.state_dict(), persistent_workers=True)), whole)


def test_what_workers_draw_does_not_depend_on_how_many_they_are() -> None:
    one, two = (
        list(
            make_batches(
                Augmented(), BatchOptions(batch_size=4, num_workers=count), CPU, train=True, seed=3
            ).epoch(1)
        )
        for count in (1, 2)
    )
    assert_same(one, two)
    rest = make_batches(Augmented(), BatchOptions(batch_size=4, num_workers=2), CPU, train=True, seed=3).epoch(
        1, 2
    )
    assert_same(list(rest), one[2:])


@pytest.mark.parametrize("at", [1, 4, 5])
@pytest.mark.parametrize(
    ("data", "options"),
    [
        (OwnNoise, {}),
        (OwnNoise, {"num_workers": 2}),
        (OwnNoise, {"num_workers": 2, "persistent_workers": True}),
        (lambda: regression(), {"num_workers": 1, "collate_fn": NoisyBatches}),
        (lambda: regression(), {"num_workers": 2, "persistent_workers": True, "collate_fn": NoisyBatches}),
        (lambda: regression(), {"collate_fn": lambda: NoisyBatches().__call__}),
        (lambda: regression(), {"collate_fn": lambda: partial(noisy, noise=Noise())}),
        (lambda: DataLoader(OwnNoise(), 4, shuffle=True), {}),
        (lambda: DataLoader(OwnNoise(), 4, num_workers=1), {}),
        (lambda: DataLoader(regression(), 4, sampler=OwnOrder()), {}),
    ],
    ids=[
        "data set",
        "workers",
        "persistent",
        "collate_fn",
        "persistent collate_fn",
        "method",
        "partial",
        "loader",
        "loader's workers",
        "sampler",
    ],
)
def test_a_run_resumes_to_the_bit_with_generators_that_the_data_hold(at: int, data: Any, options: Any) -> None:
    def fitted(*callbacks: Any, checkpoint: Any = None) -> Trainer:
        made = {**options, "collate_fn": options["collate_fn"]()} if "collate_fn" in options else options
        trainer = make_trainer(callbacks, batching=BatchOptions(batch_size=4, **made))
        if checkpoint is not None:
            trainer.load_state_dict(through_file(checkpoint))
        trainer.fit(data(), data())
        return trainer

    stopped = fitted(interrupt_at(at))
    assert stopped.state.stop_reason == "interrupted"
    assert_same(frozen(fitted(checkpoint=stopped.state_dict())), frozen(fitted()))


def test_what_workers_draw_for_a_validation_is_not_what_they_draw_for_training() -> None:
    options = BatchOptions(batch_size=4, eval_batch_size=4, shuffle=False, num_workers=1)
    trained, evaluated = (make_batches(Augmented(), options, CPU, train=train, seed=3) for train in (True, False))
    for (one, _), (other, _) in zip(trained.epoch(0), evaluated.epoch(0), strict=True):
        assert not torch.equal(one, other)


def test_what_is_drawn_for_a_validation_follows_from_the_data_alone() -> None:
    (first, _), again = OwnNoise()[0], OwnNoise()
    for seed, data in enumerate((OwnNoise(), again, again)):
        (batch,) = make_batches(data, BatchOptions(), CPU, train=False, seed=seed).epoch(0)
        assert torch.equal(batch[0][0], first)
    options = BatchOptions(num_workers=1)
    assert_same(
        *(list(make_batches(OwnNoise(), options, CPU, train=False, seed=seed).epoch(0)) for seed in (1, 2))
    )
    batches = make_batches(OwnNoise(), BatchOptions(shuffle=False), CPU, train=True)
    assert not torch.equal(*(next(batches.epoch(epoch))[0] for epoch in (0, 1)))


def test_generators_are_found_where_they_lie() -> None:
    class Proxy:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("outside of its context")

    noise = Noise()
    data = SimpleNamespace(deep=[{"noise": (noise, 3, "text")}], proxy=Proxy())
    data.itself = data
    inside: Any = Subset(data, [0])  # type: ignore[arg-type]
    held = [noise.plain, noise.numpy, noise.old, noise.torch]
    assert [id(item) for item in own_generators(inside, noise, None)] == [id(item) for item in held]
    others = (torch.default_generator, np.random.mtrand._rand, random._inst, random.SystemRandom())  # type: ignore[attr-defined]
    assert own_generators(SimpleNamespace(others=others)) == []


class LazyFile:
    """Stands for what it opens when it is first looked at."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise OSError("opened")


class LazySlots:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        pytest.fail(f"asked for {name}")


class LazyDict(dict[str, Any]):
    def values(self) -> Any:
        raise OSError("opened")


class LazyList(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise OSError("opened")


def test_the_search_for_generators_runs_none_of_the_code_of_what_is_searched() -> None:
    noise = Noise()
    lazy = [LazyFile(), LazySlots(), LazyDict(one=1), LazyList([noise]), weakref.proxy(Noise())]
    found = own_generators(SimpleNamespace(lazy=lazy))
    assert [id(item) for item in found] == list(map(id, (noise.plain, noise.numpy, noise.old, noise.torch)))


def test_a_random_state_of_any_bits_is_seeded(recwarn: pytest.WarningsRecorder) -> None:
    generators = [np.random.RandomState(bits(1)) for bits in (np.random.MT19937, np.random.PCG64)]
    for generator in generators:
        generator.normal()  # of which it keeps a second one
        seed_own([generator], 3)
        drawn = generator.normal()
        before = seeds_of([generator])
        seed_own([generator], 3)
        assert generator.normal() == drawn
        assert seeds_of([generator]) == before
    assert not recwarn.list


def test_a_data_set_that_loads_batches_itself_does() -> None:
    options = BatchOptions(batch_size=5, num_workers=1, drop_last=True, shuffle=False, prefetch_factor=3)
    batches = list(make_batches(Together(), options, CPU, train=True).epoch(0))
    assert torch.equal(torch.cat([inputs for inputs, _ in batches]), regression().tensors[0][:10])


@pytest.mark.parametrize("data", [regression(), Augmented()], ids=["tensors", "data set"])
def test_batches_are_made_by_collate_fn(data: Any) -> None:
    options = BatchOptions(batch_size=5, eval_batch_size=5, shuffle=False, collate_fn=twice)
    found = torch.cat([inputs for inputs, _ in make_batches(data, options, CPU, train=False).epoch(0)])
    assert (found - 2 * regression().tensors[0]).abs().max() < 0.7
    assert not torch.equal(found, regression().tensors[0])


def test_options_reach_the_loader() -> None:
    options = BatchOptions(
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=5,
        pin_memory=False,
        timeout=9,
        worker_init_fn=print,
    )
    loader = make_batches(Augmented(), options, CPU, train=True)._loader  # type: ignore[attr-defined]
    found = (loader.persistent_workers, loader.prefetch_factor, loader.pin_memory, loader.timeout)
    assert (*found, loader.worker_init_fn) == (True, 5, False, 9, print)
    options = BatchOptions(num_workers=1, multiprocessing_context="spawn")
    loader = make_batches(Augmented(), options, CPU, train=True)._loader  # type: ignore[attr-defined]
    assert loader.multiprocessing_context.get_start_method() == "spawn"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"persistent_workers": True}, "persistent_workers needs worker processes"),
        ({"prefetch_factor": 2}, "prefetch_factor needs worker processes"),
        ({"timeout": 3}, "timeout needs worker processes"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor is 0"),
    ],
)
def test_options_that_need_workers_are_refused_without(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BatchOptions(**options)


def test_persistent_workers_of_iterable_data_are_refused() -> None:
    with pytest.raises(ValueError, match="can't be used with an iterable data set"):
        train(data=Stream(), persistent_workers=True)


@pytest.mark.parametrize(("persistent", "saves"), [(True, True), (True, False), (False, True)])
def test_persistent_workers_of_a_loader_that_is_trained_on_are_warned_about_where_a_run_could_resume(
    persistent: bool, saves: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(Augmented(), 4, num_workers=1, persistent_workers=persistent)
    make_trainer([Checkpoint(tmp_path)] if saves else [], max_epochs=1).fit(loader, loader)
    assert caplog.text.count("persistent workers continue their random numbers") == (persistent and saves)


def test_persistent_workers_of_a_loader_that_is_validated_too_stay_with_their_pass() -> None:
    loader: Any = DataLoader(regression(), batch_size=2, num_workers=1, persistent_workers=True)
    seen: list[float] = []
    watch = At("on_train_batch_end", lambda trainer: seen.extend(trainer.state.batch[1].flatten().tolist()))
    trainer = make_trainer([watch], max_epochs=2, validate_every=0.5)
    trainer.fit(loader, loader)
    assert seen == [*regression().tensors[1].flatten().tolist()] * 2
    assert [len(trainer.state.history), trainer.state.step] == [4, 12]


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_an_evaluation_by_a_hook_leaves_persistent_workers_to_their_pass(method: str) -> None:
    loader: Any = DataLoader(regression(), batch_size=2, num_workers=1, persistent_workers=True)
    seen: list[float] = []
    watch = At("on_train_batch_end", lambda trainer: seen.extend(trainer.state.batch[1].flatten().tolist()))
    look = At("on_train_batch_end", lambda t: getattr(t, method)(loader), lambda t: t.state.batch_index == 2)
    make_trainer([watch, look], max_epochs=2).fit(loader)
    assert seen == [*regression().tensors[1].flatten().tolist()] * 2


@pytest.mark.parametrize("stopped", [None, 25])
@pytest.mark.parametrize("limit", [None, 2])
def test_a_validation_leaves_the_order_of_a_pass_that_is_still_being_drawn(
    stopped: int | None, limit: int | None
) -> None:
    rows, seed = torch.arange(10.0), 5
    # It draws 32 at a time, so that each validation comes between two draws.
    sampler = RandomSampler(range(10), replacement=True, num_samples=120)
    loader: Any = DataLoader([(row.expand(4), row[None]) for row in rows], 3, sampler=sampler)
    seen: list[float] = []
    watch = At("on_train_batch_end", lambda trainer: seen.extend(trainer.state.batch[1].flatten().tolist()))
    options = {"max_epochs": 1, "validate_every": 8, "seed": seed}
    batching = BatchOptions(limit_val_batches=limit)
    trainer = make_trainer([watch, *([interrupt_at(stopped)] if stopped else [])], batching=batching, **options)
    trainer.fit(loader, loader)
    if stopped:
        checkpoint = through_file(trainer.state_dict())
        trainer = make_trainer([watch], batching=batching, **options)
        trainer.load_state_dict(checkpoint)
        trainer.fit(loader, loader)
    generator = torch.Generator().manual_seed(derive_seed(seed, 0x0DE2, 0))
    assert seen == rows[list(RandomSampler(range(10), True, 120, generator))].tolist()
    assert trainer.state.step == 40


@pytest.mark.parametrize("loads", [False, True])
def test_a_data_set_that_draws_its_order_knows_the_pass(loads: bool) -> None:
    data: Any = DataLoader(Ordered(), batch_size=4) if loads else Ordered()
    batches = make_batches(data, BatchOptions(batch_size=4), CPU, train=True)
    first, second = drawn(batches, 0), drawn(batches, 1)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(8))
    assert (drawn(batches, 0), drawn(batches, 1)) == (first, second)


def test_a_data_set_with_places_knows_the_pass() -> None:
    batches = make_batches(OfPass(is_open=True), BatchOptions(batch_size=2, shuffle=False), CPU, train=True)
    assert [drawn(batches, epoch) for epoch in (0, 1)] == [[0, 1, 2, 3], [10, 11, 12, 13]]


def test_workers_that_live_on_know_the_pass() -> None:
    how: Any = {"num_workers": 1, "persistent_workers": True, "worker_init_fn": opened}
    batches: Any = make_batches(OfPass(), BatchOptions(batch_size=2, shuffle=False, **how), CPU, train=True)
    assert [drawn(batches, epoch) for epoch in (0, 1)] == [[0, 1, 2, 3], [10, 11, 12, 13]]
    batches.close()


@pytest.mark.parametrize(
    ("data", "open_it"), [(OfPass, opened), (OfPass, opened_by_attribute), (Connected, connected)]
)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_finds_and_sets_what_the_data_set_has(method: str, data: Any, open_it: Any) -> None:
    options = BatchOptions(
        batch_size=2, shuffle=False, num_workers=1, worker_init_fn=open_it, multiprocessing_context=method
    )
    assert drawn(make_batches(data(), options, CPU, train=True), 1) == [10, 11, 12, 13]


def test_what_a_data_set_has_not_is_said_in_its_own_words() -> None:
    batches: Any = make_batches(OfPass(), BatchOptions(batch_size=2), CPU, train=True)
    with pytest.raises(AttributeError, match="'OfPass' object has no attribute 'close'"):
        _ = batches._loader.dataset.close


@pytest.mark.parametrize("make", [lambda data: data, lambda data: DataLoader(data, 2)], ids=["data set", "loader"])
def test_epochs_are_set_for_training_alone(make: Any) -> None:
    """A data set that is trained on and evaluated keeps the epoch of the pass that is under way."""
    both, other = Watched(), Watched()
    in_between = At("on_train_batch_end", lambda trainer: trainer.validate(make(both)))
    trainer = make_trainer([in_between], batching=BatchOptions(batch_size=2))
    trainer.fit(make(both), {"main": make(both), "other": make(other)})
    trainer.predict(make(both))
    assert (both.seen, other.seen) == ([0, 1], [])
