"""LRFinder: the rates it tries, what it suggests, and a trainer that is left as it was."""

import copy
import logging
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

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
from trainer.callbacks import EarlyStopping, GradientMonitor, LossPrediction
from trainer.callbacks.gradient_accumulation import GradientAccumulation
from trainer.callbacks.lr_finder import LRFinder
from trainer.data.random_state import rng_state, seed_all


def scripted(losses: Any, finder: LRFinder, **options: Any) -> Trainer:
    """A run whose loss at batch i is ``losses(i)``."""
    count = iter(range(10**6))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        zero = sum(parameter.sum() * 0 for parameter in model.parameters())
        loss: torch.Tensor = zero + torch.tensor(float(losses(next(count))), dtype=torch.float64)
        return loss

    trainer = make_trainer([finder], model=nn.Linear(4, 1), step=step, **options)
    trainer.fit(regression(), regression())
    return trainer


# ---- what it does


def test_rates_grow_exponentially_from_the_first_batch_to_the_last() -> None:
    seen: list[float] = []
    finder = LRFinder(1e-4, 1.0, steps=9, divergence=math.inf)
    trainer = make_trainer(
        [finder, At("on_before_optimizer_step", lambda t: seen.append(t.optimizer.param_groups[0]["lr"]))],
        model=nn.Linear(4, 1),
    )
    trainer.fit(regression(16))
    assert seen == pytest.approx([10 ** (-4 + step / 2) for step in range(9)])
    assert finder.learning_rates == seen
    assert len(finder.losses) == len(finder.smoothed_losses) == 9


def test_losses_are_those_before_each_step() -> None:
    finder = LRFinder(0.01, 0.02, steps=3)
    trainer = make_trainer([finder], model=nn.Linear(4, 1))
    twin = make_trainer(model=nn.Linear(4, 1), max_epochs=1)
    twin.model.load_state_dict(trainer.model.state_dict())
    trainer.fit(regression())
    losses: list[float] = []
    twin.callbacks.add(At("on_after_forward", lambda t: losses.append(t.state.loss.item())))
    rates = iter(finder.learning_rates)
    twin.callbacks.add(At("on_train_batch_start", lambda t: t.optimizer.param_groups[0].update(lr=next(rates))))
    twin.fit(regression())
    assert finder.losses == losses


def test_groups_keep_their_ratios() -> None:
    model = nn.Linear(4, 1)
    groups = [{"params": [model.weight], "lr": 0.02}, {"params": [model.bias], "lr": 0.1}]
    seen: list[list[float]] = []
    finder = LRFinder(1e-4, 1e-2, steps=3)
    trainer = make_trainer(
        [finder, At("on_after_forward", lambda t: seen.append([g["lr"] for g in t.optimizer.param_groups]))],
        model=model,
        optimizer=torch.optim.SGD(groups, lr=1.0),
    )
    trainer.fit(regression())
    assert seen == [pytest.approx([rate, 5 * rate]) for rate in (1e-4, 1e-3, 1e-2)]
    assert finder.learning_rates == pytest.approx([1e-4, 1e-3, 1e-2])
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.02, 0.1]


def test_a_rate_in_a_tensor_and_a_scheduler_that_begins_low_do_no_harm() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    finder = LRFinder(1e-4, 1e-2, steps=3)
    trainer = make_trainer(
        [finder], model=model, optimizer=optimizer, scheduler=scheduler, scheduler_interval="step"
    )
    trainer.fit(regression())
    assert finder.learning_rates == pytest.approx([1e-4, 1e-3, 1e-2])
    assert float(optimizer.param_groups[0]["lr"]) == 0.0
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize("options", [{"max_epochs": 1}, {"max_steps": 2}, {"max_epochs": 2, "validate_every": 2}])
def test_the_trainers_own_length_does_not_end_it(options: dict[str, Any]) -> None:
    finder = LRFinder(steps=11)
    log: list[str] = []
    trainer = make_trainer([finder, Recorder(log)], model=nn.Linear(4, 1), **options)
    trainer.fit(regression(), regression())
    assert len(finder.losses) == 11
    assert "on_validation_start" not in log
    assert trainer.state.step == trainer.state.epoch == 0


def test_it_ends_where_the_loss_exceeds_four_times_its_best() -> None:
    finder = LRFinder(steps=9, smoothing=1.0)
    scripted([2.0, 1.0, 3.9, 4.0, 4.1, 9.0].__getitem__, finder)
    assert finder.losses == [2.0, 1.0, 3.9, 4.0, 4.1]
    finder = LRFinder(steps=9, smoothing=1.0, divergence=2.0)
    scripted([2.0, 1.0, 1.9, 2.1, 9.0].__getitem__, finder)
    assert finder.losses == [2.0, 1.0, 1.9, 2.1]


def test_losses_below_zero_diverge_by_their_magnitude() -> None:
    finder = LRFinder(steps=9, smoothing=1.0)
    scripted([-1.0, -2.0, -1.0, 3.9, 4.1, 0.0].__getitem__, finder)
    assert finder.losses == [-1.0, -2.0, -1.0, 3.9, 4.1]


def test_it_goes_on_to_the_end_if_told_so() -> None:
    finder = LRFinder(steps=20, divergence=math.inf)
    scripted(lambda step: 2.0**step, finder)
    assert len(finder.losses) == 20


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_it_ends_where_the_loss_is_no_number(bad: float) -> None:
    finder = LRFinder(steps=9, divergence=math.inf)
    scripted([3.0, 2.0, 1.5, bad, 1.0].__getitem__, finder)
    assert len(finder.losses) == 4
    assert finder.suggestion is not None


# ---- what it suggests


@quick(40)
@given(st.lists(st.floats(0.5, 1.5), min_size=2, max_size=30), st.floats(0.01, 1.0))
def test_the_smoothed_loss_is_the_weighted_mean_of_what_came_before(losses: list[float], smoothing: float) -> None:
    finder = LRFinder(steps=len(losses), smoothing=smoothing)
    scripted(losses.__getitem__, finder)
    for end, found in enumerate(finder.smoothed_losses, start=1):
        weights = (1 - smoothing) ** np.arange(end)[::-1]
        assert found == pytest.approx(float(np.average(losses[:end], weights=weights)))


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    finder = LRFinder(1e-6, 1.0, steps=61, smoothing=1.0)
    scripted(lambda step: 2 - math.tanh((step - 30) / 6) + 0.002 * max(0, step - 45) ** 2, finder)
    assert finder.suggestion == pytest.approx(1e-3, rel=0.3)


@pytest.mark.parametrize("seed", range(20))
def test_what_the_losses_do_by_chance_is_no_suggestion(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0, 2.5, 100)
    finder = LRFinder(1e-6, 10.0, steps=100, divergence=math.inf)
    scripted(lambda step: 5.5 - 4.5 * math.tanh((step - 70) / 6) + noise[step] * (step < 70), finder)
    assert finder.suggestion in finder.learning_rates[61:90]


def test_a_fall_behind_the_minimum_is_no_suggestion() -> None:
    losses = [3.0, 3.0, 2.9, 2.5, 1.0, 0.9, 3.5, 1.0, 1.0]
    finder = LRFinder(steps=9, smoothing=1.0)
    scripted(losses.__getitem__, finder)
    assert finder.suggestion == finder.learning_rates[3]


@pytest.mark.parametrize("losses", [[1.0, 1.1, 1.2, 1.3], [1.0, 1.0, 1.0, 1.0], [math.nan] * 4])
def test_without_a_fall_there_is_a_warning_and_no_suggestion(
    losses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    finder = LRFinder(steps=4, smoothing=1.0)
    with caplog.at_level(logging.WARNING):
        scripted(losses.__getitem__, finder)
    assert finder.suggestion is None
    assert "the loss never fell: begin lower, or take more steps" in caplog.text


def test_it_finds_a_rate_that_trains_a_real_model() -> None:
    torch.manual_seed(2)
    model = nn.Linear(4, 1)
    finder = LRFinder(1e-5, 10.0, steps=80)
    trainer = make_trainer(model=model, max_epochs=4, batching=BatchOptions(batch_size=32))
    with trainer.callbacks.add(finder):
        trainer.fit(regression(256))
    assert len(finder.losses) < 80
    assert finder.suggestion is not None
    assert 1e-3 < finder.suggestion < 1
    for group in trainer.optimizer.param_groups:
        group["lr"] = finder.suggestion
    history = trainer.fit(regression(256)).history
    assert history[-1]["train_loss"] < 0.5 * history[0]["train_loss"]


# ---- a trainer that is left as it was


def build(*callbacks: Any, **options: Any) -> Trainer:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return make_trainer(
        [GradientMonitor(), LossPrediction(min_epochs=1), EarlyStopping(patience=9), *callbacks],
        model=model,
        optimizer=optimizer,
        scheduler=OneCycleLR(optimizer, 0.1, total_steps=20),
        scheduler_interval="step",
        seed=5,
        max_epochs=3,
        **options,
    )


def everything(trainer: Trainer) -> dict[str, Any]:
    state = through_file(trainer.state_dict())
    state["modes"] = [module.training for module in trainer.model.modules()]
    state["generators"] = rng_state()
    state["gradients"] = copy.deepcopy([parameter.grad for parameter in trainer.model.parameters()])
    state["requests"] = [trainer.state.epoch_stopped, sorted(trainer.state.skips)]
    return state


def find(trainer: Trainer, **arguments: Any) -> LRFinder:
    finder = LRFinder(**{"steps": 7, "divergence": math.inf, **arguments})
    with trainer.callbacks.add(finder):
        trainer.fit(regression(), regression(9, seed=8))
    return finder


def prepared(kind: str) -> Trainer:
    """A trainer before its run, at the end of an epoch, inside an epoch, or inside a group of batches."""
    if kind == "new":
        return build()
    callbacks = [GradientAccumulation(2)] if kind == "inside a group" else []
    step = {"at an epoch's end": 3, "inside an epoch": 4, "inside a group": 1}[kind]
    stop = interrupt_at(step)
    if kind == "inside a group":
        stop = At(
            "on_train_batch_end",
            lambda trainer: trainer.state.stop("interrupted", now=True),
            lambda trainer: trainer.state.step == 0,
        )
    trainer = build(*callbacks)
    with trainer.callbacks.add(stop):
        trainer.fit(regression(), regression(9, seed=8))
    return trainer


@pytest.mark.parametrize("kind", ["new", "at an epoch's end", "inside an epoch", "inside a group"])
def test_everything_is_as_before_and_the_run_goes_on_to_the_same_bits(kind: str) -> None:
    plain, trainer = prepared(kind), prepared(kind)
    trainer.model.eval()
    seed_all(77)
    random.random()
    before = everything(trainer)
    finder = find(trainer)
    assert len(finder.losses) == 7
    assert_same(everything(trainer), before)
    for one in (plain, trainer):
        one.fit(regression(), regression(9, seed=8))
    assert_same(frozen(trainer), frozen(plain))


@pytest.mark.parametrize("event", ["on_before_optimizer_step", "on_train_batch_end", "on_epoch_end"])
def test_after_an_error_too(event: str) -> None:
    def fail(trainer: Any) -> None:
        raise ZeroDivisionError

    trainer = build()
    before = everything(trainer)
    with (
        trainer.callbacks.add(At(event, fail, lambda t: t.state.history or t.state.step >= 2)),
        pytest.raises(ZeroDivisionError),
    ):
        find(trainer)
    assert_same(everything(trainer), before)


def test_a_loss_that_is_no_number_leaves_nothing_behind() -> None:
    trainer = build()
    before = everything(trainer)
    finder = find(trainer, max_lr=1e30, steps=30, divergence=math.inf)
    assert not all(math.isfinite(loss) for loss in finder.losses)
    assert_same(everything(trainer), before)


def test_schedulers_wait() -> None:
    for interval in ("epoch", "step"):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = CosineAnnealingLR(optimizer, 4)
        log: list[str] = []
        trainer = make_trainer(
            [LRFinder(steps=8), Recorder(log)],
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scheduler_interval=interval,
        )
        trainer.fit(regression(), regression())
        assert "on_before_scheduler_step" not in log
        assert scheduler.last_epoch == 0


def test_it_survives_any_use() -> None:
    finder = LRFinder(steps=4)
    trainer = make_trainer([finder], model=nn.Linear(4, 1))
    trainer.fit(regression(), regression())
    first = list(finder.losses)
    trainer.fit(regression(), regression())
    assert finder.losses == first
    assert len(finder.learning_rates) == 4
    assert trainer.validate(regression())["val_loss"] > 0
    assert finder.losses == first
    finder.teardown(trainer)
    finder.teardown(trainer)
    assert LRFinder().suggestion is None
    empty = make_trainer([LRFinder()], max_epochs=0)
    assert empty.fit(regression()).step == 0


# ---- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_lr": 0.0}, r"min_lr is 0\.0 and max_lr 1\.0: give 0 < min_lr < max_lr"),
        ({"min_lr": 2.0}, r"min_lr is 2\.0"),
        ({"max_lr": math.inf}, "max_lr inf"),
        ({"steps": 1}, "steps is 1: give a whole number of at least 2"),
        ({"smoothing": 0.0}, r"smoothing is 0\.0: give the weight of the newest loss"),
        ({"smoothing": 1.1}, r"smoothing is 1\.1"),
        ({"divergence": 1.0}, r"divergence is 1\.0: give a factor above 1"),
    ],
)
def test_it_refuses_what_makes_no_run(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LRFinder(**arguments)


def test_a_first_group_without_a_rate_is_refused() -> None:
    model = nn.Linear(4, 1)
    trainer = make_trainer([LRFinder()], model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    with pytest.raises(ValueError, match=r"the first group's learning rate is 0\.0: give one above 0"):
        trainer.fit(regression())


def test_lazy_modules_without_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter weight has no shape yet: call the model once .* LRFinder"):
        make_trainer([LRFinder()], model=nn.LazyLinear(1)).fit(regression())
