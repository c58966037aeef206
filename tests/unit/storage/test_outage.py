"""Databases that go away, break off or fill up, with real servers."""

import contextlib
import gc
import inspect
import json
import logging
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.storages import RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.trial import TrialState, create_trial

from hpo.errors import BudgetExhaustedError, StudyError
from hpo.storage import engines as database
from hpo.storage import ledger
from hpo.storage.beats import Heartbeat
from hpo.storage.grants import Grant, Granted, OldGrantError, grants_of
from hpo.storage.ledger import Owner
from hpo.storage.opening import open_storage
from hpo.storage.outage import DatabaseAwayError, DatabaseError, Patience, RefusedValueError
from hpo.storage.study_storage import StudyStorage
from tests.support.databases import server_of
from tests.support.lossy import Losses, lossy
from tests.support.owners import attempts, load, make_study, opened, running, study_id, trials
from tests.support.servers import DatabaseServer
from tests.support.workers import finish, start, work

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """PyMySQL leaves sockets open that found no server; they are collected while that is no error."""
    yield
    gc.collect()


@pytest.fixture(params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> DatabaseServer:
    return server_of(request.param, request)


# ---------------------------------------------------------------------- outages


def restart_twice(server: DatabaseServer, url: str) -> None:
    for immediate in (True, False):
        time.sleep(0.4)
        server.restart(immediate=immediate, pause=0.3)


def break_connections(server: DatabaseServer, url: str) -> None:
    dice, name = random.Random(0), str(sa.make_url(url).database)
    for _ in range(20):
        time.sleep(dice.uniform(0.0, 0.1))
        found = server.connections(name)
        if found:
            server.disconnect(dice.choice(found))


@pytest.mark.parametrize("harm", [restart_twice, break_connections])
def test_nothing_is_lost_or_doubled(server: DatabaseServer, harm: Callable[[DatabaseServer, str], None]) -> None:
    url = server.new_database(ready=True)
    make_study(url, 10_000, enqueued=10)
    workers = start(3, work, url, 0.02)
    while not trials(url):
        time.sleep(0.02)
    harm(server, url)
    # However fast the workers are, the harm is done while they work: only now does the study get an end.
    assert all(worker.is_alive() for worker in workers)
    n_trials = len(trials(url)) + 30
    with opened(url) as storage:
        storage.set_budget(study_id(storage), n_trials)
    finish(workers)
    done = trials(url)
    assert [trial.number for trial in done] == list(range(n_trials))
    assert {trial.state for trial in done} == {TrialState.COMPLETE}
    assert all(set(trial.intermediate_values) == {1, 2} and "x" in trial.params for trial in done)
    assert [(each.attempt, each.outcome) for each in attempts(url)] == [(1, "complete")] * n_trials


@pytest.fixture
def lossy_owner(server: DatabaseServer) -> Iterator[tuple[StudyStorage, Losses]]:
    """An owner's storage, with a budget of two trials, whose connections may break while it commits."""
    url = server.new_database(ready=True)
    make_study(url, 2)
    with lossy(url) as (through, losses), opened(through, owner=Owner.current()) as storage:
        yield storage, losses


@pytest.mark.parametrize("arrives", [True, False])
def test_a_commit_whose_answer_is_lost_is_done_once(
    lossy_owner: tuple[StudyStorage, Losses], arrives: bool
) -> None:
    storage, losses = lossy_owner
    study = load(storage)

    def breaking(statement: str, operation: Callable[[], Any]) -> Any:
        losses.arm(statement, arrives=arrives)
        result = operation()
        assert losses.count == 1
        return result

    trial = breaking("INSERT INTO hpo_attempts", study.ask)
    assert trial.suggest_float("x", 0, 1) <= 1
    breaking("UPDATE hpo_attempts", lambda: storage.requeue(trial._trial_id, "for a test"))
    again = breaking("INSERT INTO hpo_attempts", study.ask)
    again.report(0.5, 1)
    breaking("UPDATE hpo_attempts", lambda: study.tell(again, 0.5))
    other = study.ask()
    with pytest.raises(BudgetExhaustedError):
        study.ask()
    assert (trial.number, again.number, other.number) == (0, 0, 1)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE, TrialState.RUNNING]
    history = [(a.trial_id == again._trial_id, a.attempt, a.outcome) for a in attempts(storage.url)]
    assert history == [(True, 1, "requeued"), (True, 2, "complete"), (False, 1, None)]
    assert storage.beat() == []


@pytest.mark.parametrize("arrives", [True, False])
def test_a_grant_whose_commits_answer_is_lost_is_stored_once(
    lossy_owner: tuple[StudyStorage, Losses], arrives: bool
) -> None:
    storage, losses = lossy_owner
    study = study_id(storage)
    storage.begin_grants(study)
    trial = load(storage).ask()
    granted: list[Granted] = [
        {"number": at, "until": at + 1, "why": {"kind": 'of "some" kind'}} for at in range(3)
    ]
    for grant in granted:
        losses.arm("UPDATE study_user_attributes", arrives=arrives)
        storage.extend(trial._trial_id, Grant(study, grant), {grant["number"]: 0.5})
        assert losses.count == 1
    with pytest.raises(OldGrantError):
        storage.extend(trial._trial_id, Grant(study, granted[2]), {3: 0.5})
    assert grants_of(storage.get_trial(trial._trial_id)) == granted
    assert storage.get_trial(trial._trial_id).intermediate_values == dict.fromkeys(range(3), 0.5)


def test_what_was_to_be_written_on_a_connection_that_just_broke_is_written(server: DatabaseServer) -> None:
    url = server.new_database(ready=True)
    make_study(url, 1)
    with opened(url, owner=Owner.current()) as storage:
        trial = load(storage).ask()
        for connection in server.connections(str(sa.make_url(url).database)):
            server.disconnect(connection)
        trial.report(0.5, 1)
        assert storage.get_trial(trial._trial_id).intermediate_values == {1: 0.5}


@pytest.mark.parametrize("enqueues", [False, True])
def test_a_trial_of_another_owner_with_the_id_of_a_broken_try_is_not_taken_for_ones_own(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, enqueues: bool
) -> None:
    """A server that has crashed gives out an id again whose row was not committed, as SQLite always does."""
    make_study(sqlite_url, 3)
    claim, tries = ledger.claim, []
    with opened(sqlite_url, owner=Owner.current()) as storage, opened(sqlite_url) as other:
        prepare = storage._get_prepared_new_trial

        def broken(*args: Any) -> Any:
            made = prepare(*args) if enqueues else claim(*args)
            tries.append(made)
            if len(tries) == 1:
                raise DatabaseAwayError("the server has crashed")
            return made

        if enqueues:
            monkeypatch.setattr(storage, "_get_prepared_new_trial", broken)
        else:
            monkeypatch.setattr(ledger, "claim", broken)
        others: list[optuna.Trial] = []
        monkeypatch.setattr(time, "sleep", lambda seconds: others.append(load(other).ask()))
        if enqueues:
            load(storage).enqueue_trial({"x": 0.5})
        else:
            assert load(storage).ask().number == 1
        assert [trial.number for trial in others] == [0]
        found = load(other).trials
    assert [trial.state.name for trial in found] == ["RUNNING", "WAITING" if enqueues else "RUNNING"]


@pytest.mark.parametrize("arrives", [True, False])
def test_a_queued_trial_whose_commits_answer_is_lost_is_queued_once(
    lossy_owner: tuple[StudyStorage, Losses], arrives: bool
) -> None:
    storage, losses = lossy_owner
    losses.arm("INSERT INTO trials", arrives=arrives)
    load(storage).add_trial(create_trial(state=TrialState.WAITING))
    assert losses.count == 1
    assert [trial.state for trial in load(storage).trials] == [TrialState.WAITING]


def test_a_queued_trial_that_a_worker_took_before_the_next_try_is_queued_once(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_study(sqlite_url, 3)
    tries: list[int] = []
    with opened(sqlite_url) as storage, opened(sqlite_url, owner=Owner.current()) as worker:
        create = RDBStorage._create_new_trial

        def broken(self: RDBStorage, *arguments: Any) -> Any:
            made = create(self, *arguments)
            tries.append(made._trial_id)
            if len(tries) == 1:
                raise DatabaseAwayError("the connection broke as the commit was answered")
            return made

        def takes(seconds: float) -> None:
            load(worker).ask().set_user_attr("note", "taken")

        monkeypatch.setattr(RDBStorage, "_create_new_trial", broken)
        monkeypatch.setattr(time, "sleep", takes)
        load(storage).enqueue_trial({"x": 0.5}, user_attrs={"from": "a person"})
        assert len(tries) == 2
        (found,) = load(storage).trials
    assert (found.state, found.user_attrs) == (TrialState.RUNNING, {"from": "a person", "note": "taken"})


def test_waiting_is_logged_once_and_given_up_with_a_fix(
    server: DatabaseServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = server.new_database(ready=True)
    make_study(url, 1)

    def reported_events() -> list[str]:
        ours = [record for record in caplog.records if record.name == "hpo.storage.outage"]  # not the pool's
        said = [record.getMessage() for record in ours]
        return [message.partition("the database ")[2][:8] for message in said]

    with opened(url, owner=Owner.current()) as storage:
        trial = load(storage).ask()
        back = threading.Thread(target=server.restart, kwargs={"immediate": True, "pause": 0.6})
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hpo.storage.outage"):
            back.start()
            while not reported_events():
                trial.set_user_attr("note", 1)
            back.join()
        assert reported_events() == ["is unrea", "is reach"]
        server.stop()
        away = pytest.raises(DatabaseAwayError, match="fix: see that the database runs")
        with away, storage.engine.connect() as conn:
            conn.exec_driver_sql("SELECT 1")
        storage.patience = Patience("here", limit=0.2)
        with pytest.raises(DatabaseError, match=r"here: the database has been unreachable(.|\n)*fix: start it"):
            trial.report(1.0, 1)
        server.start()
        trial.report(1.0, 1)
        (seen,) = running(storage)
        assert seen.lease is not None


def test_the_heart_beats_on_after_an_outage(server: DatabaseServer, caplog: pytest.LogCaptureFixture) -> None:
    url = server.new_database(ready=True)
    make_study(url, 1)
    reported_events: list[ledger.Lease] = []
    with opened(url, owner=Owner.current()) as storage:
        load(storage).ask()
        with Heartbeat(storage.beat, interval=0.02, on_lost=reported_events.append):
            server.stop(immediate=True)
            while not any("sign of life" in message for message in caplog.messages):
                time.sleep(0.01)
            server.start()
            came_back = time.time()
            while (lease := running(storage)[0].lease) is None or lease.beat_at < came_back:
                time.sleep(0.01)
        assert reported_events == []


def test_a_worker_may_start_while_the_database_is_away(server: DatabaseServer) -> None:
    url = server.new_database(ready=True)
    make_study(url, 1)
    server.stop()
    with pytest.raises(StudyError, match="can't open the database"):
        open_storage(url, create=False)
    back = threading.Timer(0.3, server.start)
    back.start()
    with opened(url, owner=Owner.current()) as storage:
        assert load(storage).ask().number == 0
    back.join()


def test_only_the_whole_is_tried_again() -> None:
    patience = Patience("here", limit=5)
    calls: list[str] = []

    def part() -> None:
        calls.append("part")
        if calls.count("part") < 3:
            raise DatabaseAwayError("gone")

    def whole() -> None:
        calls.append("whole")
        patience.run(part)

    patience.run(whole)
    assert calls == ["whole", "part"] * 3
    calls.clear()
    with patience.whole(), pytest.raises(DatabaseAwayError):
        patience.run(part)
    assert calls == ["part"]


def test_no_lock_is_waited_for_without_limit(ready_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOCK_SECONDS", 1)
    make_study(ready_url, 1)
    with opened(ready_url, owner=Owner.current()) as storage, opened(ready_url) as other:
        trial = load(storage).ask()
        with other.transaction() as session:
            assert ledger.holds(session, trial._trial_id, 1)
            storage.patience = Patience("here", limit=0.3)
            with pytest.raises(DatabaseError, match=r"(?i)lock"):
                load(storage).tell(trial, 1.0)
        load(storage).tell(trial, 1.0)


def test_a_client_that_stops_inside_a_transaction_loses_its_locks(
    server: DatabaseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "SILENCE_SECONDS", 1)
    url = server.new_database(ready=True)
    make_study(url, 1)
    with opened(url) as stopped, opened(url, owner=Owner.current()) as storage:
        trial = load(storage).ask()
        with contextlib.suppress(DatabaseAwayError), stopped.transaction() as session:
            assert ledger.holds(session, trial._trial_id, 1)
            load(storage).tell(trial, 1.0)
        assert [each.state for each in trials(url)] == [TrialState.COMPLETE]


def test_a_server_that_does_not_answer_is_given_up(
    mariadb_server: DatabaseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "SILENCE_SECONDS", 1)
    url = mariadb_server.new_database(ready=True)
    with (
        opened(url) as storage,
        storage.engine.connect() as conn,
        pytest.raises(DatabaseAwayError, match="timed out"),
    ):
        conn.execute(sa.text("SELECT SLEEP(30)"))


def test_tables_are_not_made_beside_a_process_that_makes_them(
    mariadb_server: DatabaseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LOCK_SECONDS", 1)
    url = mariadb_server.new_database()
    engine = sa.create_engine(url)
    with engine.connect() as conn:
        conn.execute(sa.text("SELECT GET_LOCK('hpo_schema', 1)"))
        with pytest.raises(StudyError, match="another process has been making the tables"):
            open_storage(url, create=True)
        assert sa.inspect(conn).get_table_names() == []
    engine.dispose()
    open_storage(url, create=True).close()


def test_every_operation_of_a_storage_waits() -> None:
    public = {name for name in vars(optuna.storages.BaseStorage) if not name.startswith("_")}
    used_by_the_cache = set(re.findall(r"_backend\.(\w+)", inspect.getsource(_CachedStorage)))
    instant = {"remove_session", "check_trial_is_updatable"}
    for_optunas_heartbeat = {name for name in used_by_the_cache if "heartbeat" in name or "stale" in name}
    optunas = (public | used_by_the_cache) - instant - for_optunas_heartbeat
    ours = {"requeue", "pause", "resume", "extend", "begin_grants", "set_trial_intermediate_values"}
    assert [name for name in optunas | ours if not hasattr(getattr(StudyStorage, name), "__wrapped__")] == []


# ---------------------------------------------------------------------- a full disk


def test_a_full_disk_is_said_and_leaves_the_file_intact(tmp_path: Path) -> None:
    """A file system of 1 MiB in a name space of its own, where the machine allows that to a user."""
    small = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    try:
        allowed = subprocess.run([*small, mount], capture_output=True, timeout=60, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this machine lets no user mount a file system")
    code = f"from {__name__} import on_one_mebibyte; on_one_mebibyte({str(tmp_path)!r})"
    command = f'{mount} && exec {sys.executable} -c "{code}"'
    done = subprocess.run([*small, command], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    first, _, fix = seen["error"].partition("\n")
    assert first == f"sqlite:///{tmp_path}/study.db: the disk is full"
    assert "fix: make room" in fix
    assert seen["running"] == 1
    assert seen["integrity"] == "ok"
    assert seen["states"][-1] == "COMPLETE"


def on_one_mebibyte(root: str) -> None:
    """Run in a process of its own: report until the disk is full, make room and continue."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url, ballast = f"sqlite:///{root}/study.db", Path(root) / "ballast"
    make_study(url, 10)
    ballast.write_bytes(b"x" * (200 << 10))
    seen: dict[str, Any] = {}
    with opened(url, owner=Owner.current()) as storage:
        trial = load(storage).ask()
        step = 0
        try:
            while True:
                step += 1
                trial.set_user_attr(f"note {step}", "x" * 2000)
        except DatabaseError as error:
            seen["error"] = str(error)
        seen["running"] = len(running(storage))
        ballast.unlink()
        with storage.engine.connect() as conn:
            seen["integrity"] = conn.exec_driver_sql("PRAGMA integrity_check").scalar()
        load(storage).tell(trial, 1.0)
        assert len(storage.get_trial(trial._trial_id).user_attrs) == step - 1
        assert study_id(storage) == 1
    seen["states"] = [trial.state.name for trial in trials(url)]
    print(json.dumps(seen))


# ---------------------------------------------------------------------- refusals that pass


def heals(storage: StudyStorage, heal: Callable[[], object], caplog: pytest.LogCaptureFixture) -> str:
    """Write until that has failed once, heal the database, and wait for the write; what was waited for."""
    trial = load(storage).ask()
    caplog.clear()

    def write() -> None:
        for count in range(100):
            trial.set_user_attr("note", count)

    def waiting() -> list[str]:
        return [message for message in caplog.messages if "the database is unreachable" in message]

    with caplog.at_level(logging.WARNING, "hpo.storage.outage"), ThreadPoolExecutor(1) as writer:
        written = writer.submit(write)
        while not waiting() and not written.done():
            time.sleep(0.01)
        heal()
        written.result(60)
    load(storage).tell(trial, 1.0)
    return waiting()[0]


def test_a_name_that_is_too_long_is_an_error_with_a_fix(server: DatabaseServer) -> None:
    url = server.new_database(ready=True)
    make_study(url, 1)
    with opened(url, owner=Owner.current()) as storage:
        trial = load(storage).ask()
        for write in (
            lambda: storage.create_new_study([optuna.study.StudyDirection.MINIMIZE], "n" * 600),
            lambda: trial.set_user_attr("n" * 600, 1),
        ):
            with pytest.raises(RefusedValueError, match=r"refuses a value: .*too long") as caught:
                write()
            assert "\n  fix: shorten it; " in str(caught.value)
        load(storage).tell(trial, 1.0)


def test_a_value_that_is_longer_than_mariadb_takes_is_refused_and_not_waited_for(
    mariadb_server: DatabaseServer,
) -> None:
    url = mariadb_server.new_database(ready=True)
    make_study(url, 1)
    limit, usual = "SET GLOBAL max_allowed_packet = {}", 2**24
    engine = sa.create_engine(url)
    try:
        with engine.begin() as conn:
            conn.exec_driver_sql(limit.format(2**20))
        with opened(url, owner=Owner.current()) as storage:
            trial = load(storage).ask()
            for length in (2**21, 2**25):
                with pytest.raises(
                    RefusedValueError, match="longer than its max_allowed_packet\n  fix: store less"
                ):
                    trial.set_user_attr("long", "x" * length)
            trial.set_user_attr("short", 1)
            load(storage).tell(trial, 1.0)
    finally:
        with engine.begin() as conn:
            conn.exec_driver_sql(limit.format(usual))
        engine.dispose()


POSTGRES_REFUSALS = {"53100": "could not extend file", "57014": "statement timeout", "53200": "out of memory"}
MARIADB_REFUSALS = {
    1021: "Disk full",
    1969: "max_statement_time exceeded",
    3024: "maximum execution time exceeded",
}
MARIADB_REFUSALS |= {1317: "Query execution was interrupted", 1290: "running with --read-only", 1836: "read only"}


@pytest.mark.parametrize("code", POSTGRES_REFUSALS)
def test_what_postgresql_refuses_for_now_is_waited_for(
    postgres_server: DatabaseServer, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server raises the code itself, from a trigger."""
    url, text = postgres_server.new_database(ready=True), POSTGRES_REFUSALS[code]
    make_study(url, 1)
    name = str(sa.make_url(url).database)
    postgres_server.administer(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{text}' USING ERRCODE = '{code}'; END $$",
        "CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON trial_user_attributes EXECUTE FUNCTION refuse()",
        database=name,
    )
    with opened(url, owner=Owner.current()) as storage:
        said = heals(
            storage,
            lambda: postgres_server.administer("DROP TRIGGER refuse ON trial_user_attributes", database=name),
            caplog,
        )
    assert text in said


@pytest.mark.parametrize("code", MARIADB_REFUSALS)
def test_what_mariadb_refuses_for_now_is_waited_for(
    mariadb_server: DatabaseServer, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The server raises the code itself, from a trigger."""
    url, text = mariadb_server.new_database(ready=True), MARIADB_REFUSALS[code]
    make_study(url, 1)
    name = str(sa.make_url(url).database)
    mariadb_server.administer(
        "CREATE TRIGGER refuse BEFORE INSERT ON trial_user_attributes FOR EACH ROW "
        f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {code}, MESSAGE_TEXT = '{text}'",
        database=name,
    )
    with opened(url, owner=Owner.current()) as storage:
        said = heals(storage, lambda: mariadb_server.administer("DROP TRIGGER refuse", database=name), caplog)
    assert text in said


def test_a_postgresql_that_only_reads_is_waited_for(postgres_server: DatabaseServer) -> None:
    url = postgres_server.new_database(ready=True)
    make_study(url, 1)
    name = str(sa.make_url(url).database)

    def read_only(value: str) -> None:
        postgres_server.administer(
            f"ALTER DATABASE {name} SET default_transaction_read_only = {value}", database="postgres"
        )

    with opened(url, owner=Owner.current()) as storage:
        trial = load(storage).ask()
        read_only("on")
        storage.close()
        storage.patience = Patience("here", limit=0.2)
        with pytest.raises(DatabaseError, match="read-only transaction"):
            trial.report(1.0, 1)
        assert storage.get_trial(trial._trial_id).intermediate_values == {}, "it still reads"
        storage.patience = Patience("here")
        healer = threading.Timer(0.3, read_only, ("off",))
        healer.start()
        trial.report(1.0, 1)
        healer.join()
    assert trials(url)[0].intermediate_values == {1: 1.0}


def test_a_mariadb_that_only_reads_is_waited_for(mariadb_server: DatabaseServer) -> None:
    url = sa.make_url(mariadb_server.new_database(ready=True))
    make_study(url.render_as_string(hide_password=False), 1)
    mariadb_server.administer(
        "CREATE USER IF NOT EXISTS plain@localhost IDENTIFIED BY 'plain'",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {url.database}.* TO plain@localhost",
        database="mysql",
    )
    through = url.set(username="plain", password="plain").render_as_string(hide_password=False)

    def read_only(value: str) -> None:
        mariadb_server.administer(f"SET GLOBAL read_only = {value}", database="mysql")

    with opened(through, owner=Owner.current()) as storage:
        trial = load(storage).ask()
        read_only("ON")
        healer = threading.Timer(0.5, read_only, ("OFF",))
        healer.start()
        trial.report(1.0, 1)
        healer.join()
    assert trials(through)[0].intermediate_values == {1: 1.0}


def test_a_statement_that_is_cancelled_is_tried_again(server: DatabaseServer) -> None:
    """A write that waits for a lock; `pg_cancel_backend`, `KILL QUERY`."""
    url = server.new_database(ready=True)
    make_study(url, 1)
    cancel = "KILL QUERY {}" if "mysql" in url else "SELECT pg_cancel_backend({})"
    with opened(url, owner=Owner.current()) as storage, opened(url) as other, ThreadPoolExecutor(1) as writer:
        trial = load(storage).ask()
        storage.close()
        with other.transaction() as session:
            assert ledger.holds(session, trial._trial_id, 1)
            mine = set(server.connections(str(sa.make_url(url).database)))
            report = writer.submit(trial.report, 1.0, 1)
            for _ in range(3):
                while not (theirs := set(server.connections(str(sa.make_url(url).database))) - mine):
                    time.sleep(0.01)
                for each in theirs:
                    with contextlib.suppress(sa.exc.OperationalError):  # it has gone meanwhile
                        server.administer(cancel.format(each), database=str(sa.make_url(url).database))
                time.sleep(0.05)
            assert not report.done()
        report.result(60)
    assert trials(url)[0].intermediate_values == {1: 1.0}


def test_a_database_that_fails_for_good_says_so(postgres_server: DatabaseServer) -> None:
    url = postgres_server.new_database(ready=True)
    make_study(url, 1)
    name = str(sa.make_url(url).database)
    postgres_server.administer(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'invalid page in block 3' USING ERRCODE = 'XX001'; END $$",
        "CREATE TRIGGER refuse BEFORE INSERT ON trial_user_attributes EXECUTE FUNCTION refuse()",
        database=name,
    )
    with opened(url, owner=Owner.current()) as storage:
        trial = load(storage).ask()
        with pytest.raises(
            DatabaseError, match=r"the database fails: invalid page in block 3\n  fix: see the serv"
        ):
            trial.set_user_attr("note", 1)
