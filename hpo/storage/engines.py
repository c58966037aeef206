"""Databases: their URLs, and engines tuned for many small writers.

SQLite is used as recommended for concurrent writers: a write-ahead log, a busy timeout, and the write lock taken
at the start of a writing transaction. Readers take no lock at all and never wait.

No client waits without limit, neither for another client's lock nor for a server that does not answer: an
operation that has waited too long fails, and is tried again with patience (`hpo.storage.outage`). A server ends
transactions whose client has stopped or vanished, and frees their locks.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

import optuna
import sqlalchemy as sa

from hpo.errors import PASSWORD_KEYS, InputError, StudyError
from hpo.storage.guarded import SINGLE
from hpo.storage.idle import IdlePool
from hpo.storage.outage import DatabaseAwayError, DatabaseError, first_line
from hpo.storage.read_only import is_read_only, read_only

if TYPE_CHECKING:
    import psycopg

CONNECT_SECONDS: Final = 10
LOCK_SECONDS: Final = 10  # far more than the busiest writers wait for each other
SILENCE_SECONDS: Final = 60  # longest silence of a client inside a transaction, or of a server with a query
PROBE_SECONDS: Final = 20  # between two probes whether a silent server is still there
_BACKENDS = {"postgres": "postgresql", "mariadb": "mysql"}  # Optuna knows the dialect by the name mysql only
_DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
_EXTRAS = {"postgresql": "postgres", "mysql": "mysql"}
_REACH = (
    "see that the server runs, and that host, user, password and database in `run.storage` (or `--storage`, "
    "`HPO_STORAGE`) are right"
)
_EXAMPLES = "write sqlite:///study.db, postgresql://user@host/name or mysql://user@host/name"


class WriteIntent(Protocol):
    """Whether the current thread is inside a writing transaction."""

    writing: int


def normalize_url(url: str) -> sa.URL:
    """The URL with the driver that hpo uses, whichever it names; InputError for a URL that can't be used."""
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):  # the port is not a number
        raise InputError("not a database URL", path="storage", fix=_EXAMPLES) from None
    given, plus, driver = parsed.drivername.partition("+")
    backend = _BACKENDS.get(given, given)
    if backend not in {"sqlite", "postgresql", "mysql"}:
        problem = f"no support for databases of type {backend!r}"
        raise InputError(problem, path="storage", value=display_url(url), fix=_EXAMPLES)
    parsed = parsed.set(drivername=f"{backend}{plus}{driver}")
    if driver:
        _look_up_driver(parsed)
    parsed = parsed.set(drivername=_DRIVERS.get(backend, parsed.drivername))
    if backend == "sqlite":
        name = parsed.database or ""
        if name in {"", ":memory:"} or name.startswith("file:"):
            fix = "write sqlite:///study.db or sqlite:////absolute/path/study.db"
            raise InputError("a study needs a database file", path="storage", value=display_url(url), fix=fix)
    return parsed


def _look_up_driver(url: sa.URL) -> None:
    try:
        url.get_dialect()
    except sa.exc.NoSuchModuleError:
        shown = display_url(url)
        problem = f"unknown driver {url.drivername!r}"
        raise InputError(problem, path="storage", value=shown, fix=_EXAMPLES) from None


def display_url(url: str | sa.URL) -> str:
    """The URL for people to read: without its password."""
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        return "(unreadable URL)"
    secret = dict.fromkeys(PASSWORD_KEYS & set(parsed.query), "***")
    shown = parsed.update_query_dict(secret).render_as_string(hide_password=True)
    return unquote(shown) if parsed.get_backend_name() == "sqlite" else shown


def has_password(url: str) -> bool:
    """Whether a URL contains a password."""
    parsed = sa.make_url(url)
    return parsed.password is not None or bool(PASSWORD_KEYS & set(parsed.query))


def sqlite_file(url: sa.URL) -> Path | None:
    """The database's file, or None for a database on a server."""
    return Path(url.database or "") if url.get_backend_name() == "sqlite" else None


def no_file(file: Path, shown: str) -> StudyError:
    """The error for a SQLite database that does not exist; PermissionError if this user may not look."""
    blocked = next((folder for folder in file.parents if folder.exists() and not folder.is_dir()), None)
    if blocked is not None:
        return StudyError(f"{shown}: {blocked} is a file\n  fix: name a folder with `--output-dir`")
    return StudyError(f"{shown}: there is no such database yet\n  fix: `hpo run` makes it")


def engine_kwargs(url: sa.URL) -> dict[str, Any]:
    """Arguments of `sqlalchemy.create_engine` for the URL's database."""
    backend = url.get_backend_name()
    if backend == "sqlite":
        # isolation_level None: Python's sqlite3 must begin no transactions by itself; `begin_immediate` does.
        connect = {"timeout": float(LOCK_SECONDS), "isolation_level": None}
        kwargs: dict[str, Any] = {"connect_args": connect, "pool_events": [(_own(_tune_sqlite), "connect")]}
        file = Path(url.database or "").absolute()
        return kwargs | ({"creator": lambda: read_only(file, connect)} if is_read_only(file) else {})
    # A server has few connections. A process keeps one; a second thread's additional one is closed after its use.
    small = {"pool_pre_ping": True, "pool_size": 1, "max_overflow": 5, "pool_recycle": 1800, "poolclass": IdlePool}
    if backend == "mysql":
        # The default REPEATABLE READ locks gaps between rows: deadlocks among inserting workers.
        return small | {"connect_args": _mysql_options(url), "isolation_level": "READ COMMITTED"}
    return small | {"connect_args": _postgres_options(url), "pool_events": [(_own(_tune_postgres), "connect")]}


def _mysql_options(url: sa.URL) -> dict[str, Any]:
    options: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": SILENCE_SECONDS,
        "write_timeout": SILENCE_SECONDS,
        # MySQL has no limit for idle transactions, only one for idle connections; the pool replaces closed ones.
        "init_command": f"SET innodb_lock_wait_timeout={LOCK_SECONDS}, wait_timeout={SILENCE_SECONDS}",
    }
    if "unix_socket" in url.query:
        # A socket file needs no encryption, for which the driver would read the system's certificates each time.
        options["ssl_disabled"] = True
    return _unless_given(url, options)


def _postgres_options(url: sa.URL) -> dict[str, Any]:
    options = {
        "connect_timeout": CONNECT_SECONDS,
        "keepalives_idle": PROBE_SECONDS,
        "keepalives_interval": PROBE_SECONDS,
        "tcp_user_timeout": SILENCE_SECONDS * 1000,
        # A pooler may give each transaction another server connection, which lacks statements prepared before.
        "prepare_threshold": None,
    }
    return _unless_given(url, options)


def _unless_given(url: sa.URL, options: dict[str, Any]) -> dict[str, Any]:
    """The options that the URL does not set itself."""
    return {name: value for name, value in options.items() if name not in url.query}


def session_limits() -> str:
    """Statements for a new connection to PostgreSQL that set the time limits enforced by the server."""
    limits = {"lock_timeout": LOCK_SECONDS, "idle_in_transaction_session_timeout": SILENCE_SECONDS}
    return "; ".join(f"SET {name} = '{seconds}s'" for name, seconds in limits.items())


def _own(tune: Callable[[Any, object], None]) -> Callable[[Any, object], None]:
    """Wrap a function in a new object for each engine.

    SQLAlchemy's registry identifies a listener by the addresses of the function and of the object that it listens
    to. A disposed engine's listeners stay registered under the address of a pool that is gone, and another
    engine's pool may get the same address. If both used the same function, a garbage collection at the wrong
    moment would cause a KeyError in the registry, which Python prints ("Exception ignored in: _collection_gced").
    """

    def listener(connection: Any, record: object) -> None:
        tune(connection, record)

    return listener


def _tune_postgres(connection: "psycopg.Connection[Any]", _: object) -> None:
    # Not as connection options, because poolers between client and server refuse those.
    connection.execute(session_limits())
    connection.commit()


def _tune_sqlite(connection: sqlite3.Connection, _: object) -> None:
    # In WAL mode NORMAL loses no transaction to a killed process, only to a power cut.
    connection.execute("PRAGMA synchronous=NORMAL")


def begin_immediate(engine: sa.Engine, intent: WriteIntent) -> None:
    """Make SQLite transactions that write take the write lock with their first statement.

    Statements that only read run outside of transactions. A transaction that began by reading can't write once
    another process has written: SQLite fails with "database is locked" immediately, whatever the busy timeout.
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
    """Turn errors raised while a database is opened into errors that name the fix."""
    shown = display_url(url)
    try:
        yield
    except ImportError as error:
        extra = _EXTRAS.get(url.get_backend_name(), "all")
        fix = f"pip install 'hpo-service[{extra}]'"
        raise InputError(
            f"{error.name or url.drivername} isn't installed", path="storage", value=shown, fix=fix
        ) from None
    except DatabaseError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        if not url.query:  # with options, a driver raises these for one that it does not know, or a wrong value
            raise
        problem, fix = f"an option in it can't be used: {first_line(error)}", "correct what follows the `?`"
        raise InputError(problem, path="storage", value=shown, fix=fix) from error
    except OSError as error:
        raise StudyError(
            f"{shown}: can't open the database: {_cause(error)}\n"
            "  fix: name a folder that you may write to with `--output-dir`, or a database with `--storage`"
        ) from error
    except (sa.exc.DBAPIError, optuna.exceptions.StorageInternalError, DatabaseAwayError) as error:
        fix = f"\n  fix: {_REACH}" if sqlite_file(url) is None else ""
        raise StudyError(f"{shown}: can't open the database: {_cause(error)}{fix}") from error


def _cause(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
    return first_line(getattr(cause, "orig", None) or cause or error)
