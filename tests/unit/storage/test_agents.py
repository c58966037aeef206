"""The table of agents: numbers, beats, ends, and the request that all leave, on each database."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import optuna
import pytest
import sqlalchemy as sa

from hpo.storage import agents
from hpo.storage.agents import AGENTS, GONE, SILENT, Agent, AllowedSilence, Joining
from hpo.storage.attributes import STOP_ATTR
from hpo.storage.ledger import Owner
from hpo.storage.recovery import Sightings
from hpo.storage.study_storage import StudyStorage
from hpo.study.agents import end_dead_agents
from tests.support.owners import NAME, make_study, opened, study_id

JOINING = Joining("slurm:7_0", "cpu", 2, "code", "config", "mark", 60.0)


@pytest.fixture
def storage(ready_url: str) -> Iterator[StudyStorage]:
    with opened(ready_url) as storage:
        optuna.create_study(study_name=NAME, storage=storage)
        yield storage


def joined(storage: StudyStorage, workers: int = 2) -> Agent:
    with storage.transaction() as session:
        return agents.register(session, study_id(storage), Owner.current(), replace(JOINING, workers=workers))


def ended(storage: StudyStorage, agent: Agent, ending: str) -> None:
    with storage.one_transaction() as conn:
        agents.end(conn, agent.agent_id, ending)


def open_agents(storage: StudyStorage) -> list[Agent]:
    with storage.engine.connect() as conn:
        return agents.open_agents(conn, study_id(storage))


def test_an_agent_is_stored_as_it_says(storage: StudyStorage) -> None:
    first, second = joined(storage), joined(storage)
    assert open_agents(storage) == [first, second]
    assert (first.number, second.number) == (1, 2)
    said: dict[str, Any] = vars(JOINING) | {
        name: getattr(Owner.current(), name) for name in ("host", "boot_id", "pid", "start_time")
    }
    assert {name: getattr(first, name) for name in said} == said
    assert first.is_alive() is True
    assert first._replace(boot_id="another").is_alive() is None


def test_workers_numbers_are_free_again_only_after_agents_that_are_known_to_have_ended(
    storage: StudyStorage,
) -> None:
    first, second, third = joined(storage, 3), joined(storage, 2), joined(storage, 1)
    assert [each.first_worker for each in (first, second, third)] == [1, 4, 6]
    ended(storage, first, GONE)
    ended(storage, second, SILENT)
    after = [joined(storage, 2), joined(storage, 2), joined(storage, 1)]
    assert [each.first_worker for each in after] == [1, 7, 3], "who was silent may live"
    assert [each.number for each in after] == [4, 5, 6]


def test_what_dead_agents_used_is_free(storage: StudyStorage) -> None:
    study, me = study_id(storage), Owner.current()
    dead = (replace(me, start_time=1.0), replace(me, boot_id="before a restart"))
    with storage.transaction() as session:
        for owner in dead:
            agents.register(session, study, owner, JOINING)
        session.execute(sa.update(AGENTS).values(beat_at=time.time() - 3600))
    known = 2 if storage.engine.name == "sqlite" else 1  # which one machine alone uses
    last = joined(storage)
    assert [each.number for each in open_agents(storage)] == [1, 2, 3][known:]
    assert last.first_worker == (1 if known == 2 else 3)


def test_a_beat_opens_the_row_of_an_agent_that_was_silent(storage: StudyStorage) -> None:
    agent = joined(storage)
    ended(storage, agent, SILENT)
    assert open_agents(storage) == []
    with storage.one_transaction() as conn:
        agents.beat(conn, agent.agent_id)
    (again,) = open_agents(storage)
    assert again.beat_at > agent.beat_at
    assert again._replace(beat_at=agent.beat_at) == agent


def test_a_stop_request_differs_from_all_before_it(storage: StudyStorage) -> None:
    study, seen = study_id(storage), []
    for _ in range(3):
        with storage.engine.connect() as conn:
            seen.append(agents.stop_request(conn, study))
        storage.set_study_system_attr(study, STOP_ATTR, agents.new_stop_request())
    assert seen[0] == ""
    assert len(set(seen)) == 3


def test_a_study_is_deleted_with_its_agents(storage: StudyStorage) -> None:
    joined(storage)
    study = study_id(storage)
    storage.delete_study(study)
    with storage.engine.connect() as conn:
        assert agents.open_agents(conn, study) == []


def test_an_agent_of_a_deleted_study_has_no_part_in_another(storage: StudyStorage) -> None:
    old = joined(storage)
    storage.delete_study(study_id(storage))
    optuna.create_study(study_name=NAME, storage=storage)
    new = joined(storage)
    ended(storage, old, SILENT)
    assert open_agents(storage) == [new]


def test_a_study_has_no_agents_of_a_study_that_another_tool_has_deleted(sqlite_url: str) -> None:
    plain = optuna.storages.RDBStorage(sqlite_url)
    make_study(sqlite_url, 1)
    with opened(sqlite_url) as storage:
        before = study_id(storage)
        joined(storage)
        optuna.delete_study(study_name=NAME, storage=plain)
        make_study(sqlite_url, 1)
        assert study_id(storage) == before, "Optuna's own tables give the id out again"
        with storage.engine.connect() as conn:
            assert agents.open_agents(conn, before) == []
    plain.engine.dispose()


def test_an_agent_is_waited_for_as_long_as_it_waits_for_others(
    storage: StudyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, clock = study_id(storage), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    with storage.transaction() as session:
        owner = replace(Owner.current(), boot_id="another")
        patient, hasty = (
            agents.register(session, study, owner, replace(JOINING, lost_after=seconds))
            for seconds in (120.0, 6.0)
        )
    look = partial(end_dead_agents, storage, study, grace=60.0, sightings=Sightings())
    monkeypatch.setattr(time, "time", lambda: patient.beat_at + 1000)
    ended_at = {}
    for _ in range(9):
        ended_at |= {each.agent_id: clock for each in look()}
        clock += 19.0
    assert ended_at == {hasty.agent_id: 100.0 + 4 * 19.0, patient.agent_id: 100.0 + 7 * 19.0}


def test_a_table_of_an_earlier_version_gets_its_new_column(ready_url: str) -> None:
    with opened(ready_url) as storage:
        optuna.create_study(study_name=NAME, storage=storage)
        joined(storage)
        with storage.engine.begin() as conn:
            conn.exec_driver_sql("ALTER TABLE hpo_agents DROP COLUMN lost_after")
    with opened(ready_url) as storage:
        (earlier,) = open_agents(storage)
        assert earlier.lost_after is None
        assert earlier.allowed_silence(30.0) == 30.0
        later = joined(storage)
        with storage.engine.connect() as conn:
            assert AllowedSilence.of(conn, study_id(storage), 30.0).of_agents == {later.agent_id: 60.0}


@pytest.mark.parametrize("ahead", [100.0, -100.0])
def test_a_dead_agent_is_ended_by_who_notices_whichever_clock_is_ahead(
    storage: StudyStorage, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    study, me = study_id(storage), Owner.current()
    clock = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    with storage.transaction() as session:
        here, far, dead = (
            agents.register(session, study, owner, JOINING)
            for owner in (me, replace(me, boot_id="another"), replace(me, start_time=1.0))
        )
    look = partial(end_dead_agents, storage, study, grace=60.0, sightings=Sightings())
    assert look() == [], "they have just beaten"
    monkeypatch.setattr(time, "time", lambda: far.beat_at + ahead)
    assert look() == [dead]
    for _ in range(4):
        clock += 19.0
        assert [each.agent_id for each in look()] == ([far.agent_id] if clock > 160.0 else [])
    assert open_agents(storage) == [here], "its process lives, however long it is silent"
