"""Signs of life of many leases in one statement, on each database."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from hpo.errors import LeaseLostError
from hpo.storage import beats, ledger
from hpo.storage.beats import Beat
from hpo.storage.ledger import Lease, Owner
from hpo.storage.study_storage import StudyStorage
from tests.support.owners import load, make_study, opened, study_id


def test_each_lease_gets_its_own_seconds_and_an_ended_one_gets_no_beat(
    two_owners: tuple[StudyStorage, StudyStorage],
) -> None:
    first, second = two_owners
    study = load(first)
    leases = [Lease(study.ask()._trial_id, 1) for _ in range(4)]
    ended, other = leases[1], Lease(leases[2].trial_id, 7)
    with second.transaction() as session:
        ledger.end(session, *ended, "lost", seconds=0.5)
    before = {attempt.trial_id: attempt for attempt in _attempts(first)}
    given = [Beat(lease, 10.0 + at) for at, lease in enumerate([*leases, other])]
    with first.one_transaction() as conn:
        assert beats.give(conn, given) == [ended, other]
    after = {attempt.trial_id: attempt for attempt in _attempts(first)}
    for beat in given:
        trial_id = beat.lease.trial_id
        if beat.lease == ended:
            assert after[trial_id] == before[trial_id]
        elif beat.lease != other:
            assert after[trial_id].seconds == beat.seconds
            assert after[trial_id].beat_at > before[trial_id].beat_at
    assert first.beat() == [ended], "of those that this storage holds"


def test_many_leases_are_few_statements_of_one_transaction(two_owners: tuple[StudyStorage, StudyStorage]) -> None:
    first, _ = two_owners
    held = Lease(load(first).ask()._trial_id, 1)
    absent = [Lease(10**6 + at, 1) for at in range(250)]
    done: list[str] = []
    sa.event.listen(first.engine, "before_cursor_execute", lambda *given: done.append(given[2].split(" ", 1)[0]))
    sa.event.listen(first.engine, "commit", lambda _: done.append("commit"))
    with first.one_transaction() as conn:
        assert beats.give(conn, [Beat(lease, 1.0) for lease in [held, *absent]]) == absent
    assert [each for each in done if each != "BEGIN"] == ["UPDATE", "SELECT"] * 3 + ["commit"]


def _attempts(storage: StudyStorage) -> list[ledger.Attempt]:
    with storage.engine.connect() as conn:
        return ledger.attempts(conn, study_id(storage))


def test_a_trial_that_is_given_up_during_a_beat_does_not_end_the_beats(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_study(sqlite_url, 2)
    with opened(sqlite_url, owner=Owner.current()) as storage:
        trials = [load(storage).ask()._trial_id for _ in range(2)]

        def give_up() -> float:
            for trial_id in trials:
                storage.forget(trial_id)
            return 0.0

        monkeypatch.setattr("hpo.storage.leased.time", SimpleNamespace(monotonic=give_up))
        assert storage.beat() == []
        for use in (storage.held_for, storage.attempt_of):
            with pytest.raises(LeaseLostError):
                use(trials[0])
