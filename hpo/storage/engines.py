"""Databases: URLs, engines tuned for many small writers, and the creation of the schema.

SQLite is used as recommended for concurrent writers: a write-ahead log, a busy timeout, and the write lock taken
at the start of a writing transaction. Readers take no lock at all and never wait.

No client waits without limit: neither for a lock that another one holds, nor for a server that does not answer.
What has waited too long is broken off, and tried again with patience (`hpo.storage.outage`). A server ends
transactions whose client has stopped or vanished, and their locks with them.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

import optuna
import sqlalchemy as sa

from hpo.errors import InputError, StudyError
from hpo.storage import ledger
from hpo.storage.changes import CHANGES
from hpo.storage.guarded import SINGLE
from hpo.storage.idle import IdlePool
from hpo.storage.optuna_private import models
from hpo.storage.outage import DatabaseAwayError, DatabaseError, first_line, tell_outages

if TYPE_CHECKING:
    import psycopg

# The head of Optuna 5.0's migrations. Asking Optuna for it loads every migration script.
OPTUNA_REVISION = "v3.2.0.a"

_CONNECT_SECONDS = 10
_LOCK_SECONDS = 10  # far more than the busiest writers wait for each other
_SILENCE_SECONDS = 60  # of a client inside a transaction, or of a server that was asked something
_PROBE_SECONDS = 20  # between two questions whether a silent server is still there
_SCHEMA_TRIES = 3
_SCHEMA_LOCK = 0x68706F  # "hpo"; any number that no other program of the database uses
_DRIVERS = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mysql+pymysql",  # Optuna knows the dialect by the name mysql only
}
_EXTRAS = {"postgresql": "postgres", "mysql": "mysql"}
_SECRET_QUERY_KEYS = {"password", "passwd", "sslpassword"}
_EXAMPLES = "write sqlite:///study.db, postgresql://user@host/name or mysql://user@host/name"


class WriteIntent(Protocol):
    """Whether the current thread is inside a writing transaction."""

    writing: int


def normalize_url(url: str) -> sa.URL:
    """The URL with the driver that this package uses; InputError for one that can't be used."""
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):  # the port is no number
        raise InputError("not a database URL", path="storage", fix=_EXAMPLES) from None
    parsed = parsed.set(drivername=_DRIVERS.get(parsed.drivername, parsed.drivername))
    if parsed.get_backend_name() not in {"sqlite", "postgresql", "mysql"}:
        problem = f"no support for databases of type {parsed.get_backend_name()!r}"
        raise InputError(problem, path="storage", value=display_url(url), fix=_EXAMPLES)
    if parsed.get_backend_name() == "sqlite":
        name = parsed.database or ""
        if name in {"", ":memory:"} or name.startswith("file:"):
            fix = "write sqlite:///study.db or sqlite:////absolute/path/study.db"
            raise InputError("a study needs a database file", path="storage", value=display_url(url), fix=fix)
    return parsed


def display_url(url: str) -> str:
    """The URL for people to read: without its password."""
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        return "(unreadable URL)"
    secret = dict.fromkeys(_SECRET_QUERY_KEYS & set(parsed.query), "***")
    shown = parsed.update_query_dict(secret).render_as_string(hide_password=True)
    return unquote(shown) if parsed.get_backend_name() == "sqlite" else shown


def has_password(url: str) -> bool:
    """Whether a URL shows a password; see `display_url` for people."""
    parsed = sa.make_url(url)
    return parsed.password is not None or bool(_SECRET_QUERY_KEYS & set(parsed.query))


def sqlite_file(url: sa.URL) -> Path | None:
    """The database's file, or None for a database on a server."""
    return Path(url.database or "") if url.get_backend_name() == "sqlite" else None


def engine_kwargs(url: sa.URL) -> dict[str, Any]:
    """Arguments of `sqlalchemy.create_engine` for the URL's database."""
    backend = url.get_backend_name()
    if backend == "sqlite":
        # isolation_level None: Python's sqlite3 begins no transaction by itself; `begin_immediate` does.
        connect = {"timeout": float(_LOCK_SECONDS), "isolation_level": None}
        return {"connect_args": connect, "pool_events": [(_tune_sqlite, "connect")]}
    # A server has few connections. A process keeps one; another, for two threads at once, is closed after its use.
    small = {"pool_pre_ping": True, "pool_size": 1, "max_overflow": 5, "pool_recycle": 1800, "poolclass": IdlePool}
    if backend == "mysql":
        # The default REPEATABLE READ locks gaps between rows: deadlocks among inserting workers.
        return small | {"connect_args": _mysql_options(url), "isolation_level": "READ COMMITTED"}
    return small | {"connect_args": _postgres_options(url), "pool_events": [(_tune_postgres, "connect")]}


def _mysql_options(url: sa.URL) -> dict[str, Any]:
    options: dict[str, Any] = {
        "connect_timeout": _CONNECT_SECONDS,
        "read_timeout": _SILENCE_SECONDS,
        "write_timeout": _SILENCE_SECONDS,
        # MySQL knows no limit for idle transactions, only one for idle connections; the pool replaces those.
        "init_command": f"SET innodb_lock_wait_timeout={_LOCK_SECONDS}, wait_timeout={_SILENCE_SECONDS}",
    }
    if "unix_socket" in url.query:
        # No one can listen in there; the driver would read the system's certificates for each connection.
        options["ssl_disabled"] = True
    return _unless_given(url, options)


def _postgres_options(url: sa.URL) -> dict[str, Any]:
    options = {
        "connect_timeout": _CONNECT_SECONDS,
        "keepalives_idle": _PROBE_SECONDS,
        "keepalives_interval": _PROBE_SECONDS,
        "tcp_user_timeout": _SILENCE_SECONDS * 1000,
        # A pooler gives each transaction another connection to the server, which knows no statement of an earlier.
        "prepare_threshold": None,
    }
    return _unless_given(url, options)


def _unless_given(url: sa.URL, options: dict[str, Any]) -> dict[str, Any]:
    """What a URL says itself goes first."""
    return {name: value for name, value in options.items() if name not in url.query}


def _tune_postgres(connection: "psycopg.Connection[Any]", _: object) -> None:
    # Not as options of the connection, which poolers between client and server refuse.
    limits = {"lock_timeout": _LOCK_SECONDS, "idle_in_transaction_session_timeout": _SILENCE_SECONDS}
    connection.execute("; ".join(f"SET {name} = '{seconds}s'" for name, seconds in limits.items()))
    connection.commit()


def _tune_sqlite(connection: sqlite3.Connection, _: object) -> None:
    # In WAL mode NORMAL loses no transaction to a killed process, only to a power cut.
    connection.execute("PRAGMA synchronous=NORMAL")


def begin_immediate(engine: sa.Engine, intent: WriteIntent) -> None:
    """Make SQLite transactions that write take the write lock with their first statement.

    What only reads runs outside of any transaction. A transaction begun as a reader can't become a writer once
    another process has written: SQLite answers "database is locked" immediately, with any busy timeout.
    """

    def begin(
        conn: sa.Connection, _cursor: Any, statement: str, _p: Any, context: sa.ExecutionContext | None, _m: bool
    ) -> None:
        if context is not None and SINGLE in context.execution_options:
            return
        dbapi = conn.connection.dbapi_connection
        if dbapi is None or dbapi.in_transaction or statement.startswith(("BEGIN", "PRAGMA")):
            return
        if intent.writing or not statement.startswith("SELECT"):
            conn.exec_driver_sql("BEGIN IMMEDIATE")

    sa.event.listen(engine, "before_cursor_execute", begin)


@contextmanager
def explained(url: sa.URL) -> Iterator[None]:
    """Turn what goes wrong while a database is opened into errors that name the fix."""
    shown = display_url(url.render_as_string(hide_password=False))
    try:
        yield
    except ImportError as error:
        extra = _EXTRAS.get(url.get_backend_name(), "all")
        fix = f"pip install 'hpo-service[{extra}]'"
        raise InputError(
            f"{error.name or url.drivername} isn't installed", path="storage", value=shown, fix=fix
        ) from None
    except sa.exc.NoSuchModuleError:
        problem = f"unknown driver {url.drivername!r}"
        raise InputError(problem, path="storage", value=shown, fix=_EXAMPLES) from None
    except DatabaseError:
        raise
    except OSError as error:
        raise StudyError(
            f"{shown}: can't open the database: {_cause(error)}\n"
            "  fix: name a folder that you may write to with `--output-dir`, or a database with `--storage`"
        ) from error
    except (sa.exc.DBAPIError, optuna.exceptions.StorageInternalError, DatabaseAwayError) as error:
        raise StudyError(f"{shown}: can't open the database: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
    return first_line(getattr(cause, "orig", None) or cause or error)


def has_schema(url: sa.URL) -> bool:
    """Whether the database holds Optuna's tables at our version, and all of ours.

    Raises:
        StudyError: Optuna's tables are of another version.
        DatabaseAwayError: It can't be reached, or not now.
    """
    engine = sa.create_engine(url, **engine_kwargs(url))
    tell_outages(engine, display_url(url.render_as_string(hide_password=False)))
    try:
        with engine.connect() as conn:
            if not sa.inspect(conn).has_table(CHANGES.name):  # the youngest of our tables
                return False
            revision = _revision(conn)
    finally:
        engine.dispose()
    if revision is not None and revision != OPTUNA_REVISION:
        raise _wrong_revision(url, revision)
    return revision is not None


def _revision(conn: sa.Connection) -> str | None:
    """The version that Optuna's migrations have brought the tables to; None where there are none."""
    if not sa.inspect(conn).has_table("alembic_version"):
        return None
    return conn.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


def _wrong_revision(url: sa.URL, revision: str) -> StudyError:
    shown = display_url(url.render_as_string(hide_password=False))
    return StudyError(
        f"{shown}: its tables are at version {revision}, Optuna {optuna.__version__} needs {OPTUNA_REVISION}\n"
        "  fix: run `optuna storage upgrade --storage URL` if they are older; else install the newer Optuna"
    )


def create_schema(url: sa.URL) -> None:
    """Create what is missing of Optuna's tables and the ledger; safe when several processes do it together.

    On SQLite and PostgreSQL it is one transaction: a process killed inside leaves nothing half made.
    """
    for left in reversed(range(_SCHEMA_TRIES)):
        engine = sa.create_engine(url, **engine_kwargs(url))
        try:
            if url.get_backend_name() == "sqlite":
                _use_wal(engine)
            with engine.connect() as conn, _schema_lock(conn):
                _create_missing(conn, url)
        except sa.exc.DBAPIError:  # a program without our lock creates the same tables
            if not left:
                raise
            time.sleep(0.2)
        else:
            return
        finally:
            engine.dispose()


def _use_wal(engine: sa.Engine) -> None:
    """Switch the file to a write-ahead log, which it keeps from then on."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            with engine.connect() as conn:
                conn.exec_driver_sql("PRAGMA journal_mode=WAL")
        except sa.exc.OperationalError:  # the switch is one of the few things that the busy timeout skips
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


@contextmanager
def _schema_lock(conn: sa.Connection) -> Iterator[None]:
    """A transaction that one process at a time is in."""
    backend = conn.dialect.name
    if backend == "sqlite":
        conn.exec_driver_sql("BEGIN IMMEDIATE")
    elif backend == "postgresql":
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_SCHEMA_LOCK)))
    elif not conn.execute(sa.select(sa.func.get_lock("hpo_schema", _LOCK_SECONDS))).scalar():
        raise DatabaseAwayError(f"another process has been making the tables for more than {_LOCK_SECONDS} s")
    try:
        yield
        conn.commit()
    finally:
        conn.rollback()
        if backend == "mysql":
            conn.execute(sa.select(sa.func.release_lock("hpo_schema")))


def _create_missing(conn: sa.Connection, url: sa.URL) -> None:
    from alembic.config import Config
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    revision = _revision(conn)
    if revision is not None and revision != OPTUNA_REVISION:
        raise _wrong_revision(url, revision)
    models.BaseModel.metadata.create_all(conn)
    ledger.metadata.create_all(conn)
    info = models.VersionInfoModel.__table__
    if conn.execute(sa.select(info.c.version_info_id)).first() is None:
        row = {"schema_version": models.SCHEMA_VERSION, "library_version": optuna.__version__}
        conn.execute(sa.insert(info).values(version_info_id=1, **row))
    if revision is None:
        if conn.dialect.name == "mysql":
            _keep_microseconds(conn)
        # As Optuna itself stamps new tables, but on this connection, inside the lock.
        config = Config()
        config.set_main_option("script_location", str(Path(models.__file__).parent / "alembic").replace("%", "%%"))
        MigrationContext.configure(conn).stamp(ScriptDirectory.from_config(config), OPTUNA_REVISION)


def _keep_microseconds(conn: sa.Connection) -> None:
    """MySQL's DATETIME has whole seconds only, where every other database keeps what Optuna stores."""
    for column in ("datetime_start", "datetime_complete"):
        conn.execute(sa.text(f"ALTER TABLE trials MODIFY {column} DATETIME(6)"))
