"""The connections of an agent and its workers to PostgreSQL: two, through a pooler that nothing depends on."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Self

import psutil
import pytest
import sqlalchemy as sa

from hpo.storage.pooler import pooler_program
from tests.support.commands import (
    HELD,
    PATIENCE,
    STUDY,
    epochs_trained,
    hpo,
    hpo_json,
    ledger_of,
    make_study,
    start_hpo,
    values,
    wait_until,
)
from tests.support.forked_program import ForkedProgram
from tests.support.servers import PostgresServer

pytestmark = pytest.mark.skipif(pooler_program() is None, reason="no pgbouncer here: apt-get install pgbouncer")


class Watch:
    """Looks 50 times a second how many connections a database has."""

    def __init__(self, server: PostgresServer, url: str) -> None:
        self.most = 0
        self._over = threading.Event()
        self._engine = sa.create_engine(server.url("postgres"), isolation_level="AUTOCOMMIT")
        self._query = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = :name")
        self._name = sa.make_url(url).database
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._engine.dispose()

    def _look(self) -> None:
        with self._engine.connect() as conn:
            while not self._over.wait(0.02):
                self.most = max(self.most, conn.execute(self._query, {"name": self._name}).scalar() or 0)


def poolers(process: ForkedProgram) -> list[psutil.Process]:
    """The pgbouncer that a command has started."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if child.name() == "pgbouncer"]


def running(study: Path, *options: str, count: int) -> ForkedProgram:
    """A run with workers that all wait in their second epoch."""
    process = start_hpo("run", study, "--workers", count, *options)
    wait_until(lambda: epochs_trained(study) == [1] * count)
    return process


def test_six_workers_have_two_connections(postgres_server: PostgresServer, tmp_path: Path) -> None:
    study, url = make_study(tmp_path), postgres_server.new_database(ready=True)
    with Watch(postgres_server, url) as watch:
        process = start_hpo("run", study, "--workers", 6, "--n-trials", 12, "--storage", url)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert hpo_json("status", study, "--storage", url)["outcomes"]["complete"] == 12
    assert 1 <= watch.most <= 2
    wait_until(lambda: postgres_server.connections(str(sa.make_url(url).database)) == [])


def test_a_pooler_that_is_killed_is_not_missed(postgres_server: PostgresServer, tmp_path: Path) -> None:
    study = make_study(tmp_path, code=HELD)
    options = ("--storage", postgres_server.new_database(ready=True))
    process = running(study, *options, count=3)
    [pooler] = poolers(process)
    pooler.kill()
    (tmp_path / "go").touch()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    alone = ("--storage", f"sqlite:///{tmp_path}/alone.db", "--output-dir", tmp_path / "alone")
    hpo("run", study, *alone)
    assert values(study, *options) == values(study, *alone)


def test_signals_that_an_engine_sends_to_all_processes_are_the_agents_alone(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """At SIGUSR1 pgbouncer would let everyone wait, and at the others it would end."""
    study = make_study(tmp_path, code=HELD)
    options = ("--storage", postgres_server.new_database(ready=True))
    process = running(study, *options, count=2)
    [pooler] = poolers(process)
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        pooler.send_signal(number)
    process.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert hpo_json("status", study, *options)["running"] == 0
    pooler.wait(PATIENCE)


def test_a_pooler_ends_with_its_agent_and_workers_put_their_trials_back(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    url = postgres_server.new_database(ready=True)
    study = make_study(tmp_path, f"{STUDY}run: {{storage: '{url}'}}\n", HELD)
    process = running(study, count=2)
    [pooler] = poolers(process)
    process.kill()
    process.wait(PATIENCE)
    pooler.wait(PATIENCE)
    (tmp_path / "go").touch()
    process.communicate(timeout=PATIENCE)  # the workers have it open, too
    assert [each.outcome for each in ledger_of(study)] == ["requeued"] * 2
