"""A model, optimizer or scheduler that was replaced is used, or refused with a reason; checkpoints of wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from tests.unit.trainer.support import At, assert_same, frozen, make_model, make_trainer, regression, through_file
from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import EMA, BestWeights, Checkpoint, GradientClipping
from trainer.checkpoint.manager import newest_checkpoint
from trainer.data.plan import Plan
from trainer.step.parts import bare_model


class Wrapped(nn.DataParallel[nn.Module]):
    """Counts the batches that went through the wrapper."""

    seen = 0

    def forward(self, *inputs: Any, **options: Any) -> Any:
        self.seen += 1
        return super().forward(*inputs, **options)


class ParallelTrainer(Callback):
    """Wraps the model while it trains."""

    transient = ("wrapper",)

    def __init__(self, event: str = "on_fit_start", priority: int = 50) -> None:
        self.priority = priority
        self.event = event
        self.wrapper: Wrapped | None = None

    def setup(self, trainer: Any) -> None:
        self._wrap(trainer, "setup")

    def on_fit_start(self, trainer: Any) -> None:
        self._wrap(trainer, "on_fit_start")

    def on_train_epoch_start(self, trainer: Any) -> None:
        self._wrap(trainer, "on_train_epoch_start")

    def on_fit_end(self, trainer: Any) -> None:
        assert self.wrapper is not None
        trainer.model = self.wrapper.module

    def _wrap(self, trainer: Any, event: str) -> None:
        if event == self.event and trainer.model is not self.wrapper:
            trainer.model = self.wrapper = Wrapped(trainer.model)


class TestAWrapper:
    @pytest.mark.parametrize("event", ["setup", "on_fit_start"])
    def test_that_a_callback_puts_around_the_model_is_called_and_trains_to_the_same_bits(self, event: str) -> None:
        parallel = ParallelTrainer(event)
        wrapped, plain = make_trainer([parallel]), make_trainer()
        for trainer in (wrapped, plain):
            trainer.fit(regression(12), regression(8))
        assert parallel.wrapper is not None
        assert parallel.wrapper.seen == 2 * (3 + 1)
        assert type(wrapped.model) is nn.Sequential
        assert_same(frozen(wrapped), frozen(plain))
        assert wrapped.validate(regression(8)) == plain.validate(regression(8))

    def test_that_comes_inside_an_epoch_is_called_from_the_next_on(self) -> None:
        parallel = ParallelTrainer("on_train_epoch_start")
        trainer = make_trainer([parallel], max_epochs=3)
        trainer.fit(regression(12), regression(4))
        assert parallel.wrapper is not None
        assert parallel.wrapper.seen == 1 + 2 * (3 + 1)

    @pytest.mark.parametrize("priority", [5, 50])
    def test_leaves_no_trace_in_checkpoints_averages_and_best_weights(self, tmp_path: Any, priority: int) -> None:
        def run(*callbacks: Callback, folder: str) -> Trainer:
            trainer = make_trainer([*callbacks, EMA(0.5), BestWeights(), Checkpoint(tmp_path / folder)])
            trainer.fit(regression(12), regression(8))
            return trainer

        run(folder="plain")
        run(ParallelTrainer(priority=priority), folder="wrapped")
        plain, wrapped = (newest_checkpoint([tmp_path / folder]) for folder in ("plain", "wrapped"))
        assert plain is not None
        assert wrapped is not None
        for part in ("model", "optimizer", "state"):
            assert_same(wrapped[1][part], plain[1][part])
        for callback in ("EMA", "BestWeights"):
            assert_same(wrapped[1]["callbacks"][callback], plain[1]["callbacks"][callback])

    @pytest.mark.parametrize("kind", ["data parallel", "compiled", "both"])
    def test_a_model_that_is_handed_over_wrapped_has_the_checkpoint_of_the_plain_one(self, kind: str) -> None:
        def wrapped(model: nn.Module) -> Any:
            model = torch.compile(model, backend="eager") if kind != "data parallel" else model  # type: ignore[assignment]
            return nn.DataParallel(model) if kind != "compiled" else model

        plain, trainer = make_trainer(), make_trainer(model=wrapped(make_model()))
        assert type(bare_model(trainer.model)) is nn.Sequential
        for each in (plain, trainer):
            each.fit(regression(8))
        assert_same(frozen(trainer)["model"], frozen(plain)["model"])
        for source, target in ((plain, make_trainer(model=wrapped(make_model()))), (trainer, make_trainer())):
            target.load_state_dict(through_file(source.state_dict()))
            assert_same(frozen(target)["model"], frozen(plain)["model"])


class TestBetweenFits:
    def test_another_model_and_optimizer_are_trained(self) -> None:
        trainer = make_trainer()
        trainer.fit(regression(8))
        former = trainer.model
        kept = {name: value.clone() for name, value in former.state_dict().items()}
        trainer.model = nn.Linear(4, 1)
        trainer.optimizer = Adam(trainer.model.parameters(), lr=0.1)
        before = trainer.model.weight.detach().clone()
        trainer.plan = Plan(max_epochs=4)
        assert trainer.fit(regression(8)).step == 8
        assert not torch.equal(trainer.model.weight, before)
        assert trainer.optimizer.param_groups[0]["fused"]
        assert_same(dict(former.state_dict()), kept)

    def test_another_optimizer_is_the_one_that_steps(self) -> None:
        trainer = make_trainer()
        trainer.fit(regression(8))
        trainer.optimizer = SGD(trainer.model.parameters(), lr=0.0)
        weights = {name: value.clone() for name, value in trainer.model.named_parameters()}
        trainer.plan = Plan(max_epochs=4)
        trainer.fit(regression(8))
        assert_same(dict(trainer.model.named_parameters()), weights)

    def test_another_scheduler_is_the_one_that_steps(self) -> None:
        trainer = make_trainer()
        trainer.fit(regression(8))
        trainer.scheduler = StepLR(trainer.optimizer, 1, gamma=0.5)
        trainer.plan = Plan(max_epochs=4)
        assert [metrics["lr"] for metrics in trainer.fit(regression(8)).history] == [0.05, 0.05, 0.05, 0.025]

    def test_another_model_is_validated(self) -> None:
        trainer = make_trainer()
        model = nn.Linear(4, 1)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        trainer.model, trainer.optimizer = model, SGD(model.parameters(), lr=0.1)
        data = regression(8)
        assert trainer.validate(data)["val_loss"] == pytest.approx(float(data.tensors[1].square().mean()))


class TestWhatDoesNotBelongTogether:
    @pytest.mark.parametrize("when", ["before", "setup", "on_fit_start", "on_epoch_end"])
    def test_a_model_whose_parameters_the_optimizer_does_not_hold_is_refused(self, when: str) -> None:
        def replace(trainer: Any) -> None:
            trainer.model = nn.Sequential(trainer.model, nn.Linear(1, 1))

        trainer = make_trainer([] if when == "before" else [At(when, replace)])
        if when == "before":
            replace(trainer)
        with pytest.raises(ValueError, match=r"parameters that the optimizer does not hold, such as 1\.weight"):
            trainer.fit(regression(8))

    def test_one_of_which_it_holds_nothing_is_refused(self) -> None:
        trainer = make_trainer()
        trainer.model = nn.Linear(4, 1)
        with pytest.raises(ValueError, match="the optimizer holds no parameter of the model"):
            trainer.fit(regression(8))

    def test_parameters_that_are_frozen_or_were_left_out_before_are_no_reason(self) -> None:
        body, head = nn.Linear(4, 4), nn.Linear(4, 1)
        model = nn.Sequential(body, head)
        trainer = make_trainer(model=model, optimizer=SGD(head.parameters(), lr=0.1))
        trainer.model = nn.Sequential(model, nn.Linear(1, 1).requires_grad_(False))
        assert trainer.fit(regression(8)).epoch == 2

    def test_parameters_that_were_given_to_the_optimizer_too_are_trained(self) -> None:
        def grow(trainer: Any) -> None:
            trainer.optimizer.add_param_group({"params": list(added.parameters())})
            trainer.model = nn.Sequential(trainer.model, added)

        added = nn.Linear(1, 1)
        before = added.weight.detach().clone()
        make_trainer([At("on_fit_start", grow)]).fit(regression(8))
        assert not torch.equal(added.weight, before)

    def test_a_scheduler_of_another_optimizer_is_refused_at_once_and_when_the_optimizer_is_replaced(self) -> None:
        model = make_model()
        optimizer, other = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.2)
        with pytest.raises(ValueError, match="the scheduler was built over another optimizer"):
            make_trainer(model=model, optimizer=optimizer, scheduler=StepLR(other, 1))
        trainer = make_trainer(model=model, optimizer=optimizer, scheduler=StepLR(optimizer, 1))
        trainer.optimizer = other
        with pytest.raises(ValueError, match="the scheduler was built over another optimizer"):
            trainer.fit(regression(8))
        with pytest.raises(ValueError, match=r"over optimizer 'last', one of 2: .* as scheduler=\{'last': …\}"):
            make_trainer(model=model, optimizer={"first": optimizer, "last": other}, scheduler=StepLR(other, 1))
        trainer.scheduler = StepLR(other, 1)
        assert trainer.fit(regression(8)).metrics["lr"] == pytest.approx(0.02)


class TestOptimizersThatShareParameters:
    """Gradients are scaled and clipped for each optimizer: those of a shared parameter would be twice."""

    MESSAGE = r"the optimizers 'a', 'c' can't step together, as they share 2 of their parameters"

    def optimizers(self, model: Any) -> dict[str, SGD]:
        held = {"a": [*model[0].parameters(), *model[4].parameters()], "b": model[1].parameters()}
        return {name: SGD(params, lr=0.1) for name, params in (held | {"c": model[4].parameters()}).items()}

    @pytest.mark.parametrize("how", ["loss", "step"])
    def test_do_not_step_together(self, how: str) -> None:
        model = make_model()
        step = {"step": lambda model, batch: model(batch[0]).mean()} if how == "step" else {}
        with pytest.raises(
            ValueError, match=self.MESSAGE + ": give each parameter to one optimizer, or give a `step`"
        ):
            make_trainer(model=model, optimizer=self.optimizers(model), **step)

    def test_are_refused_where_a_hook_made_them_share(self) -> None:
        model = make_model()
        optimizers = self.optimizers(model)
        del optimizers["c"]
        share = At("on_fit_start", lambda t: t.optimizer["b"].add_param_group({"params": [model[4].weight]}))
        trainer = make_trainer([share], model=model, optimizer=optimizers)
        with pytest.raises(
            ValueError, match="the optimizers 'a', 'b' can't step together, as they share 1 of their"
        ):
            trainer.fit(regression())

    def test_do_not_step_together_in_a_step_of_ones_own_either(self) -> None:
        model = make_model()

        def step(model: Any, batch: Any, update: Any) -> torch.Tensor:
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            update(loss)
            return loss

        trainer = make_trainer(model=model, optimizer=self.optimizers(model), step=step)
        with pytest.raises(ValueError, match=self.MESSAGE + ": give `update` the name of one"):
            trainer.fit(regression())

    def test_may_each_be_updated_by_name(self) -> None:
        def linear() -> nn.Sequential:
            torch.manual_seed(1)
            return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))

        def step(model: Any, batch: Any, update: Any) -> torch.Tensor:
            for name in ("all", "last"):
                loss = nn.functional.mse_loss(model(batch[0]), batch[1])
                update(loss, name)
            return loss

        model, data, expected = linear(), regression(12), linear()
        optimizers = {"all": SGD(model.parameters(), lr=0.1), "last": SGD(model[1].parameters(), lr=0.2)}
        options = {"step": step, "max_epochs": 1, "batching": BatchOptions(batch_size=12, shuffle=False)}
        make_trainer([GradientClipping(max_norm=0.5)], model=model, optimizer=optimizers, **options).fit(data)
        for parameters, rate in ((list(expected.parameters()), 0.1), (list(expected[1].parameters()), 0.2)):
            expected.zero_grad()
            nn.functional.mse_loss(expected(data.tensors[0]), data.tensors[1]).backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            SGD(parameters, lr=rate).step()
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weight, expected.state_dict()[name])
