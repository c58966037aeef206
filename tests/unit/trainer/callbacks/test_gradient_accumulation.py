"""GradientAccumulation: a step of several batches is that of one large batch, wherever the run stops."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.unit.trainer.support import (
    At,
    Recorder,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    quick,
    regression,
    through_file,
)
from trainer import BatchOptions, Trainer
from trainer.callbacks import BatchSizeSchedule, Checkpoint, GradientMonitor, OptimizerMode
from trainer.callbacks.gradient_accumulation import GradientAccumulation
from trainer.callbacks.gradient_clipping import GradientClipping
from trainer.data.plan import Plan


def network() -> nn.Module:
    """A model whose outputs do not depend on the other samples of a batch, in double precision."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def double(samples: int) -> Any:
    data = regression(samples)
    data.tensors = tuple(tensor.double() for tensor in data.tensors)
    return data


class Cut:
    """Ready batches of these sizes, cut from tensors in order; it does not know how many there are."""

    def __init__(self, tensors: tuple[Tensor, ...], *sizes: int) -> None:
        self._tensors, self._sizes = tensors, list(sizes)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[tuple[Tensor, ...]]:
        used = sum(self._sizes)
        parts = [tensor[:used].split(self._sizes) for tensor in self._tensors]
        return iter(list(zip(*parts, strict=True))[skip:])


def train(
    *callbacks: Any, size: int = 4, samples: int = 12, data: Any = None, shuffle: bool = False, **options: Any
) -> Trainer:
    model = network()
    trainer = make_trainer(
        callbacks,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batching=BatchOptions(batch_size=size, shuffle=shuffle),
        seed=5,
        **options,
    )
    trainer.fit(double(samples) if data is None else data, double(7))
    return trainer


def assert_close(one: Trainer, other: Trainer) -> None:
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(value, other.model.state_dict()[name], rtol=1e-10, atol=1e-12)


# ---- equal to a large batch


@quick(15)
@given(samples=st.integers(1, 23), size=st.integers(1, 6), batches=st.integers(1, 5), shuffle=st.booleans())
def test_a_run_is_that_of_batches_so_many_times_as_large(
    samples: int, size: int, batches: int, shuffle: bool
) -> None:
    large = train(size=size * batches, samples=samples, shuffle=shuffle)
    small = train(GradientAccumulation(batches), size=size, samples=samples, shuffle=shuffle)
    assert small.state.step == large.state.step == 2 * math.ceil(samples / (size * batches))
    assert_close(small, large)
    for found, expected in zip(small.state.history, large.state.history, strict=True):
        assert found == pytest.approx(expected)


def test_groups_of_one_change_no_bit() -> None:
    plain, grouped = train(size=4, samples=11), train(GradientAccumulation(1), size=4, samples=11)
    assert_same(frozen(grouped)["model"], frozen(plain)["model"])


@quick(20)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=9), batches=st.integers(1, 4))
def test_batches_of_any_sizes_weigh_what_they_hold(sizes: list[int], batches: int) -> None:
    groups = [sum(sizes[start : start + batches]) for start in range(0, len(sizes), batches)]

    tensors = double(sum(sizes)).tensors
    small = train(GradientAccumulation(batches), data=Cut(tensors, *sizes))
    large = train(data=Cut(tensors, *groups))
    assert small.state.step == large.state.step == 2 * len(groups)
    assert_close(small, large)


def test_a_penalty_that_another_callback_adds_to_the_loss_counts_as_in_one_batch() -> None:
    def penalise(trainer: Any) -> None:
        trainer.state.loss = trainer.state.loss + sum(item.square().sum() for item in trainer.model.parameters())

    penalty = At("on_before_backward", penalise)
    large = train(penalty, size=12, samples=11)
    small = train(penalty, GradientAccumulation(3), size=4, samples=11)
    assert_close(small, large)


def test_monitor_clipping_and_the_recorded_loss_see_the_large_batch() -> None:
    large = train(GradientMonitor(), GradientClipping(max_norm=0.5), size=6, samples=11)
    small = train(GradientMonitor(), GradientClipping(max_norm=0.5), GradientAccumulation(3), size=2, samples=11)
    assert large.state.history[0]["max_grad_norm"] > 0.5
    for found, expected in zip(small.state.history, large.state.history, strict=True):
        assert found == pytest.approx(expected)
    assert_close(small, large)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_other_precisions_accumulate_too(precision: str) -> None:
    def fit(size: int, *callbacks: Any) -> Trainer:
        trainer = make_trainer(
            callbacks,
            model=network().float(),
            batching=BatchOptions(batch_size=size, shuffle=False),
            precision=precision,
            max_epochs=4,
        )
        if precision == "fp16":  # a scale at which no step overflows
            trainer.precision.load_state_dict({**trainer.precision.state_dict(), "scale": 2.0**8})
        trainer.fit(regression(11))
        return trainer

    large, small = fit(6), fit(2, GradientAccumulation(3))
    assert small.state.step == large.state.step
    for name, value in small.model.state_dict().items():
        torch.testing.assert_close(value, large.model.state_dict()[name], rtol=0.05, atol=0.02)
    moved = network().float().state_dict()["0.weight"] - large.model.state_dict()["0.weight"]
    assert moved.abs().max() > 0.03


@pytest.mark.parametrize("then", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("first", ["fp32", "bf16", "fp16"])
def test_a_group_that_is_open_continues_in_another_precision(first: str, then: str) -> None:
    def fit(precision: str, *callbacks: Any, checkpoint: Any = None) -> Trainer:
        trainer = make_trainer(
            [GradientAccumulation(3), *callbacks], model=network().float(), precision=precision, max_epochs=1
        )
        if precision == "fp16":  # a scale at which no step overflows
            trainer.precision.load_state_dict({**trainer.precision.state_dict(), "scale": 2.0**8})
        if checkpoint is not None:
            trainer.load_state_dict(checkpoint)
        trainer.fit(regression(12))
        return trainer

    stop = At(
        "on_train_batch_end",
        lambda trainer: trainer.state.stop("interrupted", now=True),
        lambda trainer: trainer.state.data_batch == 2,
    )
    stopped = fit(first, stop)
    resumed, whole = fit(then, checkpoint=through_file(stopped.state_dict())), fit("fp32")
    assert resumed.state.step == whole.state.step == 1
    for name, value in resumed.model.state_dict().items():
        torch.testing.assert_close(value, whole.model.state_dict()[name], rtol=0.02, atol=0.01)


def test_a_step_that_overflowed_in_fp16_closes_its_group() -> None:
    def fit(*callbacks: Any) -> Trainer:
        trainer = make_trainer(callbacks, model=network().float(), precision="fp16", max_epochs=1)
        trainer.precision.load_state_dict({**trainer.precision.state_dict(), "scale": 2.0**40})
        trainer.fit(regression(16))
        return trainer

    before = network().float().state_dict()
    trainer = fit(GradientAccumulation(2))
    assert trainer.state.step == 0
    assert_same(trainer.model.state_dict(), before)
    assert trainer.precision.state_dict()["scale"] == 2.0**38


# ---- where groups end


def events_of(trainer_log: list[str]) -> list[str]:
    wanted = {"on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end", "on_before_zero_grad"}
    return [event for event in trainer_log if event in wanted]


def test_the_events_of_an_epoch() -> None:
    log: list[str] = []
    train(GradientAccumulation(2), Recorder(log, priority=1), size=4, samples=12, max_epochs=1)
    assert events_of(log) == [
        "on_before_zero_grad",
        "on_train_batch_end",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_before_zero_grad",
        "on_train_batch_end",
        "on_train_epoch_end",
        "on_before_optimizer_step",
    ]


def test_an_epoch_that_is_stopped_takes_its_step_and_leaks_nothing() -> None:
    stop = At(
        "on_train_batch_end",
        lambda trainer: trainer.state.stop_epoch(),
        lambda trainer: trainer.state.batch_index == 3,
    )
    small = train(stop, GradientAccumulation(2), size=2)
    assert small.state.step == 4
    assert_close(small, train(data=Cut(double(12).tensors, 4, 2)))


def test_validation_batches_never_count() -> None:
    def look(trainer: Any) -> None:
        assert trainer.validate(double(5)) != {}

    quiet = train(GradientAccumulation(2), size=4, samples=20)
    asked = train(GradientAccumulation(2), At("on_train_batch_end", look), size=4, samples=20)
    assert quiet.state.step == asked.state.step == 6
    assert_same(asked.model.state_dict(), quiet.model.state_dict())


@pytest.mark.parametrize(("limit", "passes"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_max_steps_counts_steps(limit: int, passes: int) -> None:
    trainer = train(GradientAccumulation(2), size=4, samples=20, max_steps=limit, max_epochs=None)
    assert trainer.state.step == trainer.state.total_steps == limit
    assert len(trainer.state.history) == passes


def test_epochs_of_steps_take_whole_groups_across_passes() -> None:
    trainer = train(GradientAccumulation(2), size=4, samples=12, max_steps=6, max_epochs=None, validate_every=2)
    assert trainer.state.step == 6
    assert len(trainer.state.history) == 3
    four_passes = tuple(torch.cat([tensor] * 4) for tensor in double(12).tensors)
    assert_close(trainer, train(data=Cut(four_passes, *[8] * 6), max_epochs=1))


def test_epochs_that_are_parts_of_a_pass_end_with_a_step() -> None:
    steps: list[int] = []
    trainer = train(
        GradientAccumulation(2),
        At("on_epoch_end", lambda trainer: steps.append(trainer.state.step)),
        size=2,
        samples=12,
        validate_every=0.5,
        max_epochs=2,
    )
    # Epochs of three batches: a group of two, and one of one.
    assert steps == [2, 4, 6, 8]
    assert trainer.state.total_steps == 8


def test_a_scheduler_by_step_goes_with_the_steps() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trainer = make_trainer(
        [GradientAccumulation(2)],
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scheduler_interval="step",
        batching=BatchOptions(batch_size=4),
    )
    trainer.fit(double(12))
    assert scheduler.last_epoch == trainer.state.step == 4
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 16)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_epochs": 3}, 9),
        ({"max_epochs": 3, "max_steps": 7}, 7),
        ({"max_epochs": 3, "max_steps": 12}, 9),
        ({"max_epochs": 3, "max_steps": 30}, 9),
        ({"max_epochs": None, "max_steps": 10}, 10),
        ({"max_epochs": 2, "validate_every": 0.6}, 7),
        ({"max_epochs": 2, "validate_every": 2, "max_steps": 30}, 5),
        ({"max_epochs": 2, "validate_every": 2}, 5),
    ],
)
def test_total_steps_counts_steps_of_five_batches_a_pass(options: dict[str, Any], expected: int) -> None:
    seen: list[int | None] = []
    trainer = train(
        GradientAccumulation(2),
        At("on_fit_start", lambda trainer: seen.append(trainer.state.total_steps)),
        size=4,
        samples=20,
        **options,
    )
    assert seen == [expected]
    assert trainer.state.step == expected


def test_data_without_a_length_has_no_expected_steps_but_takes_them() -> None:
    trainer = train(GradientAccumulation(2), data=Cut(double(12).tensors, 4, 4, 4))
    assert trainer.state.total_steps is None
    assert trainer.state.step == 4


def test_optimizers_with_a_mode_take_the_last_step_in_training_mode() -> None:
    modes: list[bool] = []

    class Moded(torch.optim.SGD):
        training = True

        def train(self) -> None:
            self.training = True

        def eval(self) -> None:
            self.training = False

        def step(self, closure: Any = None) -> Any:
            modes.append(self.training)
            return super().step(closure)

    model = network()
    trainer = make_trainer(
        [OptimizerMode(), GradientAccumulation(2)], model=model, optimizer=Moded(model.parameters(), lr=0.1)
    )
    trainer.fit(double(12), double(4))
    assert modes == [True] * 4


# ---- skips that others ask for


def one_step_on(samples: int, *rows: int) -> Trainer:
    """A run of one step, on these samples of so many."""
    tensors = tuple(tensor[list(rows)] for tensor in double(samples).tensors)
    return train(data=Cut(tensors, len(rows)), max_epochs=1)


def at_batch(*indices: int) -> Any:
    return lambda trainer: trainer.state.data_batch in indices


@pytest.mark.parametrize("event", ["on_train_batch_start", "on_after_forward", "on_before_backward"])
@pytest.mark.parametrize("priority", [1, 50])
def test_a_batch_without_a_backward_pass_is_no_gradient(event: str, priority: int) -> None:
    skip = At(event, lambda trainer: trainer.state.skip("backward"), at_batch(1), priority)
    small = train(GradientAccumulation(3), skip, size=2, samples=8, max_epochs=1)
    assert small.state.step == 1
    assert_close(small, one_step_on(8, 0, 1, 4, 5, 6, 7))


def test_a_group_whose_last_batch_is_skipped_steps_with_what_it_has() -> None:
    skip = At("on_before_backward", lambda trainer: trainer.state.skip("backward"), at_batch(2))
    small = train(GradientAccumulation(3), skip, size=2, samples=6, max_epochs=1)
    assert small.state.step == 1
    assert_close(small, one_step_on(6, 0, 1, 2, 3))


def test_a_skipped_batch_of_another_size_leaves_no_trace() -> None:
    skip = At("on_before_backward", lambda trainer: trainer.state.skip("backward"), at_batch(1))
    small = train(GradientAccumulation(2), skip, data=Cut(double(6).tensors, 4, 2), max_epochs=1)
    assert small.state.step == 1
    assert_close(small, one_step_on(6, 0, 1, 2, 3))


def test_a_group_whose_last_batch_is_left_out_altogether_waits() -> None:
    def leave_out(trainer: Any) -> None:
        trainer.state.skip("backward")
        trainer.state.skip("optimizer_step")

    small = train(
        GradientAccumulation(2), At("on_after_forward", leave_out, at_batch(1)), size=2, samples=6, max_epochs=1
    )
    assert small.state.step == 1
    assert_close(small, one_step_on(6, 0, 1, 4, 5))


@pytest.mark.parametrize("event", ["on_train_batch_start", "on_before_optimizer_step"])
@pytest.mark.parametrize("priority", [1, 50])
def test_a_skipped_step_drops_its_group(event: str, priority: int) -> None:
    skip = At(event, lambda trainer: trainer.state.skip("optimizer_step"), at_batch(1), priority)
    small = train(GradientAccumulation(2), skip, size=2, samples=8, max_epochs=1)
    assert small.state.step == 1
    assert_close(small, one_step_on(8, 4, 5, 6, 7))


@pytest.mark.parametrize(("event", "priority"), [("on_train_epoch_end", 1), ("on_before_optimizer_step", 50)])
def test_a_skipped_last_step_leaks_nothing_into_the_next_epoch(event: str, priority: int) -> None:
    skip = At(
        event,
        lambda trainer: trainer.state.skip("optimizer_step"),
        lambda trainer: trainer.state.epoch == 0 and trainer.state.batch_index == 3,
        priority,
    )
    small = train(GradientAccumulation(2), skip, size=2, samples=6, max_epochs=2)
    assert small.state.step == 3

    kept = tuple(torch.cat([tensor[:4], tensor]) for tensor in double(6).tensors)
    assert_close(small, train(data=Cut(kept, 4, 4, 2), max_epochs=1))


# ---- errors, after which the fit is called again


def after_an_error(event: str, batch: int, priority: int, *others: Any) -> Trainer:
    """A run of five batches, three a step, in one of which a hook fails once."""
    failures = [OSError("once")]

    def fail(trainer: Any, *_: Any) -> None:
        if failures and trainer.state.data_batch == batch:
            raise failures.pop()

    model = network()
    trainer = make_trainer(
        [GradientAccumulation(3), At(event, fail, priority=priority), *others],
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batching=BatchOptions(batch_size=2, shuffle=False),
        max_epochs=1,
    )
    with pytest.raises(OSError, match="once"):
        trainer.fit(double(10))
    trainer.fit(double(10))
    return trainer


@pytest.mark.parametrize(
    ("event", "batch", "priority", "groups"),
    [
        ("on_before_forward", 1, 50, [(0, 6), (6, 10)]),  # it is trained again
        ("on_before_backward", 1, 50, [(4, 10)]),
        ("on_after_backward", 1, 1, [(4, 10)]),  # its gradients are there, but it does not count
        ("on_after_backward", 1, 50, [(0, 6), (6, 10)]),
        ("on_before_optimizer_step", 2, 1, [(6, 10)]),
        ("on_before_optimizer_step", 2, 50, [(6, 10)]),
    ],
)
def test_an_error_in_a_backward_pass_or_a_step_drops_the_open_group_and_any_other_keeps_it(
    event: str, batch: int, priority: int, groups: list[tuple[int, int]]
) -> None:
    found = after_an_error(event, batch, priority)
    tensors = tuple(torch.cat([item[begin:end] for begin, end in groups]) for item in double(10).tensors)
    expected = train(data=Cut(tensors, *(end - begin for begin, end in groups)), max_epochs=1)
    assert found.state.step == expected.state.step == len(groups)
    assert_close(found, expected)


def test_an_error_after_a_batch_without_a_backward_pass_keeps_the_group() -> None:
    skip = At("on_before_backward", lambda trainer: trainer.state.skip("backward"), at_batch(1))
    found = after_an_error("on_before_forward", 2, 50, skip)
    tensors = tuple(item[[0, 1, *range(4, 10)]] for item in double(10).tensors)
    assert_close(found, train(data=Cut(tensors, 6, 2), max_epochs=1))


# ---- losses whose batches weigh differently

ENOUGH = torch.tensor([0.1, 1.0, 20.0], dtype=torch.double)


def labels(samples: int) -> Any:
    """Rare classes and ignored targets come late and in rows."""
    inputs = double(samples).tensors[0]
    at = torch.arange(samples)
    return inputs, torch.where(at % 7 < 3, -100, (3 * at // samples) % 3)


def classified(*callbacks: Any, data: Any, loss: Any = None, **options: Any) -> Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    trainer = make_trainer(
        callbacks,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss=loss or nn.CrossEntropyLoss(weight=ENOUGH),
        **options,
    )
    trainer.fit(data)
    return trainer


@quick(20)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=9),
    batches=st.integers(1, 4),
    smoothing=st.sampled_from([0.0, 0.1]),
    reduction=st.sampled_from(["mean", "sum"]),
)
def test_batches_weigh_what_their_targets_do(
    sizes: list[int], batches: int, smoothing: float, reduction: str
) -> None:
    loss = nn.CrossEntropyLoss(ENOUGH, label_smoothing=smoothing, reduction=reduction)
    groups = [sum(sizes[start : start + batches]) for start in range(0, len(sizes), batches)]
    data = labels(sum(sizes))
    small = classified(GradientAccumulation(batches), data=Cut(data, *sizes), loss=loss)
    large = classified(data=Cut(data, *groups), loss=loss)
    assert small.state.step == large.state.step
    assert_close(small, large)
    for found, expected in zip(small.state.history, large.state.history, strict=True):
        assert found == pytest.approx(expected, nan_ok=True)


def test_a_group_without_any_weight_takes_the_step_of_such_a_batch() -> None:
    inputs, targets = double(6).tensors[0], torch.full((6,), -100)
    small = classified(GradientAccumulation(2), data=Cut((inputs, targets), 3, 3), max_epochs=1)
    assert_close(small, classified(data=Cut((inputs, targets), 6), max_epochs=1))
    assert math.isnan(small.state.metrics["train_loss"])


def test_a_weighted_penalty_counts_once_for_the_group() -> None:
    def penalise(trainer: Any) -> None:
        trainer.state.loss = trainer.state.loss + sum(item.square().sum() for item in trainer.model.parameters())

    penalty, data = At("on_before_backward", penalise), labels(11)
    small = classified(penalty, GradientAccumulation(3), data=Cut(data, 5, 4, 2))
    assert_close(small, classified(penalty, data=Cut(data, 11)))


def test_a_batch_whose_backward_pass_is_skipped_has_no_weight() -> None:
    skip = At("on_before_backward", lambda trainer: trainer.state.skip("backward"), at_batch(0))
    data = labels(12)
    small = classified(GradientAccumulation(3), skip, data=Cut(data, 4, 4, 4), max_epochs=1)
    assert_close(small, classified(data=Cut(tuple(item[4:] for item in data), 8), max_epochs=1))


def test_a_weighted_group_goes_on_to_the_same_bits() -> None:
    options: dict[str, Any] = {"data": Cut(labels(21), *[3] * 7), "max_epochs": 2}
    whole = frozen(classified(GradientAccumulation(3), **options))
    for batches in range(1, 14):
        stopped = classified(GradientAccumulation(3), stop_behind(batches), **options)
        resumed = make_trainer(
            [GradientAccumulation(3)],
            model=stopped.model,
            optimizer=stopped.optimizer,
            loss=nn.CrossEntropyLoss(weight=ENOUGH),
        )
        resumed.load_state_dict(through_file(stopped.state_dict()))
        resumed.fit(options["data"])
        assert_same(frozen(resumed), whole)


# ---- resuming

BATCHES = 7


def resumable(*callbacks: Any, checkpoint: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """Seven batches a pass, the last one smaller, in groups of three: a model with dropout and batch norm."""
    model = make_model(99 if checkpoint else 7)
    options.setdefault("max_epochs", 2)
    trainer = make_trainer(
        [GradientMonitor(), GradientClipping(max_norm=0.5), GradientAccumulation(3), *callbacks],
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        batching=BatchOptions(batch_size=3),
        seed=5,
        **options,
    )
    if checkpoint is not None:
        trainer.load_state_dict(checkpoint)
    trainer.fit(regression(20), regression(9, seed=8))
    return trainer


def stop_behind(batches: int) -> At:
    count = iter(range(1, 100))
    return At(
        "on_train_batch_end",
        lambda trainer: trainer.state.stop("interrupted", now=True),
        lambda trainer: next(count) == batches,
    )


RUNS: dict[str, dict[str, Any]] = {
    "passes": {},
    "parts of a pass": {"validate_every": 0.6},
    "steps": {"validate_every": 2, "max_steps": 5, "max_epochs": None},
    "fp16": {"precision": "fp16"},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_to_the_same_bits_from_any_batch(name: str) -> None:
    whole = frozen(resumable(**RUNS[name]))
    for batches in range(1, 2 * BATCHES + 1):
        stopped = resumable(stop_behind(batches), **RUNS[name])
        checkpoint = through_file(stopped.state_dict())
        is_open = checkpoint["callbacks"]["GradientAccumulation"]["gradients"] > 0
        assert is_open == (checkpoint["callbacks"]["GradientAccumulation"]["open"] is not None)
        assert_same(frozen(resumable(checkpoint=checkpoint, **RUNS[name])), whole)


def test_stopping_inside_a_group_keeps_its_gradients() -> None:
    state = resumable(stop_behind(2)).state_dict()["callbacks"]["GradientAccumulation"]
    assert (state["gradients"], state["weight"]) == (2, 6)
    assert any(gradient.abs().max() > 0 for gradient in state["open"])


def test_a_checkpoint_that_was_loaded_and_saved_again_is_as_good_and_stays_as_it_is() -> None:
    checkpoint = through_file(resumable(stop_behind(5)).state_dict())
    copied = copy.deepcopy(checkpoint)
    callback = GradientAccumulation(3)
    callback.load_state_dict(checkpoint["callbacks"]["GradientAccumulation"])
    assert_same(callback.state_dict(), copied["callbacks"]["GradientAccumulation"])
    resumed = resumable(checkpoint=checkpoint)
    assert_same(checkpoint["callbacks"], copied["callbacks"])
    assert_same(frozen(resumed), frozen(resumable()))


def test_the_same_trainer_goes_on_inside_a_group_and_may_be_set_back() -> None:
    stop = interrupt_at(1, 3)
    trainer = make_trainer([GradientAccumulation(2), stop], model=network(), max_epochs=3)
    for _ in range(6):
        trainer.fit(double(20))
    plain = make_trainer([GradientAccumulation(2)], model=network(), max_epochs=3)
    start = through_file(plain.state_dict())
    plain.fit(double(20))
    assert trainer.state.step == plain.state.step == 9
    assert_same(trainer.model.state_dict(), plain.model.state_dict())

    inside = make_trainer([GradientAccumulation(4), stop_behind(3)], model=network(), max_epochs=3)
    inside.fit(double(20))
    assert inside.state.batch_index == 3
    inside.load_state_dict(start)
    inside.fit(double(20))
    fours = make_trainer([GradientAccumulation(4)], model=network(), max_epochs=3)
    fours.fit(double(20))
    assert_same(inside.model.state_dict(), fours.model.state_dict())


def test_it_survives_any_use(tmp_path: Any) -> None:
    callback = GradientAccumulation(2)
    trainer = make_trainer([callback, Checkpoint(tmp_path)])
    trainer.fit(regression(), regression())
    trainer.plan = Plan(max_epochs=4)
    assert trainer.fit(regression(), regression()).step == 8
    assert trainer.validate(regression())["val_loss"] > 0
    callback.teardown(trainer)
    callback.teardown(trainer)
    fresh = GradientAccumulation(2)
    fresh.load_state_dict(through_file(GradientAccumulation(2).state_dict()))
    assert make_trainer([fresh]).test(regression())["test_loss"] > 0


@pytest.mark.parametrize("batches", [0, -3])
def test_it_refuses_groups_of_nothing(batches: int) -> None:
    with pytest.raises(ValueError, match=f"batches is {batches}: give the number of batches a step, at least 1"):
        GradientAccumulation(batches)


@pytest.mark.parametrize("drop_last", [False, True])
def test_what_an_epoch_leaves_over_makes_a_step_or_none(drop_last: bool) -> None:
    trainer = make_trainer([GradientAccumulation(2, drop_last=drop_last)], max_epochs=3)
    state = trainer.fit(regression(20))  # five batches
    assert (state.step, state.total_steps) == ((6, 6) if drop_last else (9, 9))


def test_an_epoch_that_would_drop_all_of_its_batches_is_refused() -> None:
    trainer = make_trainer([GradientAccumulation(6, drop_last=True)])
    with pytest.raises(ValueError, match="an epoch has 5 batches, fewer than the 6 of a step"):
        trainer.fit(regression(20))
    assert make_trainer([GradientAccumulation(5, drop_last=True)], max_epochs=3).fit(regression(20)).step == 3


def test_a_later_epoch_that_would_drop_all_of_its_batches_is_refused() -> None:
    """A run whose length is given in steps would never come to its end."""
    larger = At("on_epoch_end", lambda trainer: trainer.set_batch_size(10))
    trainer = make_trainer([larger, GradientAccumulation(5, drop_last=True)], max_epochs=3)
    with pytest.raises(ValueError, match="an epoch has 2 batches, fewer than the 5 of a step"):
        trainer.fit(regression(20))
    assert (trainer.state.epoch, trainer.state.step) == (1, 1)


@pytest.mark.parametrize("length", [{"max_epochs": 2}, {"max_epochs": None, "max_steps": 2}])
def test_one_that_a_schedule_of_batch_sizes_plans_is_refused_before_the_first_batch(
    length: dict[str, Any],
) -> None:
    def build(begin: int) -> Trainer:
        sizes = BatchSizeSchedule({0: 4, begin: 10, 3: 2})
        return make_trainer([sizes, GradientAccumulation(5, drop_last=True)], **length)

    trainer = build(1)
    with pytest.raises(ValueError, match="an epoch has 2 batches, fewer than the 5 of a step"):
        trainer.fit(regression(20))
    assert (trainer.state.epoch, trainer.state.step, trainer.state.batch_size) == (0, 0, 4)
    assert build(2).fit(regression(20)).step == 2  # the run is over by then


def test_dropped_gradients_are_in_no_later_step() -> None:
    seen: list[list[bool]] = []
    kept = At(
        "on_before_backward",
        lambda trainer: seen.append([parameter.grad is None for parameter in trainer.model.parameters()]),
        lambda trainer: trainer.state.batch_index == 0,
    )
    make_trainer([GradientAccumulation(2, drop_last=True), kept], max_epochs=2).fit(regression(12))
    assert all(all(each) for each in seen)
    assert len(seen) == 2
