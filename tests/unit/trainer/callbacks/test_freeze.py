"""Freeze: what stays, from when until when, what the optimizer makes of it, and what is refused."""

from __future__ import annotations

from itertools import pairwise
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
    splus,
    through_file,
)
from trainer import Trainer
from trainer.callbacks import Freeze, GradientAccumulation, OptimizerMode, ParameterCount

FIRST = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]


def watched(*callbacks: Any, **options: Any) -> tuple[Trainer, list[dict[str, torch.Tensor]]]:
    """A run of 3 epochs of 3 steps, and the model's state after each step."""
    seen: list[dict[str, torch.Tensor]] = []

    def look(trainer: Any) -> None:
        seen.append({name: value.clone() for name, value in trainer.model.state_dict().items()})

    model = options.pop("model", None) or make_model()
    options.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))
    options.setdefault("max_epochs", 3)
    trainer = make_trainer([*callbacks, At("on_train_batch_end", look)], model=model, **options)
    look(trainer)
    trainer.fit(regression(), regression())
    return trainer, seen


def moved(seen: list[dict[str, torch.Tensor]]) -> dict[str, str]:
    """Of each entry of the state, a letter for each step: whether it moved."""
    pairs = list(pairwise(seen))
    return {
        name: "".join(".x"[not torch.equal(one[name], other[name])] for one, other in pairs) for name in seen[0]
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "........."),
        ({"until_epoch": 1}, "...xxxxxx"),
        ({"from_epoch": 2}, "xxxxxx..."),
        ({"from_epoch": 1, "until_epoch": 2}, "xxx...xxx"),
        ({"until_step": 4}, "....xxxxx"),
        ({"from_step": 1, "until_step": 8}, "x.......x"),
    ],
)
def test_frozen_parts_stay_as_they_are_while_the_rest_trains(arguments: dict[str, int], expected: str) -> None:
    _, seen = watched(Freeze(["0", "1"], **arguments))
    assert moved(seen) == {name: expected if name in FIRST else "xxxxxxxxx" for name in make_model().state_dict()}


def test_without_eval_mode_statistics_of_batches_train_on() -> None:
    trainer, seen = watched(Freeze(["0", "1"], eval_mode=False))
    assert moved(seen)["1.weight"] == "........."
    assert moved(seen)["1.running_mean"] == "xxxxxxxxx"
    assert trainer.model.training


def test_a_part_that_was_never_frozen_trains_to_the_same_bits() -> None:
    trainer, _ = watched(Freeze("0", from_epoch=9))
    plain, _ = watched()
    assert_same(frozen(trainer)["model"], frozen(plain)["model"])


def test_the_steps_equal_those_of_a_model_whose_part_requires_no_gradient() -> None:
    by_hand = make_model()
    by_hand[0].requires_grad_(False)
    trainer, _ = watched(Freeze("0", eval_mode=False))
    plain, _ = watched(model=by_hand)
    assert_same(frozen(trainer)["model"], frozen(plain)["model"])
    assert trainer.optimizer.state.keys().isdisjoint(trainer.model[0].parameters())


def test_what_the_optimizer_keeps_of_a_part_stays_while_it_is_frozen() -> None:
    kept: list[torch.Tensor] = []

    def look(trainer: Any) -> None:
        kept.append(trainer.optimizer.state[trainer.model[0].weight]["exp_avg"].clone())

    watched(Freeze("0", from_epoch=1, until_epoch=2), At("on_train_epoch_end", look))
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[1], kept[2])


def smooth() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def lbfgs(model: nn.Module) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "........."),
        ({"until_step": 3}, "...xxxxxx"),
        ({"from_step": 3}, "xxx......"),
        ({"from_epoch": 1, "until_epoch": 2}, "xxx...xxx"),
    ],
)
def test_what_lbfgs_remembers_moves_nothing_that_is_frozen(arguments: dict[str, int], expected: str) -> None:
    model = smooth()
    letters = moved(watched(Freeze("0", **arguments), model=model, optimizer=lbfgs(model))[1])
    assert letters == {
        **dict.fromkeys(["0.weight", "0.bias"], expected),
        **dict.fromkeys(["2.weight", "2.bias"], "x" * 9),
    }


@pytest.mark.parametrize("step", range(1, 9))
def test_lbfgs_resumes_to_the_same_bits_at_any_step_of_a_part_that_is_frozen(step: int) -> None:
    def build(*more: Any) -> Trainer:
        model = smooth()
        parts = [Freeze("0", from_step=3, until_step=7)]
        return make_trainer([*parts, *more], model=model, optimizer=lbfgs(model), max_epochs=3)

    whole, stopped, resumed = build(), build(interrupt_at(step)), build()
    whole.fit(regression(), regression())
    stopped.fit(regression(), regression())
    resumed.load_state_dict(through_file(stopped.state_dict()))
    resumed.fit(regression(), regression())
    assert_same(frozen(resumed), frozen(whole))


def test_everything_is_as_before_when_the_fit_is_over() -> None:
    model = make_model()
    model[4].bias.requires_grad_(False)
    model[3].eval()
    trainer, seen = watched(Freeze(["0", "1"], until_epoch=1), model=model)
    assert [item.requires_grad for item in model.parameters()] == [True] * 5 + [False]
    assert [module.training for module in model.modules()] == [True] * 4 + [False, True]
    assert moved(seen)["4.bias"] == "........."
    assert trainer.state.epoch == 3


@pytest.mark.parametrize("training", [True, False])
def test_frozen_modules_are_in_eval_mode_while_they_are(training: bool) -> None:
    modes: list[bool] = []
    watch = At("on_before_forward", lambda trainer: modes.append(trainer.model[1].training))
    watched(Freeze("1", until_epoch=2), watch, model=make_model().train(training))
    assert modes == [False] * 6 + [True] * 3


def test_gradients_that_add_up_to_one_step_know_the_same_parts() -> None:
    trainer, seen = watched(Freeze("0", until_step=2), GradientAccumulation(2), max_epochs=2)
    assert moved(seen)["4.weight"] == ".x.xx."  # the rest of the pass steps at its end
    assert moved(seen)["0.weight"] == "....x."
    assert trainer.state.step == 4


def test_the_first_forward_pass_of_an_epoch_in_a_step_with_updates_of_its_own_knows_what_is_frozen() -> None:
    def step(model: nn.Module, batch: Any, update: Any) -> torch.Tensor:
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
        update(loss)
        return loss

    _, seen = watched(Freeze(["1"], from_epoch=1), step=step)
    assert moved(seen)["1.weight"] == "xxx......"
    assert moved(seen)["1.running_mean"] == "xxx......"
    _, seen = watched(Freeze("0", until_epoch=1), step=step)
    assert moved(seen)["0.weight"] == "...xxxxxx"


@pytest.mark.parametrize("step", range(1, 9))
def test_a_run_stopped_at_any_step_resumes_to_the_same_bits(step: int) -> None:
    def parts() -> list[Any]:
        by_steps = [Freeze("0", until_step=4), Freeze("1", from_step=3, until_step=6)]
        return [*by_steps, Freeze("4", from_epoch=2), ParameterCount()]

    def build(*more: Any) -> Trainer:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        return make_trainer([*parts(), *more], model=model, optimizer=optimizer, max_epochs=3)

    whole = build()
    whole.fit(regression(), regression())
    stopped = build(interrupt_at(step))
    stopped.fit(regression(), regression())
    resumed = build()
    resumed.load_state_dict(through_file(stopped.state_dict()))
    resumed.fit(regression(), regression())
    assert_same(frozen(resumed), frozen(whole))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"from_epoch": 2, "until_epoch": 2}, "from 2 until 2"),
        ({"until_epoch": 0}, "from 0 until 0"),
        ({"from_step": -1}, "from -1 until None"),
        ({"until_epoch": 1, "from_step": 3}, "give epochs or steps"),
    ],
)
def test_an_end_before_the_beginning_and_a_mixture_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Freeze("0", **arguments)


def test_what_can_not_train_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="parts is empty"):
        Freeze([])
    with pytest.raises(ValueError, match="no parameter of the model is called 'encoder'"):
        watched(Freeze("encoder"))
    with pytest.raises(ValueError, match=r"\*: with these frozen nothing is left to train"):
        watched(Freeze("*"))
    model = make_model()
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)
    make_trainer([Freeze("0")], model=model, optimizer=optimizer).fit(regression())
    with pytest.raises(ValueError, match=r"optimizer does not hold 0\.weight, which is to train before or after"):
        make_trainer([Freeze("0", until_epoch=1)], model=model, optimizer=optimizer).fit(regression())


@pytest.mark.parametrize("arguments", [{}, {"from_step": 3}, {"until_epoch": 1}])
def test_splus_whose_averages_would_be_wrong_is_refused(arguments: dict[str, int]) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"SPlus evaluates averages that are wrong .* such as 4\.weight: leave"):
        watched(Freeze("4", **arguments), model=model, optimizer=splus(model.parameters(), lr=0.02))
    both = {"first": splus(model[0].parameters(), lr=0.02), "last": torch.optim.SGD(model[4].parameters())}
    watched(Freeze("4", **arguments), OptimizerMode(), model=model, optimizer=both)


def test_what_would_come_after_the_last_step_is_not_refused_and_before_it_is() -> None:
    everything = Freeze(["0", "1", "4"], from_step=9)
    watched(everything, max_epochs=3)
    with pytest.raises(ValueError, match="nothing is left to train"):
        watched(everything, max_epochs=4)


def test_a_cuda_graph_is_refused_since_it_would_train_what_is_frozen() -> None:
    trainer = make_trainer([Freeze("0")])
    assert trainer.callbacks.has_callbacks("on_before_zero_grad")  # inside the step that a graph records
    assert not Freeze.graph_safe


def test_modules_that_fold_their_weights_are_trained_through_their_own_train() -> None:
    calls: list[bool] = []

    class Folding(nn.Linear):
        def train(self, mode: bool = True) -> Folding:
            calls.append(mode)
            super().train(mode)
            return self

    model = nn.Sequential(Folding(4, 2), nn.Linear(2, 1))
    calls.clear()
    watched(Freeze("0", until_epoch=1), model=model)
    assert calls.count(False) > 1
    assert model[0].training


def test_a_lazy_module_is_frozen_with_the_weights_that_it_gets() -> None:
    seen: list[torch.Tensor] = []
    look = At("on_train_batch_end", lambda t: seen.append(t.model[0].weight.detach().clone()))
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    make_trainer([Freeze("0", until_epoch=1), look], model=model).fit(regression())
    assert [torch.equal(*pair) for pair in pairwise(seen)] == [True, True, False, False, False]
