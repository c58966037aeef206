"""Callbacks that know parts of the model, where a later callback puts another model in its place."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
from trainer.callbacks import EMA, Freeze, TensorStatistics, WeightMerging

EVENTS = ("on_fit_start", "on_epoch_end")


def copied(trainer: Any) -> None:
    trainer.model = deepcopy(trainer.model)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05)


def wrapped(trainer: Any) -> None:
    trainer.model = nn.Sequential(trainer.model)


def once(event: str, action: Callable[[Any], None]) -> Callback:
    """Replaces the model of a new run: at the start of its fit, or after its first epoch."""
    return At(event, action, when=lambda trainer: trainer.state.epoch == (event == "on_epoch_end"))


def fit(*callbacks: Callback, **options: Any) -> Trainer:
    trainer = make_trainer(callbacks, max_epochs=3, **options)
    trainer.fit(regression(), regression(9, seed=8))
    return trainer


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("replace", [copied, wrapped])
def test_the_weights_that_are_averaged_are_those_of_the_model_that_trains(
    replace: Callable[[Any], None], event: str
) -> None:
    plain, other = fit(EMA(0.5)), fit(EMA(0.5), once(event, replace))
    assert_same(list(other.state.history), list(plain.state.history))
    assert_same(list(other.model.state_dict().values()), list(plain.model.state_dict().values()))


def test_weights_that_a_model_grows_by_are_averaged_from_then_on() -> None:
    def grow(trainer: Any) -> None:
        trainer.optimizer.add_param_group({"params": list(added.parameters())})
        trainer.model = nn.Sequential(trainer.model, added)

    def note(trainer: Any) -> None:
        if trainer.state.epoch:
            trained.append(added.weight.detach().clone())

    added, trained = nn.Linear(1, 1), []
    average = added.weight.detach().clone()
    fit(EMA(0.5, warmup=False), once("on_epoch_end", grow), At("on_after_optimizer_step", note))
    for weight in trained:
        average.lerp_(weight, 0.5)
    torch.testing.assert_close(added.weight.detach(), average)


def test_a_run_whose_model_is_put_into_another_one_at_each_start_resumes_to_the_same_bits() -> None:
    def build(*callbacks: Callback) -> Trainer:
        return make_trainer([EMA(0.5), At("on_fit_start", wrap), *callbacks], max_epochs=3)

    def wrap(trainer: Any) -> None:
        if len(trainer.model) > 1:
            wrapped(trainer)

    whole, stopped, resumed = build(), build(interrupt_at(4)), build()
    whole.fit(regression(), regression(9, seed=8))
    stopped.fit(regression(), regression(9, seed=8))
    wrap(resumed)
    resumed.load_state_dict(through_file(stopped.state_dict()))
    resumed.fit(regression(), regression(9, seed=8))
    assert_same(frozen(resumed), frozen(whole))


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("replace", [copied, wrapped])
def test_merged_weights_are_those_of_the_model_that_trains(
    tmp_path: Path, replace: Callable[[Any], None], event: str
) -> None:
    merged = []
    for name, more in (("plain", []), ("other", [once(event, replace)])):
        fit(WeightMerging(tmp_path / name, last_steps=6, every_n_steps=9), *more)
        file = torch.load(tmp_path / name / "merged-step-00000009.pt", weights_only=True)
        assert file["steps"] == 6
        merged.append(list(file["model"].values()))
    assert_same(*merged)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("replace", [copied, wrapped])
def test_frozen_parts_are_those_of_the_model_that_trains(replace: Callable[[Any], None], event: str) -> None:
    def freeze() -> Freeze:
        return Freeze(["0", "1"], until_step=5)

    plain, other = fit(freeze()), fit(freeze(), once(event, replace))
    assert_same(list(other.state.history), list(plain.state.history))
    assert_same(list(other.model.state_dict().values()), list(plain.model.state_dict().values()))
    assert all(parameter.requires_grad for parameter in other.model.parameters())
    assert all(module.training for module in other.model.modules())


@pytest.mark.parametrize("event", EVENTS)
def test_activations_are_those_of_the_model_that_trains(event: str) -> None:
    def statistics() -> TensorStatistics:
        return TensorStatistics(activations=True, every_n_steps=1)

    model = make_model()
    plain, other = fit(statistics()), fit(statistics(), once(event, copied), model=model)
    assert_same(list(other.state.history), list(plain.state.history))
    assert not any(module._forward_hooks for module in model.modules())
