"""Patience: operations wait for a database that is away for a while, then continue.

A server may be restarted, drop a connection or abort a transaction (deadlock) at any instant. A listener on the
engine (`tell_outages`) turns such errors into `DatabaseAwayError`, and lasting failures into `DatabaseError`.
Operations wrapped with `patient` are tried again until the database is back or patience ends. An operation is
tried again as a whole, from its first statement: operations nested in it don't wait on their own.

If a connection breaks during a commit, the transaction may or may not be stored. So when an operation is tried
again (``patience.tries`` is then not 0), it must find out what the previous try has done, or be harmless to
repeat.
"""

from __future__ import annotations

import functools
import logging
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, cast

import sqlalchemy as sa
from optuna.exceptions import StorageInternalError

from hpo.errors import StudyError

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_C = TypeVar("_C", bound=type)

PATIENCE_SECONDS: Final = 600.0
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0

#: PostgreSQL error codes for a lost connection: connection trouble, too many connections, shutdown and start-up, a
#: transaction that was idle or took too long, a read-only server (after a failover a new connection reaches the
#: one that writes).
_POSTGRES_LOST = ("08", "53300", "57P0", "25P03", "25P04", "25006")
#: PostgreSQL error codes for an aborted transaction: serialisation failure, deadlock, a lock waited for too long,
#: a statement cancelled or timed out, a full disk or too little memory (53).
_POSTGRES_BROKEN_OFF = ("40001", "40P01", "55P03", "57014", "53")
#: A lost connection on MySQL and MariaDB. A read-only server: 1290 (``read_only``), 1792, 1836.
_MYSQL_LOST = frozenset({1040, 1053, 1203, 1226, 1290, 1792, 1836, 1927, 2002, 2003, 2006, 2013})
#: An aborted transaction there: a lock waited for too long (1205), deadlock (1213), a statement interrupted (1317,
#: 1028) or timed out (1969 in MariaDB, 3024 in MySQL), a full disk (1021, 1114), too little memory (1037, 1038,
#: 1041).
_MYSQL_BROKEN_OFF = frozenset({1021, 1028, 1037, 1038, 1041, 1114, 1205, 1213, 1317, 1969, 3024})
#: The server has hung up amid a statement, as it may do if the statement is longer than it accepts.
_MYSQL_HUNG_UP = frozenset({2006, 2013})
#: A statement is longer than the server accepts.
_MYSQL_TOO_LONG: Final = 1153
#: Length in characters of a statement's longest value from which the statement may be too long.
_LONG: Final = 2**20
_SQLITE_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
#: By the primary error code: why a SQLite file can't be used, and what to do.
_SQLITE_FAILURES: Final = {
    sqlite3.SQLITE_FULL: ("the disk is full", "make room"),
    sqlite3.SQLITE_READONLY: ("the file can't be written to", "see its permissions and its folder's"),
    sqlite3.SQLITE_IOERR: ("the file can't be read or written", "see the disk and the system's log"),
    sqlite3.SQLITE_CANTOPEN: ("the file can't be opened", "see that it is there, and its permissions"),
}
_SQLITE_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_RESTORE: Final = "restore a copy of it, or use what `sqlite3 FILE .recover | sqlite3 NEW` can save in its place"
_RESUME: Final = "then resume the study with `hpo run`"
_SHORTER: Final = "shorten it; names of studies, parameters and attributes have 512 characters at most, and no NUL"

#: Methods inherited from Optuna's storage that `inheriting_patience` makes patient.
INHERITED: Final = (
    "get_all_studies",
    "create_new_trial",
    "set_trial_param",
    "get_trial_param",
    "get_trial_id_from_study_id_trial_number",
    "get_trial_number_from_id",
    "get_trial_params",
    "get_trial_user_attrs",
    "get_all_trials",
    "get_n_trials",
    "get_best_trial",
    "_get_best_trial_id",  # Optuna's cache calls this one
)


class DatabaseError(StudyError, StorageInternalError):
    """The database fails permanently: nothing can be stored; running trials stay for a later run."""


class DatabaseGoneError(DatabaseError):
    """The database's file was removed or replaced while it was in use."""


class RefusedValueError(StudyError):
    """The database can't hold a value, such as a name that is too long; it works for all others."""


class DatabaseAwayError(StudyError):
    """The database can't be reached, or has aborted a transaction; the same operation may work a moment later.

    Args:
        problem: What the database or its driver says, in one line.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"{problem}\n  fix: see that the database runs and can be reached, then try again")


class Patience(threading.local):
    """Waits for a database that is away; each thread has its own state.

    Args:
        shown: The database's name, for people.
        limit: Seconds after which an operation is given up.

    Attributes:
        tries: How many tries of the thread's current operation have failed so far.
    """

    def __init__(self, shown: str, limit: float = PATIENCE_SECONDS) -> None:
        self.tries = 0
        self._shown = shown
        self._limit = limit
        self._inside = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Treat everything inside the block as one operation: none of the operations in it waits on its own."""
        if self._inside:
            yield
            return
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self.tries = 0

    def run(self, operation: Callable[[], _T]) -> _T:
        """Run an operation on the database, again and again until it succeeds.

        Raises:
            DatabaseError: It has been away for too long.
        """
        if self._inside:
            return operation()
        began = time.monotonic()
        with self.whole():
            while True:
                try:
                    result = operation()
                except DatabaseAwayError as error:
                    self._wait(error, time.monotonic() - began)
                else:
                    break
            if self.tries > 1:
                logger.warning(
                    "%s: the database is reachable again after %.1f s", self._shown, time.monotonic() - began
                )
            return result

    def _wait(self, error: DatabaseAwayError, waited: float) -> None:
        """Sleep before the next try. The first pause logs nothing: a broken connection is not worth reporting."""
        if waited >= self._limit:
            raise DatabaseError(
                f"{self._shown}: the database has been unreachable for {waited:.0f} s: {error.problem}\n"
                f"  fix: start it, {_RESUME}"
            ) from error
        if self.tries == 1:
            text = "%s: the database is unreachable, waiting up to %.0f s for it: %s"
            logger.warning(text, self._shown, self._limit - waited, error.problem)
        pause = min(_FIRST_PAUSE * 2**self.tries, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)
        self.tries += 1
        time.sleep(min(pause, max(self._limit - waited, 0.0)))


class Patient(Protocol):
    """An object with a `Patience`."""

    @property
    def patience(self) -> Patience:
        """Waits for its database."""


_S = TypeVar("_S", bound=Patient)


def patient(function: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
    """Make a function of a storage, or a method of one, wait for the database if it is away."""

    @functools.wraps(function)
    def waiting(storage: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return storage.patience.run(lambda: function(storage, *args, **kwargs))

    return waiting


def inheriting_patience(cls: _C) -> _C:
    """Make the `INHERITED` methods of a storage class `patient` as well."""
    for name in INHERITED:
        setattr(cls, name, patient(getattr(cls, name)))
    return cls


def tell_outages(engine: sa.Engine, shown: str) -> None:
    """Make an engine raise `DatabaseAwayError` for failures that may pass, and `DatabaseError` for lasting ones.

    For a value that the database can't hold it raises `RefusedValueError`.

    Args:
        engine: The engine.
        shown: The database's name, for people.
    """

    def translate(context: sa.engine.ExceptionContext) -> BaseException | None:
        error = context.original_exception
        if not isinstance(error, Exception) or (context.is_pre_ping and context.is_disconnect):
            return None  # a failed ping makes the pool reconnect
        if _sqlite_code(error) in _SQLITE_FAILURES:
            problem, fix = _SQLITE_FAILURES[_sqlite_code(error)]
            return DatabaseError(f"{shown}: {problem}\n  fix: {fix}, {_RESUME}; what is stored is intact")
        if _sqlite_code(error) in _SQLITE_DAMAGED:
            return DatabaseError(
                f"{shown}: the file is damaged: {first_line(error)}\n  fix: {_RESTORE}, {_RESUME}"
            )
        if _is_too_long(context, error):
            context.is_disconnect = True  # the server has closed it
            return RefusedValueError(
                f"{shown}: the database refuses a value: it is longer than its max_allowed_packet\n"
                "  fix: store less in one value, such as the name of a file, or raise that setting of the server"
            )
        if context.is_disconnect or _is_lost(error, connected=context.connection is not None):
            context.is_disconnect = True  # so that the pool drops the connection
            return DatabaseAwayError(first_line(error))
        if _is_broken_off(error):
            return DatabaseAwayError(first_line(error))
        if isinstance(context.sqlalchemy_exception, sa.exc.DataError):
            return RefusedValueError(
                f"{shown}: the database refuses a value: {first_line(error)}\n  fix: {_SHORTER}"
            )
        failed = isinstance(context.sqlalchemy_exception, sa.exc.OperationalError | sa.exc.InternalError)
        if not failed or isinstance(error, sqlite3.Error):  # a wrong statement is a mistake in this program
            return None
        return DatabaseError(
            f"{shown}: the database fails: {first_line(error)}\n  fix: see the server's own log, {_RESUME}"
        )

    sa.event.listen(engine, "handle_error", translate)


def _is_too_long(context: sa.engine.ExceptionContext, error: Exception) -> bool:
    """Whether MySQL or MariaDB refuses a statement for its length; if it has hung up, asks it for its limit."""
    code = _mysql_code(error)
    if code == _MYSQL_TOO_LONG:
        return True
    if code not in _MYSQL_HUNG_UP or context.engine is None or not context.parameters:
        return False
    given: Any = context.parameters
    texts = [
        [value for value in (row.values() if isinstance(row, dict) else row) if isinstance(value, str)]
        for row in (given if isinstance(given, list) else [given])
    ]
    if all(len(text) < _LONG for row in texts for text in row):
        return False
    driver: Any = context.engine.dialect.loaded_dbapi
    sent = max(sum(len(driver.converters.escape_string(text).encode()) for text in row) for row in texts)
    try:
        with context.engine.connect() as conn:
            return sent > cast("int", conn.execute(sa.text("SELECT @@max_allowed_packet")).scalar())
    except (DatabaseAwayError, sa.exc.SQLAlchemyError):  # it is away indeed
        return False


def _is_lost(error: Exception, *, connected: bool) -> bool:
    """Whether a connection is lost, or could not be made."""
    if isinstance(error, sqlite3.Error):
        return False
    return not connected or _sqlstate(error).startswith(_POSTGRES_LOST) or _mysql_code(error) in _MYSQL_LOST


def _is_broken_off(error: Exception) -> bool:
    """Whether the database has aborted a transaction that may succeed if it is tried again."""
    return (
        _sqlstate(error).startswith(_POSTGRES_BROKEN_OFF)
        or _mysql_code(error) in _MYSQL_BROKEN_OFF
        or _sqlite_code(error) in _SQLITE_BUSY
    )


def _sqlstate(error: Exception) -> str:
    return getattr(error, "sqlstate", None) or ""


def _mysql_code(error: Exception) -> object:
    return error.args[0] if error.args else None


def _sqlite_code(error: Exception) -> int:
    """The primary error code; extended codes hold more in their higher bits."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def first_line(error: BaseException) -> str:
    """The first line of an error's text; drivers often write several."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
