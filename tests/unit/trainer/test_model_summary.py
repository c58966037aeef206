"""A model at a glance: shapes and numbers as counted by hand, and nothing that the look changes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.trainer.support import assert_same, frozen, make_model, make_trainer, regression
from trainer import summary
from trainer.callbacks import ModelSummary


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.tied = self.encoder[0]
        self.spare = nn.Linear(2, 2)
        self.head = nn.Linear(3, 1).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> dict[str, Any]:
        hidden = self.encoder(inputs)
        return {"hidden": hidden, "out": (self.head(hidden), hidden.sum())}


EXPECTED = [
    ("", "Net", ((5, 3), (5, 1), ()), 31, 27),
    ("encoder", "Sequential", ((5, 3),), 21, 21),
    ("encoder.0", "Linear", ((5, 3),), 15, 15),
    ("encoder.1", "BatchNorm1d", ((5, 3),), 6, 6),
    ("spare", "Linear", (), 6, 6),
    ("head", "Linear", ((5, 1),), 4, 0),
]


@pytest.mark.parametrize("batch", [torch.ones(5, 4), (torch.ones(5, 4), torch.ones(5))])
@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_rows_are_what_the_modules_are(batch: Any, depth: int) -> None:
    rows = summary(nn.DataParallel(Net()), batch, depth=depth).rows
    assert [(row.name, row.kind, row.shapes, row.parameters, row.trainable) for row in rows] == [
        each for each in EXPECTED if each[0].count(".") + bool(each[0]) <= depth
    ]


def test_the_table_is_lined_up() -> None:
    lines = str(summary(Net(), torch.ones(5, 4), depth=1)).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.split() for line in lines[1:]] == [
        ["Net", "5x3,", "5x1,", "scalar", "31", "27"],
        ["encoder", "(Sequential)", "5x3", "21", "21"],
        ["spare", "(Linear)", "—", "6", "6"],
        ["head", "(Linear)", "5x1", "4", "0"],
    ]


def updating(model: nn.Module, batch: torch.Tensor, update: Any) -> torch.Tensor:
    loss = model(batch)["hidden"].square().mean()
    update(loss)
    return loss


class Evaluated:
    def __call__(self, model: nn.Module, batch: torch.Tensor, update: Any) -> torch.Tensor:
        raise AssertionError("it trains")

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> None:
        model(batch)


@pytest.mark.parametrize("step", [updating, Evaluated()])
def test_a_step_with_updates_calls_the_model_as_in_validation(step: Any) -> None:
    rows = summary(Net(), torch.ones(5, 4), step=step, depth=0).rows
    assert rows[0].shapes == ((5, 3), (5, 1), ())


def test_a_step_calls_the_model_with_batches_of_any_kind() -> None:
    def step(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = model(batch["x"]).sum()
        return loss

    rows = summary(nn.Linear(2, 3), {"x": torch.ones(4, 2)}, step=step).rows
    assert [row.shapes for row in rows] == [((4, 3),)]


def test_a_lazy_model_is_counted_after_the_pass() -> None:
    rows = summary(nn.Sequential(nn.LazyLinear(3)), torch.ones(4, 2)).rows
    assert [(row.shapes, row.parameters) for row in rows] == [(((4, 3),), 9)] * 2


def test_nothing_changes_and_no_hook_stays() -> None:
    model = make_model()
    model[3].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, generator = [module.training for module in model.modules()], torch.random.get_rng_state()
    summary(model, torch.ones(5, 4))
    assert_same(dict(model.state_dict()), before)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match="shapes"):
        summary(model, torch.ones(5, 3))
    assert not any(module._forward_hooks for module in model.modules())


def test_the_callback_logs_it_once_a_fit_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    trainer, plain = make_trainer([ModelSummary(depth=1)], max_epochs=2), make_trainer(max_epochs=2)
    with caplog.at_level(logging.INFO, logger="trainer.callbacks.model_summary"):
        trainer.fit(regression(), regression())
    plain.fit(regression(), regression())
    assert_same(frozen(trainer), frozen(plain))
    assert [record.message.splitlines()[2].split() for record in caplog.records] == [
        ["Sequential", "4x1", "49", "49"]
    ]


@pytest.mark.parametrize("make", [ModelSummary, lambda depth: summary(Net(), torch.ones(5, 4), depth=depth)])
def test_a_depth_below_zero_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="depth is -1: give at least 0"):
        make(depth=-1)


def test_a_compiled_part_that_has_been_called_is_looked_into() -> None:
    model = nn.Sequential(nn.Linear(4, 3), torch.compile(nn.Sequential(nn.Linear(3, 2)), backend="eager"))
    before = [row.shapes for row in summary(model, torch.zeros(5, 4), depth=4).rows]
    with torch.no_grad():
        model.eval()(torch.zeros(5, 4))
    assert [row.shapes for row in summary(model, torch.zeros(5, 4), depth=4).rows] == before
    assert all(before)
