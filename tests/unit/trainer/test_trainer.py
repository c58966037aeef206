"""Trainer: what it records, what may be replaced, and what it refuses."""

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.unit.trainer.support import At, make_model, make_trainer, regression
from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import default_callbacks
from trainer.data.plan import Plan


def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().mean()


class Nothing(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


class TestMetrics:
    def test_loss_learning_rate_and_each_metric_are_recorded_under_their_names(self) -> None:
        trainer = make_trainer(metrics={"mae": mae})
        history = trainer.fit(regression(), regression()).history
        assert [list(metrics) for metrics in history] == [
            ["train_loss", "train_mae", "val_loss", "val_mae", "lr"]
        ] * 2
        assert all(type(value) is float for metrics in history for value in metrics.values())

    def test_without_validation_data_there_are_no_validation_metrics(self) -> None:
        trainer = make_trainer(default_callbacks(), metrics={"mae": mae})
        state = trainer.fit(regression())
        assert list(state.history[-1]) == ["train_loss", "train_mae", "max_grad_norm", "lr"]

    @pytest.mark.parametrize("prefix", ["val", "test"])
    def test_an_evaluation_alone_equals_the_model_by_hand(self, prefix: str) -> None:
        data = regression(11)
        trainer = make_trainer(metrics={"mae": mae})
        trainer.fit(regression())
        result = (trainer.validate if prefix == "val" else trainer.test)(data)
        trainer.model.eval()
        inputs, targets = data.tensors
        outputs = trainer.model(inputs)
        assert result == {
            f"{prefix}_loss": pytest.approx(nn.functional.mse_loss(outputs, targets).item(), rel=1e-6),
            f"{prefix}_mae": pytest.approx(mae(outputs, targets).item(), rel=1e-6),
        }

    def test_an_evaluation_alone_leaves_progress_and_a_half_done_epoch_as_they_are(self) -> None:
        trainer = make_trainer(
            [
                At(
                    "on_train_batch_end",
                    lambda t: t.state.stop("interrupted", now=True),
                    lambda t: t.state.step == 2,
                )
            ]
        )
        trainer.fit(regression())
        recorded = trainer.recorder.compute()
        trainer.validate(regression())
        assert trainer.recorder.compute() == recorded
        assert (trainer.state.epoch, trainer.state.batch_index, trainer.state.history) == (0, 2, [])

    def test_evaluation_does_not_train(self) -> None:
        trainer = make_trainer()
        before = [parameter.clone() for parameter in trainer.model.parameters()]
        trainer.test(regression())
        assert all(map(torch.equal, before, trainer.model.parameters()))
        assert all(parameter.grad is None for parameter in trainer.model.parameters())


class TestStep:
    def test_a_step_may_return_a_mapping_whose_scalars_are_recorded(self) -> None:
        def step(model: nn.Module, batch: Any) -> dict[str, Any]:
            inputs, targets = batch
            outputs = model(inputs)
            penalty = outputs.pow(2).mean()
            loss = nn.functional.mse_loss(outputs, targets) + penalty
            return {"loss": loss, "outputs": outputs, "penalty": penalty, "two": 2}

        trainer = make_trainer(step=step, metrics={"mae": mae})
        metrics = trainer.fit(regression(), regression()).metrics
        assert list(metrics) == [
            *("train_loss", "train_penalty", "train_two", "train_mae"),
            *("val_loss", "val_penalty", "val_two", "val_mae", "lr"),
        ]
        assert metrics["train_two"] == 2
        assert 0 < metrics["val_penalty"] < metrics["val_loss"]

    def test_a_step_may_return_the_loss_alone(self) -> None:
        trainer = make_trainer(step=lambda model, batch: model(batch[0]).pow(2).mean())
        assert list(trainer.fit(regression()).metrics) == ["train_loss", "lr"]

    def test_a_step_may_take_batches_of_any_shape(self) -> None:
        class Rows(Dataset[dict[str, Any]]):
            def __len__(self) -> int:
                return 5

            def __getitem__(self, index: int) -> dict[str, Any]:
                return {"name": f"row {index}", "x": torch.full((4,), float(index))}

        model = nn.Linear(4, 1)
        trainer = make_trainer(
            model=model, step=lambda model, batch: model(batch["x"]).mean() * 0 + batch["x"].mean()
        )
        # 4 and 1 samples a batch: the mean over samples, whatever comes before the tensors.
        assert trainer.fit(Rows()).metrics["train_loss"] == pytest.approx(2.0)

    @pytest.mark.parametrize("output", [None, 1.0, {"outputs": 1}, {"loss": 1.0}, (1, 2)], ids=str)
    def test_anything_else_is_refused_by_its_type(self, output: Any) -> None:
        trainer = make_trainer(step=lambda model, batch: output)
        with pytest.raises(TypeError, match=type(output).__name__):
            trainer.fit(regression())

    @pytest.mark.parametrize("value", [None, 1.0])
    def test_a_loss_that_is_no_tensor_is_refused_by_its_type(self, value: Any) -> None:
        trainer = make_trainer(loss=lambda outputs, targets: value)
        with pytest.raises(TypeError, match=f"a loss returns a tensor of one number, not {type(value).__name__}"):
            trainer.fit(regression())

    @pytest.mark.parametrize("role", ["loss", "step"])
    def test_a_loss_or_step_that_is_a_module_comes_to_the_device(self, role: str) -> None:
        module = nn.BCELoss(weight=torch.ones(2)) if role == "loss" else nn.BatchNorm1d(2)
        make_trainer(**{"loss": None, role: module}, model=make_model().to("meta"), device="meta")
        assert {buffer.device.type for buffer in module.buffers()} == {"meta"}

    @pytest.mark.parametrize("given", [{}, {"loss": nn.MSELoss(), "step": lambda model, batch: model(batch)}])
    def test_loss_and_step_exclude_each_other_and_one_is_needed(self, given: dict[str, Any]) -> None:
        model = make_model()
        with pytest.raises(ValueError, match="either loss or step"):
            Trainer(model, torch.optim.SGD(model.parameters()), **given)


class ScaleLoss(Callback):
    def on_before_backward(self, trainer: Any) -> None:
        trainer.state.loss = trainer.state.loss * 3


class TestHooksChangeTraining:
    def test_a_replaced_loss_is_learnt_from_and_the_recorded_one_stays(self) -> None:
        def run(*callbacks: Callback, lr: float) -> Trainer:
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            trainer = make_trainer(callbacks, model=model, optimizer=optimizer, max_epochs=1)
            trainer.fit(regression(4))
            return trainer

        scaled, plain, tripled = run(ScaleLoss(), lr=0.01), run(lr=0.01), run(lr=0.03)
        assert scaled.state.metrics["train_loss"] == plain.state.metrics["train_loss"]
        for one, other in zip(scaled.model.parameters(), tripled.model.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-7)
        assert not torch.equal(next(scaled.model.parameters()), next(plain.model.parameters()))

    def test_a_replaced_batch_is_the_one_that_is_used(self) -> None:
        def halve(trainer: Any) -> None:
            trainer.state.batch = tuple(item[:2] for item in trainer.state.batch)

        seen: list[int] = []
        trainer = make_trainer(
            [
                At("on_train_batch_start", halve),
                At("on_after_forward", lambda trainer: seen.append(len(trainer.state.outputs))),
            ],
            max_epochs=1,
        )
        trainer.fit(regression(12))
        assert seen == [2, 2, 2]

    def test_gradients_may_be_clipped_before_the_optimizer_steps(self) -> None:
        def clip(trainer: Any) -> None:
            nn.utils.clip_grad_norm_(trainer.model.parameters(), 1e-8)

        trainer = make_trainer([At("on_before_optimizer_step", clip)], model=nn.Linear(4, 1), max_epochs=1)
        before = trainer.model.weight.detach().clone()
        trainer.fit(regression())
        assert torch.allclose(before, trainer.model.weight, atol=1e-7)


@pytest.mark.parametrize("device", ["gpu", "cuda:first"])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    model = nn.Linear(4, 1)
    with pytest.raises(ValueError, match=f"^device is '{device}': give 'cpu', 'cuda'"):
        Trainer(model, torch.optim.SGD(model.parameters()), nn.functional.mse_loss, device=device)


class TestEnds:
    def test_zero_epochs_train_nothing_and_end_well(self) -> None:
        trainer = make_trainer(default_callbacks(), max_epochs=0)
        state = trainer.fit(regression(), regression())
        assert (state.epoch, state.step, state.history, state.stop_reason) == (0, 0, [], None)

    def test_negative_epochs_are_refused(self) -> None:
        with pytest.raises(ValueError, match="max_epochs is -1"):
            make_trainer(max_epochs=-1)

    def test_a_finished_run_trains_no_further_until_more_epochs_are_asked_for(self) -> None:
        trainer = make_trainer(max_epochs=2)
        trainer.fit(regression())
        assert trainer.fit(regression()).epoch == 2
        trainer.plan = Plan(max_epochs=3)
        assert trainer.fit(regression()).epoch == 3

    def test_empty_training_data_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="empty"):
            make_trainer().fit(regression(0))

    @pytest.mark.parametrize("data", [Nothing(), DataLoader(regression(0), 4)], ids=["stream", "loader"])
    def test_training_data_that_gives_no_batch_is_an_error(self, data: Any) -> None:
        with pytest.raises(ValueError, match="training data gave no batch"):
            make_trainer().fit(data)

    def test_data_that_can_be_iterated_once_end_the_second_pass_by_saying_so(self) -> None:
        class Once(IterableDataset[Any]):
            def __init__(self) -> None:
                self.items = iter(regression())

            def __iter__(self) -> Any:
                return self.items

        with pytest.raises(ValueError, match=r"training data gave no batch.*can be iterated only once"):
            make_trainer(max_epochs=2).fit(Once())

    def test_drop_last_that_leaves_no_batch_is_an_error(self) -> None:
        trainer = make_trainer(batching=BatchOptions(batch_size=64, drop_last=True))
        with pytest.raises(ValueError, match="training data gave no batch"):
            trainer.fit(regression(12))

    @pytest.mark.parametrize("data", [Nothing(), DataLoader(regression(0), 4)], ids=["stream", "loader"])
    def test_validation_data_that_gives_no_batch_is_an_error(self, data: Any) -> None:
        with pytest.raises(ValueError, match="validation data gave no batch"):
            make_trainer().fit(regression(), data)
        with pytest.raises(ValueError, match="test data gave no batch"):
            make_trainer().test(data)


class TestLearning:
    def test_a_learnable_problem_is_learnt(self) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = make_trainer(default_callbacks(), model=model, optimizer=optimizer, max_epochs=30)
        history = trainer.fit(regression(64), regression(32, seed=4)).history
        assert history[-1]["train_loss"] < 0.02 < history[0]["train_loss"]

    def test_the_model_trains_in_train_mode_and_is_evaluated_in_eval_mode(self) -> None:
        modes: list[tuple[str, bool]] = []
        trainer = make_trainer(
            [
                At("on_train_batch_start", lambda t: modes.append(("train", t.model.training))),
                At("on_validation_batch_start", lambda t: modes.append(("val", t.model.training))),
            ]
        )
        trainer.fit(regression(), regression())
        assert set(modes) == {("train", True), ("val", False)}

    def test_a_plateau_scheduler_follows_its_metric(self) -> None:
        trainer = make_trainer(max_epochs=3, metrics={"mae": lambda outputs, targets: torch.tensor(1.0)})
        trainer.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer, factor=0.1, patience=0)
        trainer.scheduler_monitor = "val_mae"
        history = trainer.fit(regression(), regression()).history
        assert [metrics["lr"] for metrics in history] == pytest.approx([0.05, 0.05, 0.005])

    def test_importing_the_package_does_no_work(self) -> None:
        assert not logging.getLogger("trainer").handlers

    def test_losses_are_numbers(self) -> None:
        assert all(
            math.isfinite(value) for value in make_trainer().fit(regression(), regression()).metrics.values()
        )


def test_fit_goes_on_after_a_run_that_raised() -> None:
    trainer = make_trainer(max_epochs=3)
    handle = trainer.callbacks.register("on_epoch_end", raise_oserror)
    with pytest.raises(OSError, match="disk"):
        trainer.fit(regression(), regression())
    handle.remove()
    assert trainer.fit(regression(), regression()).epoch == 3
    assert trainer.state.stop_reason is None


def raise_oserror(trainer: Trainer) -> None:
    if trainer.state.epoch == 2:
        raise OSError("the disk is gone")


def test_an_interruption_inside_an_epoch_outlives_an_earlier_request_to_stop() -> None:
    def stop(trainer: Trainer) -> None:
        trainer.state.stop("enough")
        trainer.state.stop("interrupted", now=True)

    trainer = make_trainer()
    trainer.callbacks.register("on_train_batch_end", stop)
    trainer.fit(regression())
    assert trainer.state.batch_index == 1
    again = make_trainer()
    again.load_state_dict(trainer.state_dict())
    assert again.fit(regression()).epoch == 2


def test_a_hook_set_on_an_instance_is_called() -> None:
    calls: list[int] = []
    callback = Callback()
    callback.on_epoch_end = lambda trainer: calls.append(trainer.state.epoch)  # type: ignore[method-assign]
    make_trainer([callback]).fit(regression())
    assert calls == [1, 2]


def test_an_unknown_strategy_names_the_known() -> None:
    with pytest.raises(ValueError, match="strategy is 'zero': give 'ddp' or 'fsdp'"):
        make_trainer(strategy="zero")
    assert make_trainer(strategy="fsdp", max_epochs=1).fit(regression(), None).epoch == 1  # one process has all
