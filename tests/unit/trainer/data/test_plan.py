"""How long a run is and where its epochs end: passes, steps, fractions; data without a length."""

import gc
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, default_collate

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_trainer,
    quick,
    regression,
    through_file,
)
from trainer import BatchOptions, Trainer
from trainer.data.batches import TensorBatches, known_length
from trainer.data.limits import limited
from trainer.data.plan import Plan
from trainer.runner import CallbackRunner
from trainer.state import TrainState


class Unsized(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream that does not say how long it is, and draws noise as it goes."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, target in regression(self.samples):
            yield inputs + 0.1 * torch.rand(4), target


class Overstated(Unsized):
    """A stream that ends before the length that it says."""

    def __len__(self) -> int:
        return 2 * self.samples


def train(data: Any, *callbacks: Any, **options: Any) -> Trainer:
    trainer = make_trainer(callbacks, **options)
    trainer.fit(data, regression(4))
    return trainer


def progress(trainer: Trainer) -> tuple[int, int, int, int]:
    state = trainer.state
    return state.step, state.epoch, state.data_epoch, state.data_batch


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_epochs": None}, "a run needs an end"),
            ({"max_epochs": -1}, "max_epochs is -1"),
            ({"max_epochs": 1, "max_steps": -2}, "max_steps is -2"),
            ({"max_epochs": 1, "validate_every": 0}, "validate_every is 0"),
            ({"max_epochs": 1, "validate_every": 0.0}, r"validate_every is 0\.0"),
            ({"max_epochs": 1, "validate_every": 1.0}, r"validate_every is 1\.0"),
            ({"max_epochs": 1, "validate_every": -0.5}, "validate_every is -0.5"),
            ({"max_epochs": 1, "validate_every": True}, "validate_every is True"),
        ],
    )
    def test_lengths_that_are_none(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Plan(**options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_epochs": 1, "validate_every": 0.5}, "give it in steps"),
            ({"max_steps": 10}, "give validate_every in steps"),
            ({"max_epochs": 2, "validate_every": 2}, "with max_steps"),
        ],
    )
    def test_a_length_that_is_needed_and_not_there(self, options: dict[str, Any], message: str) -> None:
        options = {"max_epochs": None, **options}
        with pytest.raises(ValueError, match=message):
            train(Unsized(8), **options)


class TestLengths:
    # 12 samples in batches of 4: 3 batches a pass.
    @pytest.mark.parametrize(
        ("options", "expected", "planned"),
        [
            ({"max_epochs": 2}, (6, 2, 2, 0), (2, 6)),
            ({"max_epochs": None, "max_steps": 6}, (6, 2, 2, 0), (2, 6)),
            ({"max_epochs": None, "max_steps": 7}, (7, 3, 2, 1), (3, 7)),
            ({"max_epochs": 2, "max_steps": 4}, (4, 2, 1, 1), (2, 4)),
            ({"max_epochs": 2, "max_steps": 100}, (6, 2, 2, 0), (2, 6)),
            ({"max_epochs": 4, "validate_every": 2}, (12, 6, 4, 0), (6, 12)),
            ({"max_epochs": 1, "validate_every": 2}, (3, 2, 1, 0), (2, 3)),
            ({"max_epochs": 2, "validate_every": 5}, (6, 2, 2, 0), (2, 6)),
            ({"max_epochs": None, "max_steps": 9, "validate_every": 4}, (9, 3, 3, 0), (3, 9)),
            ({"max_epochs": 2, "validate_every": 0.34}, (6, 6, 2, 0), (6, 6)),
            ({"max_epochs": 2, "validate_every": 0.7}, (6, 3, 2, 0), (3, 6)),
            ({"max_epochs": 0}, (0, 0, 0, 0), (0, 0)),
        ],
    )
    @pytest.mark.parametrize("kind", ["tensors", "loader"])
    def test_end_where_the_plan_says(
        self, kind: str, options: dict[str, Any], expected: tuple[int, ...], planned: tuple[int, int]
    ) -> None:
        data = regression(12)
        trainer = train(data if kind == "tensors" else DataLoader(data, 4, shuffle=True), **options)
        assert progress(trainer) == expected
        assert (trainer.state.max_epochs, trainer.state.total_steps) == planned
        assert all("val_loss" in metrics for metrics in trainer.state.history)
        assert trainer.finished

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"max_epochs": 2}, (6, 2, 2, 0)),
            ({"max_epochs": None, "max_steps": 9, "validate_every": 4}, (9, 3, 2, 3)),
            ({"max_epochs": None, "max_steps": 10, "validate_every": 4}, (10, 3, 3, 1)),
            ({"max_epochs": 2, "max_steps": 100, "validate_every": 3}, (6, 2, 2, 0)),
            ({"max_epochs": 2, "max_steps": 100, "validate_every": 2}, (6, 3, 2, 0)),
        ],
    )
    def test_end_where_the_plan_says_without_a_known_length(
        self, options: dict[str, Any], expected: tuple[int, ...]
    ) -> None:
        trainer = train(Unsized(12), **options)
        assert progress(trainer) == expected == progress(train(ChainDataset([Unsized(5), Unsized(7)]), **options))
        assert all({"train_loss", "val_loss"} <= metrics.keys() for metrics in trainer.state.history)
        assert trainer.finished

    @pytest.mark.parametrize("make", [lambda data: data, lambda data: DataLoader(data, 4)], ids=["data", "loader"])
    @pytest.mark.parametrize("max_epochs", [1, 2])
    def test_a_pass_that_ends_before_its_length_makes_no_epoch_without_a_batch(
        self, make: Any, max_epochs: int
    ) -> None:
        options: dict[str, Any] = {"max_epochs": max_epochs, "validate_every": 3}
        reference = train(make(Unsized(12)), **options, max_steps=100)
        trainer = train(make(Overstated(12)), **options)
        assert progress(trainer) == progress(reference) == (3 * max_epochs, max_epochs, max_epochs, 0)
        assert_same(frozen(trainer), frozen(reference))

    @quick(60)
    @given(
        batches=st.integers(1, 5),
        max_epochs=st.none() | st.integers(0, 4),
        max_steps=st.none() | st.integers(0, 17),
        every=st.none() | st.integers(1, 7) | st.sampled_from([0.1, 0.34, 0.5, 0.99]),
    )
    def test_what_is_planned_is_what_happens(
        self, batches: int, max_epochs: int | None, max_steps: int | None, every: float | None
    ) -> None:
        if max_epochs is None and max_steps is None:
            return
        trainer = train(regression(4 * batches), max_epochs=max_epochs, max_steps=max_steps, validate_every=every)
        state = trainer.state
        assert state.step == state.total_steps
        assert state.step == min(
            limit
            for limit in (max_steps, None if max_epochs is None else max_epochs * batches)
            if limit is not None
        )
        if every is not None or max_steps is not None or max_epochs is None:
            assert state.epoch == state.max_epochs
        assert state.data_epoch * batches + state.data_batch == state.step
        assert len(state.history) == state.epoch

    @pytest.mark.parametrize("percent", range(1, 100))
    def test_a_fraction_of_a_pass_loses_no_batch_to_rounding(self, percent: int) -> None:
        share, batches = percent / 100, TensorBatches((torch.zeros(100),), 1, torch.device("cpu"))
        assert Plan(max_epochs=1, validate_every=share).epoch_batches(100) == percent
        assert known_length(limited(batches, share, "limit_train_batches")) == percent
        assert Plan(max_epochs=1, validate_every=share).epoch_batches(150) == max(1, 3 * percent // 2)

    def test_an_epoch_may_be_longer_than_a_pass(self) -> None:
        orders: list[Tensor] = []
        watch = At("on_train_batch_start", lambda trainer: orders.append(trainer.state.batch[0].clone()))
        trainer = train(regression(8), watch, max_epochs=None, max_steps=8, validate_every=4)
        assert (trainer.state.epoch, trainer.state.data_epoch) == (2, 4)
        passes = [torch.cat(orders[at : at + 2]) for at in range(0, 8, 2)]
        assert len({tuple(order.flatten().tolist()) for order in passes}) == 4, "each pass has its own order"
        assert all(
            torch.equal(order.sum(0).round(decimals=4), passes[0].sum(0).round(decimals=4)) for order in passes
        )

    def test_a_stopped_epoch_in_a_run_that_counts_steps_does_not_end_the_pass(self) -> None:
        stop = At(
            "on_train_batch_end",
            lambda trainer: trainer.state.stop_epoch(),
            lambda trainer: trainer.state.step == 1,
        )
        trainer = train(regression(16), stop, max_epochs=2, validate_every=3)
        assert progress(trainer) == (8, 4, 2, 0)

    def test_a_run_goes_on_when_its_plan_grows(self) -> None:
        trainer = train(regression(12), max_epochs=None, max_steps=4)
        whole = train(regression(12), max_epochs=None, max_steps=4)
        whole.plan = trainer.plan = Plan(max_epochs=3)
        trainer.fit(regression(12), regression(4))
        assert progress(trainer) == (9, 4, 3, 0)


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "steps across passes": (lambda: regression(11), {"max_steps": 10, "validate_every": 4, "max_epochs": None}),
    "fraction": (lambda: regression(19), {"max_epochs": 2, "validate_every": 0.4}),
    "long epochs": (lambda: regression(7), {"max_steps": 10, "validate_every": 5, "max_epochs": None}),
    "stream": (lambda: Unsized(11), {"max_steps": 10, "validate_every": 2, "max_epochs": None}),
    "stream to its end": (lambda: Unsized(12), {"max_epochs": 3, "max_steps": 99, "validate_every": 3}),
    "shuffling loader": (
        lambda: DataLoader(regression(11), 4, shuffle=True),
        {"max_steps": 10, "validate_every": 2, "max_epochs": None},
    ),
}


class TestResume:
    @pytest.mark.parametrize("kind", RUNS)
    def test_stopped_at_every_batch_it_goes_on_to_the_same_bits(self, kind: str) -> None:
        source, options = RUNS[kind]
        reference = frozen(train(source(), **options))
        steps = reference["state"]["step"]
        assert steps >= 9
        for step in range(1, steps + 1):
            stopped = train(source(), interrupt_at(step), **options)
            resumed = make_trainer(**options)
            resumed.load_state_dict(through_file(stopped.state_dict()))
            resumed.fit(source(), regression(4))
            assert_same(frozen(resumed), reference, f"{kind}, step {step}")

    @pytest.mark.parametrize("kind", RUNS)
    def test_stopped_after_every_epoch_it_goes_on_to_the_same_bits(self, kind: str) -> None:
        source, options = RUNS[kind]
        reference = frozen(train(source(), **options))
        for epoch in range(1, reference["state"]["epoch"] + 1):
            stop = At(
                "on_epoch_end",
                lambda trainer: trainer.state.stop("interrupted"),
                lambda trainer, epoch=epoch: trainer.state.epoch == epoch,
            )
            stopped = train(source(), stop, **options)
            resumed = make_trainer(**options)
            resumed.load_state_dict(through_file(stopped.state_dict()))
            resumed.fit(source(), regression(4))
            assert_same(frozen(resumed), reference, f"{kind}, epoch {epoch}")


class TestBatchSize:
    def test_changes_with_the_next_pass(self) -> None:
        sizes: list[int] = []
        trainer = make_trainer(
            [
                At("on_train_batch_start", lambda trainer: sizes.append(len(trainer.state.batch[0]))),
                At("on_train_epoch_start", lambda trainer: trainer.set_batch_size(6)),
            ]
        )
        trainer.fit(regression(12))
        assert sizes == [4, 4, 4, 6, 6]
        assert trainer.state.batches_per_epoch == 2

    def test_changes_at_once_before_the_first_batch(self) -> None:
        sizes: list[int] = []
        trainer = make_trainer(
            [
                At("on_train_batch_start", lambda trainer: sizes.append(len(trainer.state.batch[0]))),
                At("on_fit_start", lambda trainer: trainer.set_batch_size(6)),
            ],
            max_epochs=1,
        )
        trainer.fit(regression(12))
        assert sizes == [6, 6]

    def test_changes_at_once_where_the_fit_before_failed_ahead_of_its_first_batch(self) -> None:
        sizes: list[int] = []
        failures = [OSError("once")]

        def fail(trainer: Any) -> None:
            raise failures.pop()

        trainer = make_trainer(
            [
                At("on_train_batch_start", lambda trainer: sizes.append(len(trainer.state.batch[0]))),
                At("on_train_epoch_start", fail, lambda trainer: bool(failures)),
                At("on_fit_start", lambda trainer: trainer.set_batch_size(6), lambda trainer: not failures),
            ],
            max_epochs=1,
        )
        with pytest.raises(OSError, match="once"):
            trainer.fit(regression(12))
        trainer.fit(regression(12))
        assert sizes == [6, 6]

    @pytest.mark.parametrize(
        "options",
        [{}, {"collate_fn": default_collate}, {"collate_fn": default_collate, "num_workers": 1}],
        ids=["memory", "loader", "worker"],
    )
    def test_changes_after_any_batch_without_losing_a_sample(self, options: dict[str, Any]) -> None:
        seen: list[list[float]] = []
        data, sizes = regression(12), {1: 2, 2: 3, 4: 1}

        def change(trainer: Any) -> None:
            trainer.set_batch_size(sizes[trainer.state.step], now=True)

        look = At("on_before_forward", lambda trainer: seen.append(trainer.state.batch[1].flatten().tolist()))
        ask = At("on_train_batch_end", change, lambda trainer: trainer.state.step in sizes)
        trainer = make_trainer([look, ask], max_epochs=1, batching=BatchOptions(batch_size=4, **options))
        trainer.fit(data)
        assert [len(batch) for batch in seen] == [4, 2, 3, 3]
        assert sorted(chain.from_iterable(seen)) == sorted(data.tensors[1].flatten().tolist())

    @pytest.mark.parametrize(("every", "expected"), [(None, [3, 3, 3, 3, 2, 4, 4]), (2, [3, 3, 4, 4, 5, 5, 4])])
    def test_changes_at_an_epochs_start(self, every: int | None, expected: list[int]) -> None:
        sizes: list[int] = []

        def change(trainer: Any) -> None:
            trainer.set_batch_size(3 + trainer.state.epoch, now=True)

        look = At("on_train_batch_start", lambda trainer: sizes.append(len(trainer.state.batch[0])))
        ask = At("on_train_epoch_start", change)
        trainer = make_trainer([look, ask], max_epochs=2, max_steps=len(expected), validate_every=every)
        trainer.fit(regression(14))
        assert sizes == expected

    def test_changes_after_a_change_of_the_next_pass(self) -> None:
        seen: list[int] = []
        look = At("on_train_batch_start", lambda trainer: seen.append(len(trainer.state.batch[0])))
        later = At("on_train_epoch_start", lambda trainer: trainer.set_batch_size(6))
        now = At("on_train_batch_end", lambda t: t.set_batch_size(2, now=True), lambda t: t.state.step == 1)
        make_trainer([look, later, now], max_epochs=1).fit(regression(12))
        assert seen == [4, 2, 2, 2, 2]

    @pytest.mark.parametrize("step", [0, 1])
    @pytest.mark.parametrize("event", ["on_train_batch_start", "on_before_backward", "on_after_optimizer_step"])
    def test_does_not_change_while_a_batch_is_under_way(self, event: str, step: int) -> None:
        ask = At(event, lambda t: t.set_batch_size(2, now=True), lambda t: t.state.step == step)
        trainer = make_trainer([ask])
        with pytest.raises(ValueError, match=r"while a batch is under way.*on_train_batch_end"):
            trainer.fit(regression(12))
        assert (trainer.batching.batch_size, trainer.state.cut_batches) == (4, 0)
        trainer.set_batch_size(2, now=True)  # of no fit

    def test_changes_between_two_fits_whatever_the_data_before(self) -> None:
        trainer = make_trainer()
        trainer.fit(DataLoader(regression(12), 4))
        trainer.set_batch_size(6)
        trainer.plan = Plan(max_epochs=3)
        assert trainer.fit(regression(12)).step == 2 * 3 + 2

    def test_changes_behind_a_pass_that_ended_before_its_first_batch(self) -> None:
        stop = At(
            "on_train_epoch_start", lambda t: t.state.stop("interrupted", now=True), lambda t: t.state.epoch == 1
        )
        trainer = make_trainer([stop])
        trainer.fit(regression(12))
        trainer.set_batch_size(6)
        trainer.callbacks = CallbackRunner()
        assert trainer.fit(regression(12)).step == 3 + 2

    def test_of_ready_batches_is_refused(self) -> None:
        trainer = make_trainer([At("on_fit_start", lambda trainer: trainer.set_batch_size(6))])
        with pytest.raises(ValueError, match="hand over its Dataset"):
            trainer.fit(DataLoader(regression(12), 4))


def test_nothing_is_kept_of_the_data_of_a_fit_that_has_ended() -> None:
    data, trainer = regression(12), make_trainer()
    trainer.fit(data)
    kept = weakref.ref(data)
    del data
    gc.collect()
    assert kept() is None


def test_the_state_says_what_is_planned_before_the_first_batch() -> None:
    seen: list[TrainState] = []
    trainer = make_trainer([At("on_fit_start", lambda trainer: seen.append(trainer.state))], max_epochs=3)
    trainer.fit(regression(12))
    assert (seen[0].max_epochs, seen[0].total_steps, seen[0].batches_per_epoch) == (3, 9, 3)
