"""Metrics that are objects, and functions of the whole set: a copy for each set, computed once, resumed."""

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
    make_model,
    make_trainer,
    regression,
    through_file,
)
from trainer import BatchOptions, Trainer, WholeSet
from trainer.metrics.objects import METHODS, MetricObjects

CPU = torch.device("cpu")


class Distance:
    """Keeps tensors, lists and numbers as plain attributes."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.reset()

    def reset(self) -> None:
        self.total = torch.zeros(())
        self.seen: list[Tensor] = []
        self.count = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        assert not outputs.requires_grad
        self.calls.append("update")
        self.total = self.total + (outputs - targets).abs().sum()
        self.seen.append(targets.clone())
        self.count += len(targets)

    def compute(self) -> Tensor:
        self.calls.append("compute")
        assert sum(map(len, self.seen)) == self.count
        return self.total / self.count


class Own(Distance):
    """Says itself what its state is."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = object()

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "seen": list(self.seen), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.seen, self.count = state["total"], state["seen"], state["count"]


class AsModule(nn.Module):
    """As torchmetrics: states are attributes that a ``state_dict`` holds only when they are persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.devices = False, []
        self._update_count = 0
        self._fold = len
        self.reset()

    def persistent(self, mode: bool = False) -> None:
        self.kept = mode

    def reset(self) -> None:
        self.total: Tensor = torch.zeros(())
        self._update_count = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total = self.total + (outputs - targets).square().sum()
        self._update_count += self._fold(targets)

    def compute(self) -> Tensor:
        return self.total / self._update_count

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.kept:
            destination[f"{prefix}total"] = self.total

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.total = state_dict[f"{prefix}total"]


def largest(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().max()


def all_kinds() -> dict[str, Any]:
    return {
        "plain": Distance(),
        "own": Own(),
        "module": AsModule(),
        "whole": WholeSet(largest),
        "function": nn.functional.l1_loss,
    }


def run(*callbacks: Any, checkpoint: dict[str, Any] | None = None, **options: Any) -> Trainer:
    options.setdefault("metrics", all_kinds())
    trainer = make_trainer(
        callbacks, model=make_model(99 if checkpoint else 7), batching=BatchOptions(batch_size=3), **options
    )
    if checkpoint is not None:
        trainer.load_state_dict(checkpoint)
    trainer.fit(regression(20), regression(9, seed=8))
    return trainer


def test_each_is_computed_once_an_epoch_from_all_batches_of_its_set() -> None:
    trainer = run(max_epochs=2)
    for metrics in trainer.state.history:
        assert metrics["val_plain"] == metrics["val_own"] == pytest.approx(metrics["val_function"])
        assert metrics["val_module"] == pytest.approx(metrics["val_loss"])
        assert metrics["train_module"] == pytest.approx(metrics["train_loss"])
        assert metrics["train_whole"] >= metrics["train_plain"]
    copies = trainer.recorder.objects._copies
    assert copies["train", "plain"].calls == (["update"] * 7 + ["compute"]) * 2
    assert copies["val", "plain"].calls == ["update", "compute"] * 2
    original = trainer.metrics["plain"]
    assert isinstance(original, Distance)
    assert original.calls == []


def test_validate_and_test_inside_a_fit_disturb_nothing() -> None:
    alone: list[dict[str, float]] = []
    look = At("on_train_batch_end", lambda trainer: alone.append(trainer.validate(regression(9, seed=8))))
    watched, plain = run(look), run()
    assert_same(watched.state.history, plain.state.history)
    assert alone[-1]["val_plain"] == plain.state.metrics["val_plain"]
    assert watched.test(regression(9, seed=8))["test_whole"] == plain.state.metrics["val_whole"]


def test_a_run_that_resumes_inside_an_epoch_ends_with_the_same_bits() -> None:
    whole = frozen(run())
    for batch in (1, 4, 7, 8, 13):
        stopped = run(interrupt_at(batch))
        checkpoint = through_file(stopped.state_dict())
        assert bool(checkpoint["recorder"]["objects"]) == (batch % 7 != 0 or batch == 7)
        assert_same(frozen(run(checkpoint=checkpoint)), whole)
        assert_same(frozen(run(checkpoint=checkpoint)), whole)  # and the checkpoint is as it was


def test_state_is_copied_when_it_is_taken() -> None:
    objects = MetricObjects({"plain": Distance()}, CPU)
    objects.update("train", torch.zeros(2, 1), torch.ones(2, 1))
    state = objects.state_dict()
    objects.update("train", torch.zeros(2, 1), torch.ones(2, 1))
    assert len(state["train"]["plain"]["plain"][""]["seen"]) == 1


def test_a_metric_that_a_checkpoint_held_may_be_gone() -> None:
    checkpoint = through_file(run(interrupt_at(3)).state_dict())
    assert "train_plain" not in run(checkpoint=checkpoint, metrics={"own": Own()}).state.metrics


def test_state_that_no_checkpoint_can_hold_names_metric_and_attribute() -> None:
    class Odd(Distance):
        def __init__(self) -> None:
            super().__init__()
            self.curve = [object()]

    trainer = run(interrupt_at(3), metrics={"odd": Odd()})
    with pytest.raises(TypeError, match=r"metric train_odd: plain\.\.curve\[0\] is a object, which can't be read"):
        trainer.state_dict()


def test_an_object_is_moved_to_the_device() -> None:
    class Moved(Distance):
        def to(self, device: torch.device) -> None:
            self.device = device

    objects = MetricObjects({"moved": Moved()}, CPU)
    objects.update("val", torch.zeros(1), torch.ones(1))
    assert objects._copies["val", "moved"].device == CPU


class TestWholeSet:
    def test_structures_come_back_as_they_were(self) -> None:
        seen: list[Any] = []

        def look(outputs: Any, targets: Any) -> float:
            seen.append((outputs, targets))
            return 1.0

        metric = WholeSet(look)
        for start in (0, 2):
            part = torch.arange(start, start + 2)
            metric.update({"a": part, "b": [part, (part,)]}, part.sum())
        again = WholeSet(look)
        again.load_state_dict(through_file(metric.state_dict()))
        assert metric.compute() == again.compute() == 1.0
        everything = torch.arange(4)
        expected = ({"a": everything, "b": [everything, (everything,)]}, torch.tensor([1, 5]))
        for item in seen:
            assert_same(item, expected)
            assert type(item[0]["b"][1]) is tuple

    def test_outputs_that_are_changed_later_are_kept_as_they_were(self) -> None:
        metric, outputs = WholeSet(largest), torch.ones(2)
        metric.update(outputs, torch.zeros(2))
        outputs.zero_()
        assert metric.compute() == 1

    @pytest.mark.parametrize("max_bytes", [0, -1, 1.5, True, None])
    def test_a_bound_that_is_none_is_refused(self, max_bytes: Any) -> None:
        with pytest.raises(ValueError, match=r"max_bytes is .*: give a number of bytes, at least 1"):
            WholeSet(largest, max_bytes=max_bytes)

    def test_more_than_the_bound_names_metric_and_fix(self) -> None:
        enough = 9 * 4 * 2
        assert make_trainer(metrics={"whole": WholeSet(largest, enough)}).validate(regression(9))["val_whole"] > 0
        message = f"metric val_whole .*max_bytes = {enough - 1} bytes of outputs and targets: raise max_bytes"
        with pytest.raises(ValueError, match=message):
            make_trainer(metrics={"whole": WholeSet(largest, enough - 1)}).validate(regression(9))

    def test_what_can_not_be_kept_is_refused(self) -> None:
        metric = WholeSet(largest)
        with pytest.raises(TypeError, match=r"metric largest .*not str: let the step return such outputs"):
            metric.update({"a": [torch.ones(1), "text"]}, torch.ones(1))

    def test_batches_that_can_not_be_joined_are_named(self) -> None:
        metric = WholeSet(largest)
        metric.update(torch.ones(2, 3), torch.ones(2, 3))
        metric.update(torch.ones(2, 4), torch.ones(2, 4))
        with pytest.raises(ValueError, match=r"metric largest .*can't join its batches: .*first dimension only"):
            metric.compute()


class TestRefusals:
    @pytest.mark.parametrize("name", ["loss", "lr"])
    def test_a_name_that_is_recorded_already(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"a metric is called '{name}', and {name} is recorded already"):
            make_trainer(metrics={name: largest})

    def test_a_metric_and_a_scalar_of_the_step_under_one_name(self) -> None:
        def step(model: nn.Module, batch: Any) -> Any:
            outputs = model(batch[0])
            return {"loss": outputs.mean(), "outputs": outputs, "mae": outputs.mean()}

        message = "the step returns 'mae', and a metric of the Trainer is called 'mae' too: .*rename one"
        with pytest.raises(ValueError, match=message):
            make_trainer(step=step, metrics={"mae": largest}).fit(regression())

    @pytest.mark.parametrize(
        ("metric", "message"),
        [
            (3, "metric x is a int: give a function of .outputs, targets., or an object with update"),
            (Distance, "metric x is the class Distance: give an instance"),
            (None, "metric x is None: give a function of .outputs, targets., or leave the name out"),
        ],
    )
    def test_what_is_no_metric(self, metric: Any, message: str) -> None:
        with pytest.raises(TypeError, match=message):
            make_trainer(metrics={"x": metric})

    def test_a_value_that_is_no_number(self) -> None:
        with pytest.raises(TypeError, match=r"metric 'train_x' is a Tensor of shape \(2,\): record a real number"):
            make_trainer(metrics={"x": WholeSet(lambda outputs, targets: torch.ones(2))}).fit(regression())

    def test_the_methods_of_an_object_are_those_of_torchmetrics(self) -> None:
        assert METHODS == ("update", "compute", "reset")
