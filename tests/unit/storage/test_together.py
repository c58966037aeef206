"""Several writes to a trial in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optuna
import pytest
import sqlalchemy as sa

from hpo.errors import LeaseLostError
from hpo.storage.grants import Grant
from hpo.storage.ledger import Owner
from hpo.storage.pausing import paused_at
from hpo.storage.recovery import settle_process
from hpo.storage.settling import Verdict
from hpo.storage.study_storage import StudyStorage
from tests.support.owners import load, make_study, opened, study_id


@contextmanager
def transactions(storage: StudyStorage) -> Iterator[list[str]]:
    """The statements that write, or begin a transaction, in their order."""
    found: list[str] = []

    def note(*args: Any) -> None:
        if not args[2].startswith("SELECT"):
            found.append(args[2].split()[0])

    sa.event.listen(storage.engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        sa.event.remove(storage.engine, "before_cursor_execute", note)


def test_what_is_written_together_is_stored_by_one_statement_of_each_kind_at_the_end(ready_url: str) -> None:
    make_study(ready_url, 3)
    with opened(ready_url, owner=Owner.current()) as storage, opened(ready_url) as other:
        trial, x = load(storage, 0).ask(), optuna.distributions.FloatDistribution(0.0, 1.0)
        with transactions(storage) as found, storage.together(trial._trial_id):
            for name in ("x", "y"):
                storage._set_trial_param(trial._trial_id, name, 0.5, x, x)
            trial.set_user_attr("colour", "red")
            trial.set_user_attr("size", 3)
            with storage.together(trial._trial_id):
                trial.set_user_attr("colour", "blue")
            assert found == []
            assert other.get_trial(trial._trial_id).params == {}
        assert found.count("INSERT") == 2
        stored = other.get_trial(trial._trial_id)
        assert stored.params == {"x": 0.5, "y": 0.5}
        assert stored.user_attrs == {"colour": "blue", "size": 3}


@pytest.mark.parametrize("state", ["pause", "requeue", "complete"])
def test_they_are_stored_with_a_change_of_state_inside(state: str, ready_url: str) -> None:
    make_study(ready_url, 3)
    with opened(ready_url, owner=Owner.current()) as storage, opened(ready_url) as other:
        study = load(storage, 0)
        trial = study.ask()
        with storage.together(trial._trial_id):
            trial.set_user_attr("colour", "red")
            trial.set_user_attr("size", 3)
            if state == "pause":
                storage.pause(trial._trial_id, 1)
            elif state == "requeue":
                storage.requeue(trial._trial_id)
            else:
                study.tell(trial, 1.0)
            stored = other.get_trial(trial._trial_id)
            assert {name: stored.user_attrs[name] for name in ("colour", "size")} == {"colour": "red", "size": 3}
        assert (paused_at(other.get_trial(trial._trial_id)) == 1) is (state == "pause")


def test_an_error_of_the_studys_loses_nothing(ready_url: str) -> None:
    make_study(ready_url, 3)
    with opened(ready_url, owner=Owner.current()) as storage:
        trial = load(storage, 0).ask()

        def fail() -> None:
            with storage.together(trial._trial_id):
                trial.set_user_attr("colour", "red")
                trial.set_user_attr("size", 1 / 0)

        with pytest.raises(ZeroDivisionError):
            fail()
        assert storage.get_trial(trial._trial_id).user_attrs == {"colour": "red"}


@pytest.mark.parametrize("ends", [True, False])
def test_without_the_lease_nothing_of_it_is_stored(ready_url: str, *, ends: bool) -> None:
    make_study(ready_url, 3)
    owner = Owner.current()
    with opened(ready_url, owner=owner) as storage, opened(ready_url) as other:
        trial = load(storage, 0).ask()

        def write() -> None:
            with storage.together(trial._trial_id):
                trial.set_user_attr("colour", "red")
                trial.set_user_attr("size", 3)
                lose(other, owner)
                if ends:
                    storage.pause(trial._trial_id, 1)

        with pytest.raises(LeaseLostError):
            write()
        assert other.get_trial(trial._trial_id).user_attrs == {}
        with pytest.raises(LeaseLostError):  # one row is refused alike
            trial.set_user_attr("size", 3)


def lose(other: StudyStorage, owner: Owner) -> None:
    """Take the trials of a process back, as if it had died."""
    study = other.get_study_id_from_name("study")
    table = sa.table("hpo_attempts", sa.column("pid"), sa.column("start_time"))
    with other.engine.begin() as conn:  # it is this one, which lives: give the attempt another's start
        conn.execute(sa.update(table).values(start_time=owner.start_time + 1))
    assert settle_process(other, study, owner.pid, Verdict("lost", "a test"))


def test_another_trial_and_an_owner_of_none_are_not_held_back(ready_url: str) -> None:
    make_study(ready_url, 3)
    with opened(ready_url, owner=Owner.current()) as storage, opened(ready_url) as other:
        study = load(storage, 0)
        first, second = study.ask(), study.ask()
        with storage.together(first._trial_id):
            second.set_user_attr("colour", "red")
            assert other.get_trial(second._trial_id).user_attrs == {"colour": "red"}
        free = optuna.trial.Trial(load(other, 0), first._trial_id)
        with other.together(first._trial_id):
            free.set_user_attr("a", 1)
            free.set_user_attr("b", 2)
        assert storage.get_trial(first._trial_id).user_attrs == {"a": 1, "b": 2}


def test_what_an_owner_has_reported_is_in_the_first_trial_that_it_reads(sqlite_url: str) -> None:
    make_study(sqlite_url, 3)
    with opened(sqlite_url, owner=Owner.current()) as storage:
        study = study_id(storage)
        storage.begin_grants(study)
        writes: list[Callable[[int], object]] = [
            lambda trial: storage.set_trial_intermediate_value(trial, 1, 0.5),
            lambda trial: storage.extend(trial, Grant(study, {"number": 0, "until": 2, "why": {}}), {1: 0.5}),
        ]
        for write in writes:
            trial = storage.create_new_trial(study)
            write(trial)
            assert storage.get_trial(trial).intermediate_values == {1: 0.5}


@pytest.mark.parametrize("ends", [True, False])
def test_what_follows_a_parameter_that_is_there_already_is_stored(ready_url: str, *, ends: bool) -> None:
    make_study(ready_url, 3)
    with opened(ready_url, owner=Owner.current()) as storage, opened(ready_url) as other:
        study, x = load(storage, 0), optuna.distributions.FloatDistribution(0.0, 1.0)
        trial = study.ask()
        for value in (0.25, 0.5):
            with storage.together(trial._trial_id):
                storage._set_trial_param(trial._trial_id, "x", value, x, x)
                trial.set_user_attr("size", value)
                storage.set_trial_intermediate_value(trial._trial_id, 3, value)
                if ends and value == 0.5:
                    study.tell(trial, 1.0)
        stored = other.get_trial(trial._trial_id)
        assert (stored.params, stored.user_attrs["size"]) == ({"x": 0.25}, 0.5)
        assert stored.intermediate_values == {3: 0.5}
