"""What `hpo repair` puts right and what it leaves alone, on real databases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
import pytest
from optuna.trial import TrialState

from hpo.storage import ledger
from hpo.storage.ledger import Attempt, Owner
from hpo.study.open_study import OpenStudy, load_study
from hpo.study.repair import ATTEMPT_REMOVED, FAILED, LEASE_ENDED, REQUEUED, RepairReport, repair
from tests.support.owners import dead_owner
from tests.support.studies import Studies, ask

pytestmark = pytest.mark.full


@pytest.fixture
def view(studies: Studies, ready_url: str) -> Iterator[OpenStudy]:
    """A worker's view of a study, on each kind of database."""
    with studies.open("run.max_retries=1", f"run.storage={ready_url}") as (opened,):
        yield opened


@contextmanager
def another(view: OpenStudy, owner: Owner | None) -> Iterator[OpenStudy]:
    with load_study(view.spec, owner) as opened:
        yield opened


def attempts(view: OpenStudy) -> list[Attempt]:
    with view.storage.engine.connect() as conn:
        return list(map(Attempt._make, conn.execute(ledger.ATTEMPTS.select())))


@contextmanager
def optunas_own(view: OpenStudy) -> Iterator[optuna.storages.RDBStorage]:
    """The database as a tool sees it that knows nothing of leases."""
    storage = optuna.storages.RDBStorage(view.storage.url, skip_table_creation=True)
    try:
        yield storage
    finally:
        storage.scoped_session.remove()
        storage.engine.dispose()


def planned_and_done(view: OpenStudy) -> RepairReport:
    """A repair that did what its dry run had said, and that leaves nothing for another."""
    before = attempts(view)
    planned = repair(view, dry_run=True)
    assert attempts(view) == before
    report = repair(view)
    assert report.done == planned.done
    assert repair(view).done == []
    return report


def test_nothing_is_wrong_with_a_study_that_runs(view: OpenStudy) -> None:
    trial, _ = ask(view)
    report = planned_and_done(view)
    assert report.done == []
    (left,) = report.left
    assert (left.trial, left.attempt) == (0, 1)
    assert "worker-0 is alive: process" in left.reason
    trial.report(1.0, 1)


def test_dead_owners_trials_fail_or_wait_as_the_study_file_says(view: OpenStudy) -> None:
    for attempt, action in ((1, REQUEUED), (2, FAILED)):
        with another(view, dead_owner()) as dead:
            dead.study.ask()
        (entry,) = planned_and_done(view).done
        assert (entry.trial, entry.attempt, entry.action) == (0, attempt, action)
    assert "died 2 times" in entry.reason


def test_a_silent_owner_on_another_host_is_waited_for(view: OpenStudy) -> None:
    with another(view, dead_owner(host="elsewhere")) as far:
        far.study.ask()
    report = planned_and_done(view)
    assert report.done == []
    assert re.fullmatch(
        r"dead on elsewhere is alive: last heard of \d+ s ago, counted dead after 60 s of silence",
        report.left[0].reason,
    )


def test_a_trial_that_runs_without_a_lease_waits_again(view: OpenStudy) -> None:
    with another(view, None) as plain:
        plain.study.ask()
    (entry,) = planned_and_done(view).done
    assert (entry.trial, entry.attempt, entry.action) == (0, 0, REQUEUED)


@pytest.mark.parametrize(
    ("state", "outcome"), [("COMPLETE", "complete"), ("FAIL", "fail"), ("WAITING", "requeued")]
)
def test_a_lease_that_another_tool_has_left_open_is_ended(view: OpenStudy, state: str, outcome: str) -> None:
    trial, _ = ask(view)
    values = [1.0] if state == "COMPLETE" else None
    with optunas_own(view) as storage:
        storage.set_trial_state_values(trial._trial_id, TrialState[state], values)
    (entry,) = planned_and_done(view).done
    assert (entry.trial, entry.attempt, entry.action) == (0, 1, LEASE_ENDED)
    assert [each.outcome for each in attempts(view)] == [outcome]
    assert view.storage.get_all_trials(view.study_id)[0].state == TrialState[state]


def test_attempts_at_trials_that_another_tool_has_deleted_are_removed(view: OpenStudy) -> None:
    with another(view, Owner.current(worker="other")) as other:
        other.storage.create_new_study([optuna.study.StudyDirection.MINIMIZE], "other")
        optuna.load_study(storage=other.storage, study_name="other").ask()
    ask(view)
    with optunas_own(view) as storage:
        optuna.delete_study(storage=storage, study_name="other")
    (entry,) = planned_and_done(view).done
    assert (entry.trial, entry.attempt, entry.action) == (None, 1, ATTEMPT_REMOVED)
    assert [each.worker for each in attempts(view)] == ["worker-0"]
