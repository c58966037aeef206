"""Train and eval mode: what was frozen in eval mode stays there, and a run leaves every mode as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_trainer,
    regression,
    through_file,
)
from trainer import Trainer
from trainer.callbacks import LRFinder, OptimizerMode

SEED = 5


class Net(nn.Module):
    """A body with statistics of batches, and a head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Sequential(nn.Dropout(0.5)))
            self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(inputs))
        return outputs


def frozen_body() -> Net:
    model = Net()
    model.body.eval().requires_grad_(False)
    return model


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def trained_modes(model: nn.Module, *callbacks: Any, **options: Any) -> list[dict[str, bool]]:
    """Modes in each training batch."""
    seen: list[dict[str, bool]] = []
    watch = At("on_before_forward", lambda trainer: seen.append(modes(trainer.model)))
    make_trainer([watch, *callbacks], model=model, **options).fit(regression(8), regression(4))
    return seen


def test_a_body_frozen_in_eval_mode_stays_there_through_all_epochs() -> None:
    model = frozen_body()
    found, statistics = modes(model), model.body[1].running_mean.clone()
    assert trained_modes(model, max_epochs=3) == [found] * 6
    assert modes(model) == found
    assert torch.equal(model.body[1].running_mean, statistics)
    assert int(model.body[1].num_batches_tracked) == 0


def test_it_computes_what_a_loop_does_that_freezes_it_in_each_epoch() -> None:
    model, other = frozen_body(), frozen_body()
    trainer = make_trainer(model=model, optimizer=torch.optim.SGD(model.head.parameters(), lr=0.1))
    trainer.fit(regression(8), regression(4))
    optimizer = torch.optim.SGD(other.head.parameters(), lr=0.1)

    def by_hand(trainer: Any) -> None:
        trainer.model.train()
        trainer.model.body.eval()

    make_trainer([At("on_train_epoch_start", by_hand)], model=other, optimizer=optimizer).fit(
        regression(8), regression(4)
    )
    assert_same(dict(model.state_dict()), dict(other.state_dict()))


def test_a_model_that_is_handed_over_in_eval_mode_trains_as_a_whole_and_comes_back_in_it() -> None:
    model = Net().eval()
    assert all(all(seen.values()) for seen in trained_modes(model))
    assert not any(modes(model).values())


def test_one_in_eval_mode_inside_a_wrapper_trains_too() -> None:
    model = Net().eval()
    assert all(all(seen.values()) for seen in trained_modes(nn.DataParallel(model)))
    assert not any(modes(model).values())


def test_a_part_in_train_mode_inside_one_in_eval_mode_trains() -> None:
    model = frozen_body()
    model.body[2].train()
    found = modes(model)
    assert trained_modes(model, max_epochs=1) == [found] * 2
    assert found["body.2.0"]
    assert not found["body.1"]
    assert modes(model) == found


def test_it_is_said_when_what_stays_in_eval_mode_is_trained(caplog: pytest.LogCaptureFixture) -> None:
    trained_modes(frozen_body())
    assert not caplog.messages
    model = Net()
    model.body.eval()
    trained_modes(model)
    (message,) = caplog.messages
    assert message.startswith("2 modules are in eval mode and stay so while they are trained, the first a Linear")


def test_modes_are_as_before_after_validation_test_and_an_error() -> None:
    model = frozen_body()
    found = modes(model)

    def fail(trainer: Any) -> None:
        raise OSError("disk")

    trainer = make_trainer(model=model)
    trainer.validate(regression(4))
    assert modes(model) == found
    trainer.test(regression(4))
    assert modes(model) == found
    for event in ("on_before_backward", "on_validation_batch_end"):
        with trainer.callbacks.register(event, fail), pytest.raises(OSError, match="disk"):
            trainer.fit(regression(8), regression(4))
        assert modes(model) == found


def test_an_evaluation_in_the_middle_of_an_epoch_leaves_the_modes() -> None:
    model = frozen_body()
    found = modes(model)
    validate = At("on_train_batch_end", lambda trainer: trainer.validate(regression(4)))
    assert trained_modes(model, validate) == [found] * 4


def test_a_hook_may_thaw_and_freeze_from_an_epoch_on() -> None:
    def thaw(trainer: Any) -> None:
        trainer.model.body.train()

    model = frozen_body()
    found = modes(model)
    seen = trained_modes(model, At("on_epoch_end", thaw, lambda trainer: trainer.state.epoch == 1))
    assert seen == [found] * 2 + [dict.fromkeys(found, True)] * 2
    assert modes(model) == found


def test_what_a_models_own_train_method_freezes_stays_frozen() -> None:
    class Own(Net):
        def train(self, mode: bool = True) -> Own:
            super().train(mode)
            self.body[1].eval()
            return self

    model = Own()
    assert model.body[1].training
    seen = trained_modes(model)
    assert {item["body.1"] for item in seen} == {False}
    assert {item["body.0"] for item in seen} == {True}
    assert model.body[1].training


def test_a_model_that_folds_its_weights_for_evaluation_is_unfolded_before_it_trains_on() -> None:
    class Folding(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 1)
            self.folded = False

        def train(self, mode: bool = True) -> Folding:
            self.folded = not mode
            return super().train(mode)

        def forward(self, inputs: Tensor) -> Tensor:
            assert self.folded is not self.training
            return super().forward(inputs)

    model = nn.Sequential(Folding())
    trained_modes(model, max_epochs=3)
    assert not model[0].folded


@pytest.mark.parametrize("step", [1, 2, 3])
def test_it_resumes_to_the_same_bits(step: int) -> None:
    def run(*callbacks: Any) -> Trainer:
        model = frozen_body()
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        return make_trainer([OptimizerMode(), *callbacks], model=model, optimizer=optimizer)

    whole, stopped, resumed = run(), run(interrupt_at(step)), run()
    whole.fit(regression(8), regression(4))
    stopped.fit(regression(8), regression(4))
    resumed.load_state_dict(through_file(stopped.state_dict()))
    resumed.fit(regression(8), regression(4))
    assert_same(frozen(resumed), frozen(whole))
    found = modes(resumed.model)
    stopped.fit(regression(8), regression(4))  # in the same process
    assert_same(frozen(stopped), frozen(whole))
    assert modes(stopped.model) == found == modes(frozen_body())


def test_a_search_for_the_learning_rate_leaves_the_modes() -> None:
    model = frozen_body()
    found, statistics = modes(model), model.body[1].running_mean.clone()
    trainer = make_trainer(model=model)
    with trainer.callbacks.add(LRFinder(min_lr=1e-5, steps=10)):
        trainer.fit(regression(64))
    assert modes(model) == found
    assert torch.equal(model.body[1].running_mean, statistics)


@pytest.mark.parametrize("training", [True, False])
def test_at_the_start_of_a_fit_the_model_is_in_train_mode(training: bool) -> None:
    seen: list[dict[str, bool]] = []
    look = At("on_fit_start", lambda trainer: seen.append(modes(trainer.model)))
    make_trainer([look], model=Net().train(training)).fit(regression(8), regression(4))
    assert seen == [dict.fromkeys(modes(Net()), True)]


def test_what_a_hook_puts_into_eval_mode_at_the_start_of_a_fit_stays_there() -> None:
    def freeze(trainer: Any) -> None:
        trainer.model.body.eval().requires_grad_(False)

    for model in (Net(), Net().eval()):
        seen = trained_modes(model, At("on_fit_start", freeze))
        assert all(not each["body.1"] and each["head.0"] for each in seen)
