"""Budget, leases, fencing and recovery, on real databases and with real processes that really die."""

import contextlib
import os
import random
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState, create_trial

from hpo.errors import BudgetExhaustedError, InputError, LeaseLostError, StudyError
from hpo.storage import agents, ledger
from hpo.storage import engines as database
from hpo.storage.beats import Heartbeat
from hpo.storage.changes import CHANGES
from hpo.storage.engines import display_url
from hpo.storage.ledger import Lease, Owner
from hpo.storage.opening import open_storage
from hpo.storage.optuna_private import models
from hpo.storage.outage import DatabaseError, RefusedValueError
from hpo.storage.recovery import requeue_dead
from hpo.storage.schema import OPTUNA_REVISION, PlainStudyError
from hpo.storage.settling import GONE, _settle
from hpo.storage.study_storage import StudyStorage
from tests.support.commands import PATIENCE, wait_until
from tests.support.databases import server_of
from tests.support.owners import NAME, attempts, forked, load, make_study, opened, running, study_id, trials
from tests.support.workers import finish, start, work


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


# ---------------------------------------------------------------------- processes


def create_at_once(url: str, start: Any) -> None:
    start.wait()
    with opened(url, create=True):
        pass


def test_the_budget_is_exact_and_the_queue_is_drained_once(ready_url: str) -> None:
    make_study(ready_url, 40, enqueued=20)
    finish([worker for _ in range(2) for worker in start(8, work, ready_url)])  # as two runs of eight workers
    done = trials(ready_url)
    assert sorted(t.number for t in done) == list(range(40))
    assert {t.state for t in done} == {TrialState.COMPLETE}
    tickets = [t.user_attrs["ticket"] for t in done if "ticket" in t.user_attrs]
    assert sorted(tickets) == list(range(20))
    ended = attempts(ready_url)
    assert [(a.attempt, a.outcome) for a in ended] == [(1, "complete")] * 40
    assert len({a.pid for a in ended}) > 1


def test_killed_workers_lose_no_trial(ready_url: str) -> None:
    n_trials = 24
    make_study(ready_url, n_trials, enqueued=4)
    dice = random.Random(0)
    kills = 0
    with opened(ready_url) as storage:
        workers = start(3, work, ready_url, 0.01)
        deadline = time.monotonic() + PATIENCE
        while any(w.is_alive() for w in workers):
            assert time.monotonic() < deadline
            if kills < 6:
                time.sleep(dice.uniform(0.02, 0.15))
                victim = dice.randrange(len(workers))
                if workers[victim].is_alive():
                    os.kill(workers[victim].pid, signal.SIGKILL)
                    kills += 1
                workers[victim].join()
                requeue_dead(storage, study_id(storage), max_retries=100)
                workers[victim] = start(1, work, ready_url, 0.01)[0]
            else:
                time.sleep(0.05)
        requeue_dead(storage, study_id(storage), max_retries=100)
    work(ready_url, 99)  # what was requeued after the others had gone
    done = trials(ready_url)
    assert len(done) == n_trials
    assert {t.state for t in done} == {TrialState.COMPLETE}
    assert all(set(t.intermediate_values) == {1, 2} for t in done)
    outcomes = Counter(a.outcome for a in attempts(ready_url))
    assert outcomes["complete"] == n_trials
    assert set(outcomes) <= {"complete", "lost"}


def test_fourforked_may_create_the_schema_at_once(database_url: str) -> None:
    barrier = forked.Barrier(4)
    processes = [forked.Process(target=create_at_once, args=(database_url, barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    finish(processes)
    make_study(database_url, 1)
    assert trials(database_url) == []


# ---------------------------------------------------------------------- budget


def test_imported_trials_do_not_count(ready_url: str) -> None:
    make_study(ready_url, 2)
    with opened(ready_url) as storage:
        study = load(storage)
        imported = create_trial(value=1.0, params={"x": 0.5}, distributions={"x": FloatDistribution(0, 1)})
        study.add_trial(imported)
        study.enqueue_trial({"x": 0.1})
        study.add_trial(imported)
        study.enqueue_trial({"x": 0.2})
        with pytest.raises(BudgetExhaustedError):
            study.enqueue_trial({"x": 0.3})
        study.add_trial(imported)
        marks = [t.system_attrs.get("hpo:imported", False) for t in study.trials]
        assert marks == [True, False, True, False, True]
        assert imported.system_attrs == {}


def test_a_copied_mark_does_not_widen_the_budget(sqlite_url: str) -> None:
    make_study(sqlite_url, 1)
    with opened(sqlite_url) as storage:
        study = load(storage)
        study.add_trial(create_trial(state=TrialState.WAITING, system_attrs={"hpo:imported": True}))
        with pytest.raises(BudgetExhaustedError):
            study.ask() and study.ask()


def test_the_budget_can_be_raised_and_lifted(sqlite_url: str) -> None:
    make_study(sqlite_url, 1)
    with opened(sqlite_url) as storage:
        study = load(storage)
        study.ask()
        with pytest.raises(BudgetExhaustedError, match="all 1 trials"):
            study.ask()
        storage.set_budget(study._study_id, 2)
        study.ask()
        storage.set_budget(study._study_id, None)
        assert [study.ask().number for _ in range(3)] == [2, 3, 4]


def test_waiting_trials_are_taken_when_the_budget_is_exhausted(two_owners: tuple[StudyStorage, ...]) -> None:
    first, second = two_owners
    first.set_budget(study_id(first), 1)
    trial = load(first).ask()
    other = load(second)
    with pytest.raises(BudgetExhaustedError):
        other.ask()
    first.requeue(trial._trial_id)
    assert other.ask().number == trial.number


# ---------------------------------------------------------------------- fencing


def writes(storage: StudyStorage, trial: optuna.Trial) -> dict[str, Callable[[], object]]:
    """Every way in which a worker can write to its trial."""
    study = load(storage)
    trial_id = trial._trial_id
    return {
        "report": lambda: trial.report(9.0, 9),
        "report again": lambda: storage.set_trial_intermediate_value(trial_id, 1, 9.0),
        "user attr": lambda: trial.set_user_attr("late", 1),
        "system attr": lambda: storage.set_trial_system_attr(trial_id, "late", 1),
        "suggest": lambda: trial.suggest_float("late", 0, 1),
        "param": lambda: storage.set_trial_param(trial_id, "late", 0.5, FloatDistribution(0, 1)),
        "tell": lambda: study.tell(trial, 9.0),
        "pruned": lambda: study.tell(trial.number, state=TrialState.PRUNED),
        "state": lambda: storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [9.0]),
        "requeue": lambda: storage.requeue(trial_id),
    }


@pytest.mark.parametrize("then", ["waiting", "running", "finished"])
def test_an_old_owner_can_write_nothing(two_owners: tuple[StudyStorage, ...], then: str) -> None:
    first, second = two_owners
    trial = load(first).ask()
    trial.suggest_float("x", 0, 1)
    trial.report(1.0, 1)
    with second.transaction() as session:  # as `requeue_dead` does to a worker taken for dead
        ledger.end(session, trial._trial_id, 1, "lost")
        session.execute(sa.text("UPDATE trials SET state = 'WAITING'"))
    if then != "waiting":
        successor = load(second).ask()
        assert successor.number == trial.number
        assert second.attempt_of(trial._trial_id) == 2
    if then == "finished":
        load(second).tell(successor, 2.0)
    before = second.get_all_trials(study_id(second))
    for name, write in writes(first, trial).items():
        with pytest.raises(LeaseLostError):
            pytest.fail(f"{name} went through: {write()!r}")
    assert second.get_all_trials(study_id(second)) == before
    assert first.beat() == [(trial._trial_id, 1)]
    first.forget(trial._trial_id)
    assert first.beat() == []
    assert first.get_trial(trial._trial_id).number == trial.number


def test_an_owner_writes_only_to_its_own_trials(two_owners: tuple[StudyStorage, ...]) -> None:
    first, second = two_owners
    trial = load(first).ask()
    for write in (
        lambda: second.set_trial_user_attr(trial._trial_id, "a", 1),
        lambda: second.set_trial_intermediate_value(trial._trial_id, 1, 1.0),
        lambda: second.set_trial_state_values(trial._trial_id, TrialState.FAIL),
        lambda: second.attempt_of(trial._trial_id),
    ):
        with pytest.raises(LeaseLostError):
            write()
    assert not second.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
    with pytest.raises(KeyError):
        second.set_trial_user_attr(10_000, "a", 1)
    load(first).tell(trial, 1.0)
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        second.set_trial_user_attr(trial._trial_id, "a", 1)
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        second.set_trial_intermediate_value(trial._trial_id, 1, 1.0)


def test_storage_without_owner_takes_no_lease_and_ends_those_of_what_it_finishes(
    two_owners: tuple[StudyStorage, ...], ready_url: str
) -> None:
    first, _ = two_owners
    trial = load(first).ask()
    with opened(ready_url) as plain:
        load(plain).ask()
        plain.set_trial_user_attr(trial._trial_id, "note", "seen")
        load(plain).tell(trial.number, state=TrialState.FAIL)
    assert [(a.trial_id, a.outcome) for a in attempts(ready_url)] == [(trial._trial_id, "fail")]
    with pytest.raises(LeaseLostError):
        trial.report(1.0, 1)


def test_no_write_slips_in_while_a_trial_is_taken_back(two_owners: tuple[StudyStorage, ...]) -> None:
    first, second = two_owners
    trial = load(first).ask()
    fenced = threading.Event()

    def report_until_fenced() -> None:
        with contextlib.suppress(LeaseLostError):
            for step in range(100_000):
                first.set_trial_intermediate_value(trial._trial_id, step, 1.0)
            return
        fenced.set()
        first.remove_session()

    writer = threading.Thread(target=report_until_fenced)
    writer.start()
    wait_until(lambda: second.get_trial(trial._trial_id).intermediate_values)
    (seen,) = running(second)
    assert _settle(second, seen, GONE, 3)
    taken = second.get_trial(trial._trial_id)
    writer.join(PATIENCE)
    assert fenced.is_set()
    assert taken.intermediate_values
    assert second.get_trial(trial._trial_id) == taken


def test_outcome_and_reason_reach_the_ledger(two_owners: tuple[StudyStorage, ...], ready_url: str) -> None:
    first, _ = two_owners
    study = load(first)
    diverged, requeued = study.ask(), study.ask()
    diverged.set_user_attr("hpo:outcome", "diverged")
    study.tell(diverged, float("inf"))
    first.requeue(requeued._trial_id, "interrupted")
    assert [(a.outcome, a.reason) for a in attempts(ready_url)] == [
        ("diverged", None),
        ("requeued", "interrupted"),
    ]


def test_a_requeued_trial_goes_on_as_itself(two_owners: tuple[StudyStorage, ...]) -> None:
    first, second = two_owners
    trial = load(first).ask()
    x = trial.suggest_float("x", 0, 1)
    trial.report(0.5, 1)
    trial.set_user_attr("note", "kept")
    other = load(second)
    assert [t.state for t in other.trials] == [TrialState.RUNNING]
    first.requeue(trial._trial_id)
    again = other.ask()
    assert (again.number, again.suggest_float("x", 0, 1), again.user_attrs) == (0, x, {"note": "kept"})
    again.report(0.4, 2)
    frozen = other.tell(again, 0.4)
    assert frozen.intermediate_values == {1: 0.5, 2: 0.4}


def test_a_failing_write_keeps_the_lease(two_owners: tuple[StudyStorage, ...]) -> None:
    first, _ = two_owners
    study = load(first)
    trial = study.ask()
    trial.suggest_float("x", 0, 1)
    with pytest.raises(ValueError, match="distribution"):
        first.set_trial_param(trial._trial_id, "x", 0, optuna.distributions.CategoricalDistribution(["a"]))
    with pytest.raises((optuna.exceptions.StorageInternalError, RefusedValueError)):
        first.set_trial_state_values(trial._trial_id, TrialState.COMPLETE, ["not a number"])  # type: ignore[list-item]
    study.tell(trial, 1.0)


def fill(storage: StudyStorage, name: str) -> int:
    """Make a study with something in every table; returns its id."""
    study = optuna.create_study(study_name=name, storage=storage)
    study.set_user_attr("a", 1)
    storage.set_study_system_attr(study._study_id, "a", 1)
    for _ in range(3):
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        trial.report(1.0, 1)
        trial.set_user_attr("a", 1)
        storage.set_trial_system_attr(trial._trial_id, "a", 1)
        study.tell(trial, 1.0)
        with storage.engine.begin() as conn:
            conn.execute(sa.insert(models.TrialHeartbeatModel.__table__).values(trial_id=trial._trial_id))
    with storage.engine.begin() as conn:
        conn.execute(sa.insert(CHANGES).values(study_id=study._study_id, trial_id=trial._trial_id))
        ids = dict.fromkeys(("study_id", "agent_id"), study._study_id)
        conn.execute(sa.insert(agents.AGENTS).values(dict.fromkeys(agents.AGENTS.columns.keys(), 0) | ids))
    return study._study_id


def test_deleting_a_study_deletes_what_is_its_own_and_reads_none_of_it(
    ready_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpo.storage.id_lists.AT_ONCE", 2)
    tables = [*models.BaseModel.metadata.sorted_tables, *ledger.metadata.sorted_tables]
    tables.remove(models.VersionInfoModel.__table__)
    statements: list[str] = []
    with opened(ready_url, owner=Owner.current()) as storage:

        def rows() -> list[int]:
            with storage.engine.connect() as conn:
                return [conn.execute(sa.select(sa.func.count()).select_from(each)).scalar_one() for each in tables]

        fill(storage, "stays")
        before = rows()
        assert all(before)
        goes = fill(storage, "goes")
        assert rows() == [2 * count for count in before]
        sa.event.listen(storage.engine, "before_cursor_execute", lambda *of: statements.append(of[2]))
        storage.delete_study(goes)
        read = [each for each in statements if each.startswith("SELECT")]
        assert len(read) == 2, "its row, which is locked, and the ids of its trials"
        assert rows() == before
        with pytest.raises(KeyError):
            storage.delete_study(goes)


@pytest.mark.parametrize("enqueued", [0, 1])
def test_a_new_trial_inherits_nothing_with_a_deleted_ones_id(sqlite_url: str, enqueued: int) -> None:
    plain = optuna.storages.RDBStorage(sqlite_url)
    for _ in range(2):
        make_study(sqlite_url, 1, enqueued)
        with opened(sqlite_url, owner=Owner.current()) as storage:
            trial = load(storage).ask()
            assert [(a.trial_id, a.attempt) for a in attempts(sqlite_url)] == [(trial._trial_id, 1)]
            storage.requeue(trial._trial_id)
        optuna.delete_study(study_name=NAME, storage=plain)
    plain.engine.dispose()


@pytest.mark.parametrize("tool", ["hpo", "optuna"])
@pytest.mark.parametrize("enqueued", [0, 1])
def test_a_worker_of_a_deleted_study_writes_nothing_to_another(sqlite_url: str, tool: str, enqueued: int) -> None:
    make_study(sqlite_url, 1, enqueued)
    with (
        opened(sqlite_url, owner=Owner.current(worker="old")) as first,
        opened(sqlite_url, owner=Owner.current(worker="new")) as second,
    ):
        old = load(first).ask()
        deleted = study_id(first)
        if tool == "hpo":
            second.delete_study(deleted)
        else:
            optuna.delete_study(study_name=NAME, storage=sqlite_url)
        make_study(sqlite_url, 1, enqueued)
        new = load(second).ask()
        before = second.get_all_trials(study_id(second))
        lease = Lease(old._trial_id, first.attempt_of(old._trial_id))
        writes_of_old = writes(first, old)
        assert first.beat() == [lease]
        for name, write in writes_of_old.items():
            with pytest.raises((LeaseLostError, KeyError)):
                pytest.fail(f"{name} went through: {write()!r}")
        assert second.get_all_trials(study_id(second)) == before
        load(second).tell(new, 1.0)


def test_a_stopped_heartbeat_tells_what_it_lost(two_owners: tuple[StudyStorage, ...]) -> None:
    first, second = two_owners
    trial = load(first).ask()
    lost_leases: list[Lease] = []
    with Heartbeat(first.beat, interval=0.01, on_lost=lost_leases.append):

        def has_beaten() -> bool:
            (seen,) = running(second)
            assert seen.lease is not None
            return seen.lease.beat_at > seen.lease.started_at

        wait_until(has_beaten)
        assert lost_leases == []
        with second.transaction() as session:
            ledger.end(session, trial._trial_id, 1, "lost")
        wait_until(lambda: lost_leases)
        time.sleep(0.05)
    assert lost_leases == [(trial._trial_id, 1)]


# ---------------------------------------------------------------------- opening


def test_nothing_is_made_unless_asked_for(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="hpo run"):
        open_storage(f"sqlite:///{tmp_path}/runs/study.db", create=False)
    assert list(tmp_path.iterdir()) == []
    with opened(f"sqlite:///{tmp_path}/runs/study.db", create=True) as storage:
        assert storage.get_all_studies() == []
    with opened(f"sqlite:///{tmp_path}/runs/study.db") as storage, storage.engine.connect() as conn:
        assert conn.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert conn.exec_driver_sql("PRAGMA synchronous").scalar() == 1


def test_an_empty_server_database_is_left_empty(postgres_url: str) -> None:
    with pytest.raises(StudyError, match="hpo run"):
        open_storage(postgres_url, create=False)
    engine = sa.create_engine(postgres_url)
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()


def test_optunas_version_is_the_one_expected(sqlite_url: str) -> None:
    plain = optuna.storages.RDBStorage(sqlite_url)
    assert plain.get_head_version() == OPTUNA_REVISION
    optuna.create_study(study_name=NAME, storage=plain)
    with pytest.raises(StudyError, match="hpo run"):
        open_storage(sqlite_url, create=False)
    with opened(sqlite_url, create=True) as storage:  # an existing study database gets the ledger only
        assert storage.get_current_version() == OPTUNA_REVISION
        assert study_id(storage) == 1
        with storage.engine.begin() as conn:
            conn.execute(sa.text("UPDATE alembic_version SET version_num = 'v3.0.0.d'"))
    with pytest.raises(StudyError, match=r"v3\.0\.0\.d"):
        open_storage(sqlite_url, create=False)
    plain.engine.dispose()


def test_a_database_with_a_plain_study_of_that_name_is_left_as_it_was(database_url: str) -> None:
    plain = optuna.storages.RDBStorage(database_url)
    study = optuna.create_study(study_name=NAME, storage=plain)
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    tables = sa.inspect(plain.engine).get_table_names()
    with pytest.raises(PlainStudyError, match="was not started by `hpo run`"):
        open_storage(database_url, create=True, study=NAME)
    assert sa.inspect(plain.engine).get_table_names() == tables
    open_storage(database_url, create=True, study="another").close()
    assert set(sa.inspect(plain.engine).get_table_names()) > set(tables)
    plain.engine.dispose()


@pytest.mark.parametrize(
    "url",
    [
        "study.db",
        "sqlite://",
        "sqlite:///:memory:",
        "oracle://u:secret@host/db",
        "redis://localhost",
        "postgresql+nodriver://u:secret@host/db",
        "sqlite+nodriver:///study.db",
    ],
)
def test_a_bad_url_is_an_input_error_with_a_fix(url: str) -> None:
    with pytest.raises(InputError) as caught:
        open_storage(url, create=True)
    assert caught.value.fix
    assert "secret" not in str(caught.value)


def test_an_unreachable_database_is_a_study_error() -> None:
    for url in ("postgresql://u:secret@127.0.0.1:1/db", "mysql://u:secret@127.0.0.1:1/db"):
        with pytest.raises(StudyError, match="can't open") as caught:
            open_storage(url, create=False)
        assert "secret" not in str(caught.value)
        assert str(caught.value).count("\n") == 1  # what the driver says is a line, the fix another one


def damage_header(file: Path) -> None:
    file.write_bytes(b"not a database" * 1000)


def damage_table(file: Path) -> None:
    with contextlib.closing(sqlite3.connect(file)) as conn:
        size = conn.execute("PRAGMA page_size").fetchone()[0]
        page = conn.execute("SELECT rootpage FROM sqlite_master WHERE name = 'trials'").fetchone()[0]
    with file.open("r+b") as data:
        data.seek((page - 1) * size)
        data.write(b"\xff" * size)


@pytest.mark.parametrize(
    ("damage", "said"), [(damage_header, "file is not a database"), (damage_table, "disk image is malformed")]
)
def test_a_damaged_file_is_a_database_error_with_a_fix(
    sqlite_url: str, damage: Callable[[Path], None], said: str
) -> None:
    make_study(sqlite_url, 1, enqueued=1)
    damage(Path(str(sa.make_url(sqlite_url).database)))
    with pytest.raises(DatabaseError) as caught:
        trials(sqlite_url)
    first, _, fix = str(caught.value).partition("\n")
    assert first.startswith(f"{sqlite_url}: the file is damaged: ")
    assert first.endswith(said)
    assert fix.startswith("  fix: restore a copy of it")
    assert "intact" not in fix


def test_urls_are_shown_without_passwords_and_normalised() -> None:
    assert display_url("postgresql://u:pw@h/d") == "postgresql://u:***@h/d"
    assert "pw" not in display_url("mysql://h/d?user=u&password=pw")
    assert "pw" not in display_url("mysql://h/d?user=u&passwd=pw&ssl_key_password=pw")
    assert display_url("nonsense") == "(unreadable URL)"
    drivers = ["postgresql", "postgres", "mysql", "mariadb", "postgresql+psycopg"]
    names = [database.normalize_url(f"{driver}://u@h/d").drivername for driver in drivers]
    assert names == [*["postgresql+psycopg"] * 2, *["mysql+pymysql"] * 2, "postgresql+psycopg"]
    assert database.normalize_url("sqlite+pysqlite:///study.db").drivername == "sqlite+pysqlite"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("postgresql", ["postgresql+psycopg2", "postgresql+asyncpg", "postgres+pg8000", "postgresql"]),
        (
            "mariadb",
            ["mysql+mysqldb", "mysql+mysqlconnector", "mariadb+pymysql", "mariadb+mariadbconnector", "mysql"],
        ),
    ],
)
def test_a_url_may_name_another_driver(kind: str, names: list[str], request: pytest.FixtureRequest) -> None:
    url = server_of(kind, request).new_database(ready=True)
    make_study(url, 1)
    for name in names:
        with opened(f"{name}://{url.partition('://')[2]}") as storage:
            assert study_id(storage) == 1


def test_readers_do_not_wait_for_writers(sqlite_url: str) -> None:
    make_study(sqlite_url, 1)
    with opened(sqlite_url) as writer, opened(sqlite_url) as reader, writer.transaction() as session:
        session.execute(sa.text("SELECT 1"))
        begun = time.monotonic()
        assert load(reader).trials == []
        assert time.monotonic() - begun < 5


@pytest.mark.parametrize("url", ["sqlite:///{folder}/hpo.db", "postgresql+psycopg://localhost/hpo"])
def test_two_engines_share_no_listener(url: str, tmp_path: Path) -> None:
    # SQLAlchemy tells listeners apart by addresses, and a pool's may have been another pool's before.
    kwargs = [database.engine_kwargs(sa.make_url(url.format(folder=tmp_path))) for _ in range(2)]
    (first, event), (second, _) = (each["pool_events"][0] for each in kwargs)
    assert event == "connect"
    assert first is not second
