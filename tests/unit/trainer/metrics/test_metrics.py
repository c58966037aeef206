"""EpochMetrics: exact means over samples, and state in the middle of an epoch."""

import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from tests.unit.trainer.support import make_trainer, quick, regression, through_file
from trainer import BatchOptions, WholeSet
from trainer.callbacks import GradientAccumulation
from trainer.metrics.epoch import EpochMetrics

CPU = torch.device("cpu")

floats = st.floats(-1e6, 1e6, width=32)


def test_a_mean_weighs_batches_by_their_samples() -> None:
    metrics = EpochMetrics(CPU)
    metrics.record("loss", torch.tensor(1.0), 4)
    metrics.record("loss", torch.tensor(7.0), 2)
    assert metrics.compute() == {"loss": 3.0}


def test_the_recorded_loss_of_a_ragged_last_batch_is_the_mean_over_all_samples() -> None:
    data = TensorDataset(torch.zeros(7, 1).double(), torch.arange(7.0).double().reshape(7, 1))
    model = nn.Linear(1, 1, bias=False).double()
    trainer = make_trainer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss=lambda outputs, targets: (targets - outputs).mean(),
        metrics={"biggest": lambda outputs, targets: targets.max()},
        batching=BatchOptions(batch_size=3, eval_batch_size=3, shuffle=False),
        max_epochs=1,
    )
    metrics = trainer.fit(data, data).history[0]
    assert metrics["train_loss"] == metrics["val_loss"] == 3.0
    assert metrics["train_biggest"] == metrics["val_biggest"] == pytest.approx((2 * 3 + 5 * 3 + 6) / 7, abs=1e-12)


def test_a_mean_does_not_lose_small_values_beside_large_ones() -> None:
    metrics = EpochMetrics(CPU)
    for value in [1e8, *[1.0] * 10]:
        metrics.record("loss", torch.tensor(value, dtype=torch.float32))
    assert metrics.compute()["loss"] == (1e8 + 10) / 11


def test_a_value_from_another_device_lies_where_the_others_do() -> None:
    metrics = EpochMetrics(torch.device("meta"))
    metrics.record("loss", torch.tensor(1.0))
    metrics.record("loss", torch.tensor(1.0, device="meta"))
    values, _ = metrics.latest("loss", 2)
    assert [value.device.type for value in values] == ["meta", "meta"]


@pytest.mark.parametrize("count", [511, 512, 513, 1024, 1025])
def test_folding_at_any_count_changes_nothing(count: int) -> None:
    metrics = EpochMetrics(CPU)
    for value in range(count):
        metrics.record("mean", torch.tensor(float(value)), weight=1 + value % 3)
        metrics.record("max", torch.tensor(float(-value)), reduce="max")
    weights = [1 + value % 3 for value in range(count)]
    mean = sum(value * weight for value, weight in zip(range(count), weights, strict=True)) / sum(weights)
    assert metrics.compute() == {"mean": mean, "max": 0.0}


@quick(60)
@given(st.lists(st.tuples(floats, st.integers(1, 100)), min_size=1, max_size=30))
def test_mean_and_max_equal_a_reference(items: list[tuple[float, int]]) -> None:
    metrics = EpochMetrics(CPU)
    for value, weight in items:
        metrics.record("mean", torch.tensor(value), float(weight))
        metrics.record("max", value, reduce="max")
    total = math.fsum(value * weight for value, weight in items)
    result = metrics.compute()
    assert result["mean"] == pytest.approx(total / sum(weight for _, weight in items), rel=1e-9, abs=1e-6)
    assert result["max"] == max(value for value, _ in items)


@quick(25)
@given(
    values=st.lists(floats, min_size=1, max_size=40),
    cut=st.integers(0, 40),
    lead=st.sampled_from([0, 500, 512, 1030]),
)
def test_state_taken_anywhere_goes_on_to_the_same_bits(values: list[float], cut: int, lead: int) -> None:
    through, before = EpochMetrics(CPU), EpochMetrics(CPU)
    sequence = [0.1 * index for index in range(lead)] + values
    cut = min(cut + lead, len(sequence))
    for index, value in enumerate(sequence):
        _record(through, index, value)
        if index < cut:
            _record(before, index, value)
    after = EpochMetrics(CPU)
    after.load_state_dict(through_file(before.state_dict()))
    for index, value in list(enumerate(sequence))[cut:]:
        _record(after, index, value)
    assert after.compute() == through.compute()


def _record(metrics: EpochMetrics, index: int, value: float) -> None:
    metrics.record("loss", torch.tensor(value), weight=1.0 + index % 5)
    metrics.record("norm", torch.tensor(value), reduce="max")
    metrics.record("number", value)


def test_names_come_in_the_order_of_first_recording() -> None:
    metrics = EpochMetrics(CPU)
    for name in ("b", "a", "c", "a", "b"):
        metrics.record(name, 1.0)
    assert list(metrics.compute()) == ["b", "a", "c"]


def test_nan_and_infinity_come_through() -> None:
    metrics = EpochMetrics(CPU)
    metrics.record("nan", torch.tensor(math.nan))
    metrics.record("inf", torch.tensor(math.inf))
    metrics.record("max", torch.tensor(math.nan), reduce="max")
    metrics.record("max", torch.tensor(1.0), reduce="max")
    result = metrics.compute()
    assert math.isnan(result["nan"])
    assert result["inf"] == math.inf
    assert math.isnan(result["max"])


def test_half_precision_and_one_element_tensors_are_taken() -> None:
    metrics = EpochMetrics(CPU)
    metrics.record("half", torch.tensor([0.5], dtype=torch.bfloat16))
    metrics.record("half", torch.tensor(1.5, dtype=torch.bfloat16))
    metrics.record("count", torch.tensor(3))
    assert metrics.compute() == {"half": 1.0, "count": 3.0}


def test_no_graph_is_kept() -> None:
    metrics = EpochMetrics(CPU)
    metrics.record("loss", torch.ones((), requires_grad=True) * 2)
    assert metrics.state_dict()["sums"]["loss"]["values"].requires_grad is False


def test_nothing_recorded_is_nothing_and_reset_forgets() -> None:
    metrics = EpochMetrics(CPU)
    assert metrics.compute() == {}
    metrics.record("loss", 1.0)
    metrics.reset()
    assert metrics.compute() == {}


def weighed(model: nn.Module, batch: Any) -> Any:
    outputs, counts = model(batch[0]), batch[1] > 0
    errors = (outputs - batch[1]).square() * counts
    return {"loss": errors.sum() / counts.sum(), "outputs": outputs, "weight": counts.sum()}


@pytest.mark.parametrize("weighted", [False, True])
def test_training_steps_read_nothing_back_from_the_device(monkeypatch: pytest.MonkeyPatch, weighted: bool) -> None:
    """The weak form is two `.item()` a step and one a parameter; here a step makes none."""
    from trainer.callbacks import default_callbacks

    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)

        def watched(self, *arguments, _name=name, _original=original, **options):
            reads.append(_name)
            return _original(self, *arguments, **options)

        monkeypatch.setattr(torch.Tensor, name, watched)
    trainer = make_trainer(
        [*default_callbacks(), *([GradientAccumulation(2)] if weighted else [])],
        metrics={"mae": nn.functional.l1_loss, "whole": WholeSet(nn.functional.l1_loss)},
        max_epochs=1,
        **({"step": weighed} if weighted else {}),
    )
    trainer.callbacks.register("on_fit_start", lambda trainer: reads.clear())
    per_step: list[int] = []
    trainer.callbacks.register("on_train_batch_end", lambda trainer: per_step.append(len(reads)), priority=99)
    trainer.fit(regression(40))
    assert len(per_step) == 10
    assert per_step[-1] == per_step[0] == 0


def test_an_interrupt_anywhere_in_a_record_leaves_what_can_be_reduced() -> None:
    lines = 0

    def interrupting(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code is not EpochMetrics.record.__code__:
            return None
        if event == "line":
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return interrupting

    while True:
        lines += 1
        left, before = lines, sys.gettrace()
        metrics = EpochMetrics(torch.device("cpu"))
        metrics.record("loss", torch.tensor(1.0), 2)
        sys.settrace(interrupting)
        try:
            metrics.record("loss", torch.tensor(4.0), 1)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(before)
        assert metrics.compute()["loss"] in (1.0, 2.0)
    assert lines > 5
