"""What a run records: every real number becomes a float, anything else names its metric and its callback."""

from __future__ import annotations

import copy
import json
import math
import pickle
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.trainer.support import At, make_trainer, regression, through_file
from trainer.metrics.epoch import EpochMetrics
from trainer.recorded import MetricError, Metrics, number

REAL = {
    "float": (0.5, 0.5),
    "int": (3, 3.0),
    "bool": (True, 1.0),
    "nan": (math.nan, math.nan),
    "infinity": (-math.inf, -math.inf),
    "float32": (np.float32(0.1), float(np.float32(0.1))),
    "float16": (np.float16(0.5), 0.5),
    "longdouble": (np.longdouble(0.25), 0.25),
    "int64": (np.int64(-7), -7.0),
    "uint8": (np.uint8(7), 7.0),
    "numpy bool": (np.bool_(True), 1.0),
    "array": (np.array(2.5), 2.5),
    "tensor": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "tensor with a graph": (torch.tensor(1.5, requires_grad=True) * 2, 3.0),
    "integer tensor": (torch.tensor(4), 4.0),
    "fraction": (Fraction(1, 4), 0.25),
}

NO_NUMBER = {
    "None": (None, "NoneType (None)"),
    "text": ("0.5", "str ('0.5')"),
    "list": ([1.0], "list ([1.0])"),
    "mapping": ({"a": 1}, "dict ({'a': 1})"),
    "complex": (1j, "complex (1j)"),
    "NumPy's complex": (np.complex64(1), "complex64 (np.complex64(1+0j))"),
    "decimal": (Decimal("0.5"), "Decimal (Decimal('0.5'))"),
    "text of NumPy": (np.str_("a"), "str_ (np.str_('a'))"),
    "vector": (np.ones(3), "ndarray of shape (3,)"),
    "tensor": (torch.ones(2, 3), "Tensor of shape (2, 3)"),
    "complex tensor": (torch.tensor(1j), "Tensor of shape ()"),
    "huge": (10**400, "int (1000"),
}


@pytest.mark.parametrize("kind", REAL)
def test_a_real_number_becomes_a_float(kind: str) -> None:
    value, expected = REAL[kind]
    for result in (number("x", value), Metrics(x=value)["x"], Metrics({"x": value})["x"]):
        assert type(result) is float
        assert result == expected or (math.isnan(result) and math.isnan(expected))


@pytest.mark.parametrize("kind", NO_NUMBER)
def test_anything_else_is_refused_with_metric_and_type(kind: str) -> None:
    value, shown = NO_NUMBER[kind]
    with pytest.raises(MetricError) as raised:
        number("val_auc", value)
    assert str(raised.value).startswith(f"metric 'val_auc' is a {shown}")
    assert isinstance(raised.value, TypeError)


def test_every_way_into_the_mapping_is_checked() -> None:
    metrics = Metrics([("a", 1)], b=np.float32(2))
    metrics.update({"c": True})
    metrics |= {"d": torch.tensor(4)}
    assert metrics.setdefault("e", 5) == 5.0
    assert metrics.setdefault("e", None) == 5.0
    assert {name: type(value) for name, value in metrics.items()} == dict.fromkeys("abcde", float)
    with pytest.raises(MetricError, match="'x'"):
        metrics.update({"y": 1.0, "x": None})
    with pytest.raises(MetricError, match="'x'"):
        metrics.setdefault("x")
    with pytest.raises(MetricError, match="'x'"):
        metrics |= {"x": "text"}
    assert "y" not in metrics, "an update is whole or not there"
    for twin in (copy.deepcopy(metrics), pickle.loads(pickle.dumps(metrics))):
        assert (type(twin), twin) == (Metrics, metrics)


class Writes(At):
    """Puts one value under ``mine``."""

    def __init__(self, value: Any, event: str) -> None:
        super().__init__(event, lambda trainer, *_: trainer.state.metrics.update(mine=value))


@pytest.mark.parametrize("event", ["on_epoch_end", "on_before_log_metrics"])
def test_what_a_callback_writes_is_a_float_in_the_history_and_the_checkpoint(event: str) -> None:
    trainer = make_trainer([Writes(np.float32(0.1), event)])
    history = trainer.fit(regression(8)).history
    assert [type(metrics["mine"]) for metrics in history] == [float, float]
    assert json.loads(json.dumps(history)) == history
    assert through_file(trainer.state_dict())["state"]["history"] == history


@pytest.mark.parametrize("event", ["on_epoch_end", "on_before_log_metrics"])
@pytest.mark.parametrize("value", [None, "0.5", torch.ones(2)], ids=["None", "text", "tensor"])
def test_what_is_no_number_ends_the_fit_and_names_the_callback(event: str, value: Any) -> None:
    trainer = make_trainer([Writes(value, event)])
    with pytest.raises(MetricError, match=f"^Writes: metric 'mine' is a {type(value).__name__} ") as raised:
        trainer.fit(regression(8))
    assert raised.value.source == "Writes"
    assert trainer.state.stop_reason == "error"
    assert "mine" not in trainer.state.metrics


def test_a_registered_function_is_named_too() -> None:
    def note(trainer: Any) -> None:
        trainer.state.metrics["mine"] = None

    trainer = make_trainer()
    trainer.callbacks.register("on_epoch_end", note)
    with pytest.raises(MetricError, match="note: metric 'mine' is a NoneType"):
        trainer.fit(regression(8))


def test_metrics_that_a_callback_replaces_as_a_whole_are_checked_and_in_the_history() -> None:
    def replace(trainer: Any) -> None:
        trainer.state.metrics = {"mine": np.int64(2)}

    state = make_trainer([At("on_epoch_end", replace)]).fit(regression(8))
    assert state.history == [{"mine": 2.0}, {"mine": 2.0}]
    assert state.metrics is state.history[-1]
    with pytest.raises(MetricError, match="'mine'"):
        state.metrics = {"mine": None}  # type: ignore[assignment]


@pytest.mark.parametrize(
    "value",
    [torch.ones(3), torch.tensor(1j), None, "text", [1.0]],
    ids=["vector", "complex", "None", "text", "list"],
)
def test_a_metric_function_or_a_step_that_returns_no_number_is_named(value: Any) -> None:
    trainer = make_trainer(metrics={"auc": lambda outputs, targets: value})
    with pytest.raises(MetricError, match="metric 'train_auc' is a "):
        trainer.fit(regression(8))

    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": model(batch[0]).mean(), "tokens": value}

    with pytest.raises(MetricError, match="metric 'train_tokens' is a "):
        make_trainer(step=step).fit(regression(8))


def test_a_metric_function_may_return_any_real_number() -> None:
    values = {"a": np.float32(0.5), "b": np.int64(2), "c": True, "d": torch.ones(1), "e": torch.tensor(True)}
    metrics = {name: lambda outputs, targets, value=value: value for name, value in values.items()}
    recorded = make_trainer(metrics=metrics).fit(regression(8)).metrics
    assert [recorded[f"train_{name}"] for name in "abcde"] == [0.5, 2.0, 1.0, 1.0, 1.0]


def test_what_is_refused_leaves_no_trace_in_the_epochs_numbers() -> None:
    metrics = EpochMetrics(torch.device("cpu"))
    with pytest.raises(MetricError):
        metrics.record("x", torch.ones(2))
    with pytest.raises(MetricError):
        metrics.record("x", None)  # type: ignore[arg-type]
    metrics.record("y", 2)
    assert metrics.compute() == {"y": 2.0}
