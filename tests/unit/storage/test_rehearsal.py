"""What a worker does on the storage before it forks the processes of its trials."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from hpo.storage import ledger
from hpo.storage.grants import Grant
from hpo.storage.ledger import Owner
from hpo.storage.outage import DatabaseAwayError
from hpo.storage.study_storage import StudyStorage
from tests.support.owners import load, make_study, opened


def tables(storage: StudyStorage) -> dict[str, list[Any]]:
    """Every row of the database."""
    metadata = sa.MetaData()
    metadata.reflect(storage.engine)
    with storage.engine.connect() as conn:
        return {
            name: sorted(map(repr, conn.execute(sa.select(table)).all()))
            for name, table in metadata.tables.items()
        }


def test_a_rehearsal_changes_nothing_and_leaves_the_statements_of_a_trial_compiled(ready_url: str) -> None:
    make_study(ready_url, 3, enqueued=1)
    with opened(ready_url, owner=Owner.current()) as storage:
        load(storage, 0).ask()
        study = storage.get_study_id_from_name("study")
        before = tables(storage)
        storage.rehearse(study)
        assert tables(storage) == before
        assert storage.beat() == [], "only the trial is held, and it is still"
        storage.rehearse(study)  # whatever a refusal leads to is compiled by now
        cache: Any = storage.engine._compiled_cache
        compiled = set(cache)
        storage.rehearse(study)
        assert set(cache) == compiled
        trial = load(storage, 0).ask()
        asked = set(cache)
        trial.report(0.5, 1)
        trial.set_user_attr("colour", "red")
        assert set(cache) == asked


def test_a_rehearsal_leaves_what_pauses_and_resumes_a_granted_trial_compiled(ready_url: str) -> None:
    make_study(ready_url, 3)
    with opened(ready_url, owner=Owner.current()) as storage:
        study = storage.get_study_id_from_name("study")
        storage.begin_grants(study)
        before = tables(storage)
        storage.rehearse(study)
        assert tables(storage) == before
        cache: Any = storage.engine._compiled_cache
        compiled = set(cache)
        with storage.granting(grant(study, 0)):
            trial = storage.create_new_trial(study)
        storage.pause(trial, 2)
        with storage.granting(grant(study, 1)):
            assert storage.resume(trial)
        assert set(cache) == compiled


def test_a_grant_by_another_worker_meanwhile_ends_the_rehearsal_only(
    ready_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_study(ready_url, 3)
    with (
        opened(ready_url, owner=Owner.current()) as storage,
        opened(ready_url, owner=Owner.current()) as other,
    ):
        study = storage.get_study_id_from_name("study")
        storage.begin_grants(study)
        read = storage.get_study_user_attrs

        def overtaken(study_id: int) -> dict[str, Any]:
            attrs = read(study_id)
            with other.granting(grant(study, 0)):
                other.create_new_trial(study)
            return attrs

        monkeypatch.setattr(storage, "get_study_user_attrs", overtaken)
        storage.rehearse(study)
        assert storage.get_n_trials(study) == 1


def test_a_rehearsal_that_the_database_breaks_off_is_done_again(
    ready_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_study(ready_url, 3)
    with opened(ready_url, owner=Owner.current()) as storage:
        study = storage.get_study_id_from_name("study")
        outages: list[Exception] = [DatabaseAwayError("deadlock found when trying to get lock")]
        claim = ledger.claim

        def broken_off(*args: Any) -> int:
            if outages:
                raise outages.pop()
            return claim(*args)

        monkeypatch.setattr(ledger, "claim", broken_off)
        storage.rehearse(study)
        assert not outages
        assert storage.get_n_trials(study) == 0


def grant(study: int, number: int) -> Grant:
    return Grant(study, {"number": number, "until": 2 * number + 2, "why": {"kind": "model"}}, {}, None)
