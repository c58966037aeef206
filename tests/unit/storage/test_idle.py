"""Connections that a process closes while it does not use them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from hpo.storage import idle
from hpo.storage.idle import IdlePool
from hpo.storage.ledger import Owner
from tests.support.owners import load, make_study, opened
from tests.support.servers import PostgresServer


def test_what_is_idle_is_closed_and_what_is_in_use_stays(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/a.db", poolclass=IdlePool, pool_size=1, max_overflow=1)
    pool, events = engine.pool, list[str]()
    assert isinstance(pool, IdlePool)
    sa.event.listen(engine, "connect", lambda *_: events.append("opened"))
    sa.event.listen(engine, "close", lambda *_: events.append("closed"))
    pool.close_idle(0.0)  # it has none yet
    for _ in range(2):
        with engine.connect() as conn:
            conn.exec_driver_sql("SELECT 1")
            pool.close_idle(0.0)
            assert conn.exec_driver_sql("SELECT 1").scalar() == 1
        pool.close_idle(60.0)
        assert pool.checkedin() == 1
        time.sleep(0.01)
        pool.close_idle(0.01)
        assert (pool.checkedin(), pool.checkedout()) == (0, 0)
    assert events == ["opened", "closed"] * 2
    with engine.connect(), engine.connect():  # there is room for as many as before
        assert pool.checkedout() == 2
    engine.dispose()


def test_a_connection_is_asked_whether_it_works_unless_it_just_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/a.db", poolclass=IdlePool, pool_pre_ping=True)
    asked = list[float]()

    def ping(_: object) -> bool:
        asked.append(idle._FRESH)
        return True

    monkeypatch.setattr(engine.dialect, "do_ping", ping)
    for _ in range(2):  # the second time with the pool that takes the place of the closed one
        for fresh in (3600.0, 3600.0, 0.0, 3600.0, 0.0):
            monkeypatch.setattr(idle, "_FRESH", fresh)
            engine.connect().close()
        engine.dispose()
    assert asked == [0.0, 0.0] * 2


def test_a_storage_gives_an_idle_connection_back_to_the_server(postgres_server: PostgresServer) -> None:
    url = postgres_server.new_database(ready=True)
    make_study(url, 1)
    database = str(sa.make_url(url).database)
    with opened(url, owner=Owner.current()) as storage:
        trial = load(storage).ask()
        for step in (1, 2):
            trial.report(1.0, step)
            assert len(postgres_server.connections(database)) == 1
            storage.rest_if_idle(3600.0)
            assert len(postgres_server.connections(database)) == 1
            storage.rest_if_idle(0.0)
            deadline = time.monotonic() + 30
            while postgres_server.connections(database) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert postgres_server.connections(database) == []
        load(storage).tell(trial, 1.0)
        assert storage.get_trial(trial._trial_id).intermediate_values == {1: 1.0, 2: 1.0}
