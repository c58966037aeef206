"""Reports beside the training: in order, complete, acted on one epoch late; what fails there fails the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial

from hpo.errors import LeaseLostError
from hpo.storage.attributes import PRUNED_ATTR
from hpo.study.open_study import OpenStudy
from tests.support.studies import Studies, ask
from tests.unit.trial.test_callbacks import DATA, AskedAt, in_history, make_trainer, stored
from trainer import Callback, Trainer
from trainer.callback import TrainerView
from trainer.state import PRUNED

LOSSES = [4.0, 3.0, 2.0, 1.0]


class Doing(AskedAt):
    """Does something when it is asked."""

    def __init__(self, action: Callable[[int], Any]) -> None:
        super().__init__()
        self.action = action

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        super().prune(study, trial)
        self.action(self.steps[-1])
        return False


def started(view: OpenStudy, pruner: AskedAt, *callbacks: Callback) -> tuple[optuna.Trial, Trainer]:
    view.study.pruner = pruner
    trial, _ = ask(view)
    trainer = make_trainer(view, trial, LOSSES, background=True)
    for callback in callbacks:
        trainer.callbacks.add(callback)
    return trial, trainer


def assert_no_thread_is_left() -> None:
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hpo-reports")]


def test_all_is_stored_and_asked_about_in_order(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, trainer = started(view, pruner := AskedAt())
        trainer.fit(DATA, DATA)
        assert stored(view, trial) == in_history(trainer) == dict(enumerate(LOSSES, start=1))
        assert pruner.steps == [1, 2, 3, 4]
        assert_no_thread_is_left()


@pytest.mark.parametrize(("decided", "ends"), [(1, 2), (3, 4), (4, 4)])
def test_a_decision_is_acted_on_one_epoch_late_at_most(studies: Studies, decided: int, ends: int) -> None:
    with studies.open() as (view,):
        trial, trainer = started(view, pruner := AskedAt(prune_at=decided))
        with pytest.raises(optuna.TrialPruned, match=f"after epoch {ends}"):
            trainer.fit(DATA, DATA)
        assert trainer.state.stop_reason == PRUNED
        assert stored(view, trial) == in_history(trainer) == dict(enumerate(LOSSES[:ends], start=1))
        assert view.storage.get_trial(trial._trial_id).user_attrs[PRUNED_ATTR] == decided
        assert pruner.steps == list(range(1, decided + 1))
        assert_no_thread_is_left()


class Epochs(Callback):
    """Says when the second epoch begins."""

    def __init__(self) -> None:
        self.second = threading.Event()

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        if trainer.state.epoch == 1:
            self.second.set()


def test_the_next_epoch_begins_while_the_pruner_is_thinking(studies: Studies) -> None:
    epochs, waited = Epochs(), []
    with studies.open() as (view,):
        _, trainer = started(view, Doing(lambda _: waited.append(epochs.second.wait(20))), epochs)
        trainer.fit(DATA, DATA)
        assert waited == [True] * 4


@pytest.mark.parametrize("at", [1, 4])
def test_an_error_there_ends_the_run_with_its_type(studies: Studies, at: int) -> None:
    def fail(step: int) -> None:
        if step == at:
            raise StorageInternalError("the database is gone")

    with studies.open() as (view,):
        _, trainer = started(view, Doing(fail))
        with pytest.raises(StorageInternalError, match="gone"):
            trainer.fit(DATA, DATA)
        assert trainer.state.epoch == min(at + 1, 4)
        assert_no_thread_is_left()


def test_a_lease_lost_there_is_told_to_the_training(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, trainer = started(view, Doing(lambda _: view.storage.forget(trial._trial_id)))
        with pytest.raises(LeaseLostError):
            trainer.fit(DATA, DATA)
        assert trainer.state.epoch == 3


class Failing(Callback):
    """Fails in its second epoch."""

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        if trainer.state.epoch == 1:
            raise ValueError("mine")


def test_what_is_under_way_is_stored_when_the_training_fails(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, trainer = started(view, AskedAt(prune_at=1), Failing())
        with pytest.raises(ValueError, match="mine"):
            trainer.fit(DATA, DATA)
        assert stored(view, trial) == {1: 4.0}
        assert view.storage.get_trial(trial._trial_id).user_attrs[PRUNED_ATTR] == 1
        assert_no_thread_is_left()
