"""What every callback that only watches must hold: it changes nothing that is learnt, and it survives any use."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_trainer,
    regression,
    through_file,
)
from trainer import Callback, Trainer
from trainer.data.plan import Plan

EPOCHS = 2
STEPS = 3 * EPOCHS  # 12 samples in batches of 4

Make = Callable[[], Callback]


class Saver(Callback):
    """With it among them, callbacks must declare what a resumed run would forget."""

    priority = 95
    saves = True


def fit(*callbacks: Callback, checkpoint: dict[str, Any] | None = None) -> Trainer:
    """The run that all of this compares, from its start or from a checkpoint."""
    trainer = make_trainer(callbacks, max_epochs=EPOCHS, seed=5)
    if checkpoint is not None:
        trainer.load_state_dict(checkpoint)
    trainer.fit(regression(), regression(9, seed=8))
    return trainer


def learnt(trainer: Trainer) -> dict[str, Any]:
    """Weights, optimizer, progress and the metrics of a run without any callback."""
    found = frozen(trainer)
    del found["callbacks"]
    for metrics in found["state"]["history"]:
        for name in metrics.keys() - {"train_loss", "val_loss", "lr"}:
            del metrics[name]
    return found


@cache
def plain() -> dict[str, Any]:
    return learnt(fit())


def assert_changes_nothing(make: Make) -> None:
    """The same bits with the callback, whole and resumed at every batch."""
    assert_same(learnt(fit(make())), plain())
    for step in range(1, STEPS):
        stopped = fit(make(), interrupt_at(step))
        assert stopped.state.step == step
        assert_same(learnt(fit(make(), checkpoint=through_file(stopped.state_dict()))), plain())


def assert_survives(make: Make) -> None:
    """Any use: two fits, no epoch, errors, validation alone, teardown without a fit and twice."""
    callback = make()
    trainer = make_trainer([callback, Saver()], max_epochs=3)
    trainer.fit(regression(), regression())
    trainer.plan = Plan(max_epochs=5)
    assert trainer.fit(regression(), regression()).epoch == 5
    callback.teardown(trainer)
    fresh = make()
    fresh.load_state_dict(through_file(callback.state_dict()))
    assert_same(fresh.state_dict(), callback.state_dict())
    alone = make_trainer([make()])
    assert alone.validate(regression())["val_loss"] > 0
    assert alone.test(regression())["test_loss"] > 0
    make_trainer([make()], max_epochs=0).fit(regression(), regression())
    make_trainer([make()], max_epochs=3).fit(regression())
    _survives_errors(make)


def _survives_errors(make: Make) -> None:
    def fail(trainer: Any) -> None:
        raise ZeroDivisionError

    for event in ("setup", "on_fit_start", "on_train_epoch_start", "on_before_forward", "on_epoch_end"):
        for priority in (1, 99):
            with pytest.raises(ZeroDivisionError):
                fit(make(), At(event, fail, priority=priority))
