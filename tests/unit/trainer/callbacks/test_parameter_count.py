"""ParameterCount: shared, frozen and lazy parameters, and the table."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.unit.trainer.callbacks.unchanged import assert_changes_nothing, assert_survives
from tests.unit.trainer.support import At, make_trainer, quick, regression
from trainer import Callback, Trainer
from trainer.callbacks.parameter_count import ParameterCount, parameter_table


class Tied(nn.Module):
    """Two children that share a weight [4, 4], a scale of its own, and a buffer, which is not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.zeros(100))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.second(self.first(inputs)))
        return hidden * self.scale


def fit(model: nn.Module, *callbacks: Callback, **options: Any) -> Trainer:
    trainer = make_trainer([ParameterCount(), *callbacks], model=model, **options)
    trainer.fit(regression(), regression())
    return trainer


def counts(trainer: Trainer) -> list[tuple[float, float]]:
    return [(metrics["parameters"], metrics["trainable_parameters"]) for metrics in trainer.state.history]


def test_every_epoch_has_both_counts() -> None:
    assert counts(fit(nn.Linear(4, 1), max_epochs=3)) == [(5.0, 5.0)] * 3


def test_shared_parameters_count_once() -> None:
    assert counts(fit(Tied())) == [(16 + 4 + 5 + 1, 16 + 4 + 5 + 1)] * 2


def test_frozen_parameters_are_not_trainable() -> None:
    model = Tied()
    model.head.requires_grad_(False)
    assert counts(fit(model)) == [(26.0, 21.0)] * 2


def test_parameters_that_are_freed_later_count_from_then_on() -> None:
    model = Tied()
    model.head.requires_grad_(False)
    free = At(
        "on_train_epoch_start",
        lambda trainer: trainer.model.head.requires_grad_(True),
        lambda trainer: trainer.state.epoch == 1,
    )
    assert counts(fit(model, free)) == [(26.0, 21.0), (26.0, 26.0)]


def test_the_table_has_a_row_for_each_child_and_their_sum() -> None:
    model = Tied()
    model.head.requires_grad_(False)
    rows = [line.rsplit(maxsplit=2) for line in parameter_table(model).splitlines()]
    assert [(name.strip(), *numbers) for name, *numbers in rows] == [
        ("child", "parameters", "trainable"),
        ("(the model itself)", "1", "1"),
        ("first", "20", "20"),
        ("head", "5", "0"),
        ("total", "26", "21"),
    ]


@quick(20)
@given(sizes=st.lists(st.integers(1, 2000), max_size=6), frozen=st.sets(st.integers(0, 5)))
def test_the_rows_add_up(sizes: list[int], frozen: set[int]) -> None:
    model = nn.ModuleList(
        nn.Linear(size, 2).requires_grad_(index not in frozen) for index, size in enumerate(sizes)
    )
    _, *rows, total = [line.replace(",", "").split() for line in parameter_table(model).splitlines()]
    assert [int(row[1]) for row in rows] == [2 * size + 2 for size in sizes]
    for column in (1, 2):
        assert int(total[column]) == sum(int(row[column]) for row in rows)


def tables(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "parameters of the model" in record.getMessage()]


def test_the_table_is_logged_once_a_fit_before_it_trains(caplog: pytest.LogCaptureFixture) -> None:
    logged: list[int] = []
    watch = At("on_train_epoch_start", lambda trainer: logged.append(len(tables(caplog))))
    with caplog.at_level(logging.INFO, "trainer.callbacks.parameter_count"):
        fit(nn.Linear(4, 1), watch)
    assert logged == [1, 1]
    assert tables(caplog)[0].split()[-3:] == ["total", "5", "5"]


def test_only_rank_zero_logs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.callbacks.parameter_count.rank", lambda: 1)
    with caplog.at_level(logging.INFO, "trainer.callbacks.parameter_count"):
        trainer = fit(nn.Linear(4, 1))
    assert tables(caplog) == []
    assert counts(trainer) == [(5.0, 5.0)] * 2


def test_the_table_of_a_wrapped_model_has_its_own_children(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trainer.callbacks.parameter_count"):
        trainer = fit(nn.DataParallel(Tied()))
    assert parameter_table(Tied()) in tables(caplog)[0]
    assert counts(trainer) == [(26.0, 26.0)] * 2


def test_a_model_without_parameters_has_none() -> None:
    assert [line.split() for line in parameter_table(nn.ReLU()).splitlines()][1:] == [["total", "0", "0"]]


def test_lazy_parameters_are_counted_after_the_first_forward(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 1))
    logged: list[int] = []
    watch = At("on_train_epoch_end", lambda trainer: logged.append(len(tables(caplog))))
    with caplog.at_level(logging.INFO, "trainer.callbacks.parameter_count"):
        trainer = fit(model, watch)
    assert counts(trainer) == [(37.0, 37.0)] * 2
    assert logged == [0, 1]
    assert tables(caplog)[0].split()[-3:] == ["total", "37", "37"]


def test_one_callback_logs_for_each_lazy_model(caplog: pytest.LogCaptureFixture) -> None:
    callback = ParameterCount()
    with caplog.at_level(logging.INFO, "trainer.callbacks.parameter_count"):
        for _ in range(2):
            make_trainer([callback], model=nn.LazyLinear(1)).fit(regression(), regression())
    assert [table.split()[-3:] for table in tables(caplog)] == [["total", "5", "5"]] * 2


class Forgotten(nn.Module):
    """Has a lazy module that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 1)
        self.unused = nn.LazyLinear(3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.used(inputs)
        return outputs


def test_lazy_parameters_that_nothing_initialises_are_an_error() -> None:
    model = Forgotten()
    optimizer = torch.optim.SGD(model.used.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"unused\.weight, unused\.bias have no shape"):
        fit(model, optimizer=optimizer)


def test_nothing_that_is_learnt_changes() -> None:
    assert_changes_nothing(ParameterCount)


def test_survives_any_use() -> None:
    assert_survives(ParameterCount)
