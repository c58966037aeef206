"""Reports beside the training, or gathered: in order and complete; what fails there fails the run."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial

from hpo.errors import LeaseLostError
from hpo.storage.attributes import PRUNED_ATTR
from hpo.storage.ledger import Owner
from hpo.storage.optuna_private import id_of_trial
from hpo.storage.study_storage import StudyStorage
from hpo.study.open_study import OpenStudy, load_study
from hpo.trial import reports
from hpo.trial.reports import GatheredReports, LateReports
from tests.support.attempts import AskedAt
from tests.support.commands import PATIENCE
from tests.support.studies import Studies, ask, take
from tests.unit.trial.test_callbacks import DATA, in_history, make_trainer, stored
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
    trainer = make_trainer(view, trial, LOSSES, kind=LateReports)
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


def test_a_decision_that_is_under_way_comes_before_the_end_of_a_grant(studies: Studies) -> None:
    with studies.open("study.n_trials=1", "study.epochs=2") as (view,):
        view.study.pruner = AskedAt(prune_at=2)
        trial = take(view)
        assert isinstance(trial, optuna.Trial)
        with pytest.raises(optuna.TrialPruned, match="after epoch 2"):
            make_trainer(view, trial, LOSSES, kind=LateReports).fit(DATA, DATA)


@pytest.mark.parametrize(("died", "asked"), [(True, [2]), (False, [3, 4])])
@pytest.mark.parametrize("last_stored", [1, 2])
def test_after_a_death_the_pruner_is_asked_about_the_last_epoch(
    studies: Studies, last_stored: int, *, died: bool, asked: list[int]
) -> None:
    """The process may have died after it wrote the epoch's checkpoint, and before the pruner had been asked."""
    with studies.open() as (view,):
        before = load_study(view.spec, dataclasses.replace(Owner.current(), start_time=1.0)) if died else view
        trial, _ = ask(before)
        first = make_trainer(before, trial, LOSSES[:2])
        first.callbacks = type(first.callbacks)()
        first.fit(DATA, DATA)
        for step, value in enumerate(LOSSES[:last_stored], start=1):
            trial.report(value, step)
        if died:
            assert [each.attempt for each in view.requeue_dead()] == [1]
            before.storage.close()
        else:
            view.storage.requeue(trial._trial_id)
        again, trainer = started(view, pruner := AskedAt(prune_at=2))
        trainer.load_state_dict(first.state_dict())
        with pytest.raises(optuna.TrialPruned, match="after epoch 2") if died else nullcontext():
            trainer.fit(DATA, DATA)
        assert (again.number, pruner.steps) == (trial.number, asked)
        assert stored(view, again) == in_history(trainer)


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
        _, trainer = started(view, Doing(lambda _: waited.append(epochs.second.wait(PATIENCE))), epochs)
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


# ---- several epochs together


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The epochs of each time that values are stored."""
    stored_together: list[list[int]] = []
    store = StudyStorage.set_trial_intermediate_values

    def note(self: StudyStorage, trial_id: int, values: dict[int, float]) -> None:
        stored_together.append(list(values))
        store(self, trial_id, values)

    monkeypatch.setattr(StudyStorage, "set_trial_intermediate_values", note)
    return stored_together


def gathering(view: OpenStudy, *callbacks: Callback) -> tuple[optuna.Trial, Trainer]:
    trial, _ = ask(view)
    trainer = make_trainer(view, trial, LOSSES, kind=GatheredReports)
    for callback in callbacks:
        trainer.callbacks.add(callback)
    return trial, trainer


class Watching(Callback):
    """Does something at the start of each epoch."""

    def __init__(self, action: Callable[[int], None]) -> None:
        self.action = action

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        self.action(trainer.state.epoch)


def test_values_of_several_epochs_are_stored_together(
    studies: Studies, stores: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_LATEST", 600.0)
    with studies.open() as (view,):
        trial, trainer = gathering(view)
        trainer.fit(DATA, DATA)
        assert stored(view, trial) == in_history(trainer) == dict(enumerate(LOSSES, start=1))
        assert stores == [[1, 2, 3, 4]]
        assert_no_thread_is_left()


def test_no_value_waits_for_the_next_epoch(
    studies: Studies, stores: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch may take hours: what is gathered is stored beside it."""
    monkeypatch.setattr(reports, "_LATEST", 0.01)

    def wait(epoch: int) -> None:
        while sum(map(len, stores)) < epoch:
            time.sleep(0.001)

    with studies.open() as (view,):
        _, trainer = gathering(view, Watching(wait))
        trainer.fit(DATA, DATA)
        assert stores == [[1], [2], [3], [4]]


def test_what_is_gathered_is_stored_when_the_training_fails(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, trainer = gathering(view, Failing())
        with pytest.raises(ValueError, match="mine"):
            trainer.fit(DATA, DATA)
        assert stored(view, trial) == {1: 4.0}
        assert_no_thread_is_left()


@pytest.mark.parametrize("latest", [0.0, 600.0])
def test_a_lease_lost_meanwhile_ends_the_run(
    studies: Studies, latest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_LATEST", latest)
    with studies.open() as (view,):
        trial, trainer = gathering(view, Watching(lambda epoch: view.storage.forget(id_of_trial(trial))))
        with pytest.raises(LeaseLostError):
            trainer.fit(DATA, DATA)
        assert stored(view, trial) == {}
        assert_no_thread_is_left()


def test_values_stored_together_are_all_there_or_none(studies: Studies) -> None:
    values = {1: 2.0, 2: math.nan, 3: -math.inf, 5: 0.5}
    with studies.open() as (view,):
        trial, _ = ask(view)
        view.storage.set_trial_intermediate_value(trial._trial_id, 1, 9.0)
        view.storage.set_trial_intermediate_values(trial._trial_id, values)
        assert repr(view.storage.get_trial(trial._trial_id).intermediate_values) == repr(values)
        with pytest.raises(TypeError):
            view.storage.set_trial_intermediate_values(trial._trial_id, {6: 1.0, 7: None})  # type: ignore[dict-item]
        assert 6 not in view.storage.get_trial(trial._trial_id).intermediate_values
        view.study.tell(trial, 1.0)
        for later in (values, {6: 1.0}):
            with pytest.raises(UpdateFinishedTrialError):
                view.storage.set_trial_intermediate_values(trial._trial_id, later)
