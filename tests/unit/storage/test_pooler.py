"""Many workers share few connections of PostgreSQL's through a person's pooler of transactions, or an agent's."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.execution.sharing import sharing_connections
from hpo.storage import pooler
from hpo.storage.engines import engine_kwargs, session_limits
from hpo.storage.ledger import Owner
from hpo.storage.opening import open_storage
from hpo.storage.optuna_private import id_of_study
from hpo.storage.pooler import UnpooledError, connect_through, pooler_program, running_pooler
from tests.support import servers
from tests.support.commands import PATIENCE
from tests.support.servers import PostgresServer, ServerMissingError, pooled, running_postgres

pytestmark = pytest.mark.full

WORKERS, REPORTS, CONNECTIONS = 6, 8, 2


def test_a_study_through_a_pooler_of_transactions(postgres_server: PostgresServer) -> None:
    """Each worker makes its trial, reports more often than a statement is prepared after, beats and ends it."""
    url, together = postgres_server.new_database(), threading.Barrier(WORKERS)
    try:
        with pooled(postgres_server, url, CONNECTIONS) as through:
            main = open_storage(through, create=True)  # with the lock of who makes the tables
            study = optuna.create_study(storage=main, study_name="study")
            main.set_budget(id_of_study(study), WORKERS)

            def work(_: int) -> None:
                storage = open_storage(through, create=False, owner=Owner.current())
                storage.rehearse(id_of_study(study))
                together.wait(PATIENCE)
                trial_id = storage.create_new_trial(id_of_study(study))
                for step in range(1, REPORTS + 1):
                    storage.set_trial_intermediate_value(trial_id, step, 1 / step)
                    assert storage.beat() == []
                assert storage.engine.pool.checkedin() == 1  # kept by a worker between two reports
                storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [1 / REPORTS])
                storage.close()

            with ThreadPoolExecutor(WORKERS) as pool:
                list(pool.map(work, range(WORKERS)))
            trials = main.get_all_trials(id_of_study(study))
            main.close()
            database = url.rsplit("/", 1)[1].split("?")[0]
            assert len(postgres_server.connections(database)) <= CONNECTIONS
    except ServerMissingError as missing:
        pytest.skip(str(missing))
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * WORKERS
    assert all(len(trial.intermediate_values) == REPORTS for trial in trials)


# ---- an agent's own


@pytest.fixture
def program() -> list[str]:
    """Where pgbouncer is."""
    found = pooler_program()
    if found is None:
        pytest.skip("no pgbouncer here: apt-get install pgbouncer")
    return found


@contextlib.contextmanager
def through_pooler(program: list[str], url: str) -> Iterator[tuple[sa.Engine, Path]]:
    """An engine that connects through a pooler of its own, and the pooler's folder."""
    direct, engine = (sa.create_engine(url, **engine_kwargs(sa.make_url(url))) for _ in range(2))
    with contextlib.ExitStack() as stack:
        stack.callback(direct.dispose)
        stack.callback(engine.dispose)
        folder = stack.enter_context(running_pooler(program, direct))
        direct.dispose()
        connect_through(engine, folder)
        yield engine, folder


def ask(engine: sa.Engine, statement: str) -> Any:
    with engine.connect() as conn:
        return conn.exec_driver_sql(statement).scalar()


def test_a_role_with_a_password_is_reached_and_no_file_keeps_it(
    program: list[str], postgres_server: PostgresServer
) -> None:
    password = """it's "2" much {of} 100% ; # \\ a = b"""
    statement = "CREATE ROLE careful LOGIN SUPERUSER PASSWORD '{}'".format(password.replace("'", "''"))
    postgres_server.administer(statement.replace("%", "%%"), database="postgres")
    rules = postgres_server.folder / "data" / "pg_hba.conf"
    rules.write_text("local all careful scram-sha-256\n" + rules.read_text())
    postgres_server.administer("SELECT pg_reload_conf()", database="postgres")
    url = sa.make_url(postgres_server.new_database()).set(username="careful", password=password)
    with through_pooler(program, url.render_as_string(hide_password=False)) as (engine, folder):
        assert ask(engine, "SELECT current_user") == "careful"
        assert ask(engine, "SHOW lock_timeout") == "10s"
        assert "much" not in "".join(file.read_text() for file in folder.iterdir() if file.is_file())
        assert len(postgres_server.connections(str(url.database))) == 1
    assert not folder.exists()


def test_what_holds_for_a_connection_holds_for_each_of_the_poolers(
    program: list[str], postgres_server: PostgresServer
) -> None:
    with through_pooler(program, postgres_server.new_database()) as (engine, _), contextlib.ExitStack() as stack:
        both = [stack.enter_context(engine.connect()) for _ in range(2)]
        assert len({conn.exec_driver_sql("SELECT pg_backend_pid()").scalar() for conn in both}) == 2
        for conn in both:
            shown = conn.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar()
            assert (shown == "1min") is ("= '60s'" in session_limits()) is True


def test_a_server_that_was_away_is_found_again_and_a_pooler_that_is_gone_is_not_missed(program: list[str]) -> None:
    with _own_server() as server, through_pooler(program, server.new_database()) as (engine, folder):
        before = ask(engine, "SELECT pg_backend_pid()")
        server.restart(immediate=True)
        for _ in range(200):
            with contextlib.suppress(sa.exc.OperationalError):
                assert ask(engine, "SELECT pg_backend_pid()") != before
                break
            threading.Event().wait(0.1)
        else:
            raise AssertionError("never found again")
        engine.dispose()
        (folder / ".s.PGSQL.6432").unlink()
        assert ask(engine, "SELECT 1") == 1


def test_encryption_is_as_strict_as_without_a_pooler(program: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setitem(servers._POSTGRES_SETTINGS, "listen_addresses", "127.0.0.1")
    monkeypatch.setattr(PostgresServer, "port", port)
    with _own_server() as server:
        certificate, key = server.folder / "server.crt", server.folder / "server.key"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True)
        if os.geteuid() == 0:
            shutil.chown(key, "postgres")
        settings = {"ssl": "on", "ssl_cert_file": certificate, "ssl_key_file": key}
        server.administer(*(f"ALTER SYSTEM SET {k} = '{v}'" for k, v in settings.items()), database="postgres")
        server.administer("SELECT pg_reload_conf()", database="postgres")
        name = sa.make_url(server.new_database()).database
        plain = f"postgresql+psycopg://postgres@127.0.0.1:{port}/{name}"
        strict = f"{plain}?sslmode=verify-full&sslrootcert={certificate}"
        query = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
        for url, encrypted in ((f"{plain}?sslmode=disable", False), (plain, True), (strict, True)):
            with through_pooler(program, url) as (engine, _):
                assert ask(engine, query) is encrypted
        # With a file of certificates libpq checks the server's also where a URL only requires encryption.
        checks = {plain: "require", f"{plain}?sslmode=require&sslrootcert={certificate}": "verify-ca"}
        for url, mode in checks.items():
            engine = sa.create_engine(url)
            with engine.connect() as conn:
                assert pooler._encryption(conn.connection.dbapi_connection)["server_tls_sslmode"] == mode
            engine.dispose()


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ("&channel_binding=disable", "pgbouncer has no setting for channel_binding"),
        ("&options=-cgeqo%3Doff", "pgbouncer has no setting for options"),
        (",/nowhere", "pgbouncer would know only one of the hosts {folder},/nowhere"),
    ],
)
def test_each_worker_connects_by_itself_where_a_pooler_would_connect_otherwise(
    program: list[str], postgres_server: PostgresServer, extra: str, problem: str
) -> None:
    said = list[str]()
    url = sa.make_url(postgres_server.new_database(ready=True)).render_as_string(hide_password=False) + extra
    url = url.replace("&port=5432,/nowhere", "%2C%2Fnowhere&port=5432%2C5432")
    storage = open_storage(url, create=False)
    with sharing_connections(storage, 2, said.append):
        assert storage.pooler is None
    storage.close()
    why = problem.format(folder=postgres_server.folder)
    assert said == [f"each worker has a connection of its own to the database: {why}"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's pooler runs as another user")
def test_a_pooler_that_may_not_reach_the_server_says_so(
    program: list[str], postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooler, "_START_SECONDS", 1)
    engine = sa.create_engine(postgres_server.new_database())
    postgres_server.folder.chmod(0o700)
    try:
        with (
            pytest.raises(UnpooledError, match="Permission denied"),
            running_pooler(program, engine),
        ):
            raise AssertionError("it runs")
    finally:
        postgres_server.folder.chmod(0o755)
        engine.dispose()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's pooler runs as another user")
def test_it_runs_where_roots_temporary_files_are_closed_to_others(
    program: list[str], postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url = postgres_server.new_database()
    with through_pooler(program, url) as (engine, folder):
        assert ask(engine, "SELECT 1") == 1
        assert not folder.is_relative_to(tmp_path)
    monkeypatch.setattr(pooler, "_PLACES", ())
    with (
        pytest.raises(UnpooledError, match=f"the user nobody, who pgbouncer runs as, can't enter {tmp_path}"),
        through_pooler(program, url),
    ):
        raise AssertionError("it runs")


def test_a_program_that_can_not_be_started_is_told_as_such(postgres_server: PostgresServer) -> None:
    engine = sa.create_engine(postgres_server.new_database())
    with pytest.raises(UnpooledError, match=r"did not start.*nowhere"), running_pooler(["/nowhere"], engine):
        raise AssertionError("it runs")
    engine.dispose()


def test_a_pooler_that_does_not_start_says_why(postgres_server: PostgresServer) -> None:
    broken = postgres_server.folder / "pgbouncer"  # a folder that is open to whom it runs as
    broken.write_text("#!/bin/sh\necho one\necho no such thing >&2\nexit 1\n")
    broken.chmod(0o755)
    engine = sa.create_engine(postgres_server.new_database())
    with pytest.raises(UnpooledError) as said, running_pooler([str(broken)], engine):
        raise AssertionError("it runs")
    assert str(said.value) == "pgbouncer did not start: no such thing"
    engine.dispose()


def _own_server() -> contextlib.AbstractContextManager[PostgresServer]:
    try:
        return running_postgres()
    except ServerMissingError as missing:
        pytest.skip(str(missing))
