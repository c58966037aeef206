"""Deterministic mode: on while a trainer runs, as before afterwards, and refusing what has no such algorithm."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.unit.trainer.support import At, make_model, make_trainer, regression


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


def mode() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )


@pytest.mark.parametrize("before", [(False, False, True), (True, True, False)])
def test_it_is_on_from_setup_to_teardown_and_then_as_before(before: tuple[bool, bool, bool]) -> None:
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.backends.cudnn.benchmark = before[2]
    seen = []
    events = ("setup", "on_train_batch_end", "on_validation_batch_end", "on_test_batch_end", "on_fit_end")
    watches = [At(event, lambda trainer: seen.append(mode()), priority=0) for event in events]
    trainer = make_trainer(watches, deterministic=True, max_epochs=1)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    trainer.fit(regression(4), regression(4))
    assert mode() == before
    trainer.test(regression(4))
    assert seen == [(True, False, False)] * 6
    assert mode() == before


def test_it_is_as_before_after_an_error_too() -> None:
    def fail(trainer: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_trainer([At("on_train_batch_end", fail)], deterministic=True).fit(regression())
    assert mode() == (False, False, False)


def test_an_operation_without_such_an_algorithm_is_refused_by_its_name() -> None:
    def step(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = model(batch[0]).square().mean()
        torch.zeros(4).put_(torch.zeros(2, dtype=torch.long), torch.ones(2))  # two writes to one place
        return loss

    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        make_trainer(model=make_model(), step=step, deterministic=True).fit(regression())
    make_trainer(model=make_model(), step=step).fit(regression())
