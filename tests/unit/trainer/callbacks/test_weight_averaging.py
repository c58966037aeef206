"""WeightAveraging: the mean of exactly the last steps, in what is evaluated and saved."""

import logging
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, IterableDataset

from tests.unit.trainer.callbacks.reads import no_reads_inside_a_step
from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    regression,
    through_file,
)
from trainer import Callback, Trainer
from trainer.callbacks.weight_averaging import WeightAveraging
from trainer.checkpoint.manager import snapshot
from trainer.data.plan import Plan

EPOCHS, BATCHES = 4, 3
STEPS = EPOCHS * BATCHES


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Data without a length."""

    def __iter__(self) -> Any:
        return iter([regression()[index] for index in range(12)])


class Weights(Callback):
    """Keeps the weights after each step, and those that each epoch ended with."""

    priority = 11

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.ends: list[dict[str, Tensor]] = []

    def on_after_optimizer_step(self, trainer: Any) -> None:
        self.steps.append(taken(trainer))

    def on_epoch_end(self, trainer: Any) -> None:
        self.ends.append(taken(trainer))


def taken(trainer: Any) -> dict[str, Tensor]:
    state: dict[str, Tensor] = snapshot(trainer.model.state_dict())
    return {name: value for name, value in state.items() if value.is_floating_point()}


def mean(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([state[name].double() for state in states]).mean(dim=0) for name in states[0]}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in one.items():
        assert torch.allclose(value.double(), other[name].double(), rtol=1e-5, atol=1e-6), name


def build(*callbacks: Callback, seed: int = 7, **options: Any) -> Trainer:
    model = options.pop("model", None) or make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return make_trainer(callbacks, model=model, optimizer=optimizer, **{"max_epochs": EPOCHS, **options})


def fit(trainer: Trainer) -> Trainer:
    trainer.fit(regression(), regression(9, seed=8))
    return trainer


@cache
def whole() -> dict[str, Any]:
    return frozen(fit(build(WeightAveraging(5))))


@pytest.mark.parametrize(
    ("last_steps", "count"),
    [(1, 1), (5, 5), (STEPS, STEPS), (1000, STEPS), (0.25, 3), (0.5, 6), (0.01, 1), (0.99, STEPS)],
)
def test_the_model_ends_with_the_mean_of_the_last_steps(last_steps: float, count: int) -> None:
    watch = Weights()
    averaging = WeightAveraging(last_steps)
    trainer = fit(build(averaging, watch))
    assert averaging.state_dict()["updates"] == count
    assert_close(taken(trainer), mean(watch.steps[-count:]))
    assert trainer.validate(regression(9, seed=8))["val_loss"] == trainer.state.metrics["val_loss"]


def test_epochs_before_the_start_are_those_of_training() -> None:
    watch = Weights()
    fit(build(WeightAveraging(5), watch))
    for epoch in (1, 2):
        assert_same(watch.ends[epoch - 1], watch.steps[epoch * BATCHES - 1])
    assert_close(watch.ends[2], mean(watch.steps[7:9]))
    assert_close(watch.ends[3], mean(watch.steps[7:12]))


def test_training_does_not_notice() -> None:
    one, other = Weights(), Weights()
    fit(build(WeightAveraging(5), one))
    fit(build(other))
    assert_same(one.steps, other.steps)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
@pytest.mark.parametrize("now", [True, False])
def test_a_run_stopped_anywhere_goes_on_to_the_same_bits(step: int, now: bool) -> None:
    stopped = fit(build(WeightAveraging(5), interrupt_at(step, now=now)))
    resumed = build(WeightAveraging(5), seed=99)
    resumed.load_state_dict(through_file(stopped.state_dict()))
    assert_same(frozen(fit(resumed)), whole())
    assert_same(frozen(fit(stopped)), whole())


def test_a_resumed_run_with_a_longer_plan_averages_its_own_last_steps() -> None:
    watch = Weights()
    trainer = fit(build(WeightAveraging(5), watch, max_epochs=2))
    trainer.plan = Plan(max_epochs=EPOCHS)
    fit(trainer)
    assert_close(taken(trainer), mean(watch.steps[-5:]))
    assert_same(frozen(trainer)["model"], whole()["model"])


@pytest.mark.parametrize(("last_steps", "longer"), [(5, 10), (0.5, 10), (5, 12)])
def test_steps_that_a_longer_plan_no_longer_counts_are_in_no_mean(last_steps: float, longer: int) -> None:
    watch = Weights()
    trainer = fit(build(WeightAveraging(last_steps), watch, max_epochs=None, max_steps=8))
    trainer.plan = Plan(max_epochs=None, max_steps=longer)
    fit(trainer)
    assert_close(taken(trainer), mean(watch.steps[8:]))


def test_a_plan_in_steps_is_one_even_without_a_length() -> None:
    watch = Weights()
    trainer = build(WeightAveraging(0.5), watch, max_epochs=None, max_steps=8, validate_every=4)
    trainer.fit(Stream(), regression(9, seed=8))
    assert_close(taken(trainer), mean(watch.steps[4:8]))


def test_a_run_of_unknown_length_is_refused() -> None:
    trainer = build(WeightAveraging(3), max_epochs=2)
    with pytest.raises(
        ValueError,
        match=r"last_steps is 3, but the number of steps of this run is unknown, because .*: give max_steps",
    ):
        trainer.fit(Stream(), regression())
    assert trainer.state.step == 0


def test_a_batch_size_set_at_the_start_of_the_fit_counts() -> None:
    watch = Weights()
    smaller = At("on_fit_start", lambda trainer: trainer.set_batch_size(2))
    trainer = fit(build(WeightAveraging(4), watch, smaller))
    assert trainer.state.step == 2 * STEPS
    assert_close(taken(trainer), mean(watch.steps[-4:]))


def test_a_run_that_ends_early_keeps_what_was_averaged(caplog: pytest.LogCaptureFixture) -> None:
    watch = Weights()
    stop = At("on_epoch_end", lambda t: t.state.stop("early_stopping"), lambda t: t.state.epoch == 3)
    trainer = fit(build(WeightAveraging(5), watch, stop))
    assert_close(taken(trainer), mean(watch.steps[7:9]))
    assert not caplog.records


def test_a_run_that_ends_before_the_start_keeps_its_weights_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = Weights()
    stop = At("on_epoch_end", lambda t: t.state.stop("early_stopping"), lambda t: t.state.epoch == 2)
    trainer = fit(build(WeightAveraging(5), watch, stop))
    assert_same(taken(trainer), watch.steps[-1])
    assert "no weights were averaged: the run ended after 6 of 12 planned steps" in caplog.text
    assert "begins after 7" in caplog.text


@pytest.mark.parametrize("reason", ["interrupted", "diverged", "pruned"])
def test_a_run_without_use_for_an_average_says_nothing(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    stop = At("on_epoch_end", lambda t: t.state.stop(reason), lambda t: t.state.epoch == 1)
    fit(build(WeightAveraging(5), stop))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_statistics_of_the_mean_can_be_made_after_the_fit() -> None:
    trainer = fit(build(WeightAveraging(5)))
    before = taken(trainer)
    update_bn(DataLoader(regression(), 12), trainer.model)
    after = taken(trainer)
    inputs = regression().tensors[0]
    hidden = torch.nn.functional.linear(inputs, after["0.weight"], after["0.bias"])
    assert torch.allclose(after["1.running_mean"], hidden.mean(dim=0), atol=1e-6)
    assert not torch.allclose(before["1.running_mean"], after["1.running_mean"])


def test_no_step_reads_from_the_device() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    callbacks = [*no_reads_inside_a_step(), WeightAveraging(0.9)]
    assert fit(make_trainer(callbacks, model=model, optimizer=optimizer)).finished


def test_nothing_happens_without_a_fit_or_a_step() -> None:
    averaging = WeightAveraging()
    trainer = build(averaging, max_epochs=0)
    before = taken(trainer)
    trainer.test(regression())
    fit(trainer)
    averaging.teardown(trainer)
    assert_same(taken(trainer), before)


@pytest.mark.parametrize("last_steps", [0, -3, 0.0, 1.0, 1.5, -0.5, float("nan"), True, "3"])
def test_what_is_neither_steps_nor_a_share_is_refused(last_steps: Any) -> None:
    with pytest.raises(ValueError, match=r"last_steps is .*: give steps"):
        WeightAveraging(last_steps)
