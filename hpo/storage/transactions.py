"""Optuna's relational storage with connections and transactions for many small writers, and patience.

Sessions are thread-local and last for one transaction. Optuna's methods get theirs from ``self.scoped_session``; a
check that must be in the same transaction runs on that session first, and Optuna's method then commits both.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from optuna.exceptions import StorageInternalError
from sqlalchemy import orm

from hpo.storage import engines as database
from hpo.storage.guarded import SINGLE
from hpo.storage.idle import IdlePool
from hpo.storage.optuna_private import PreparedStorage, scoped_transaction
from hpo.storage.outage import DatabaseAwayError, Patience, first_line, tell_outages
from hpo.storage.pooler import connect_through
from hpo.storage.presence import watch_file
from hpo.storage.process_forks import keep_from_forks


class _Intent(threading.local):
    """How many `_writing` blocks the current thread is in: above 0, its transactions write."""

    writing = 0


class TransactionalStorage(PreparedStorage):
    """Optuna's storage on tuned connections.

    Args:
        url: A normalised URL (`hpo.storage.engines.normalize_url`) of a database that has the schema.

    Attributes:
        patience: Waits while the database is away.
        pooler: The folder of the pooler that it connects through (`hpo.storage.pooler`); None without one.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, database.engine_kwargs(sa.make_url(url)))
        shown = database.display_url(url)
        self.patience = Patience(shown)
        tell_outages(self.engine, shown)
        keep_from_forks(self.engine)
        file = database.sqlite_file(self.engine.url)
        if file is not None:
            watch_file(self.engine, file, shown)
        self.pooler: Path | None = None
        self._intent = _Intent()
        if self.engine.dialect.name == "sqlite":
            database.begin_immediate(self.engine, self._intent)
            self._autocommit = self.engine.execution_options(**{SINGLE: True})
        else:
            self._autocommit = self.engine.execution_options(isolation_level="AUTOCOMMIT")

    def check(self) -> None:
        """Check that the database's file is still there; for a server this does nothing.

        Raises:
            DatabaseGoneError: It was removed or replaced.
        """
        if self.engine.dialect.name == "sqlite":
            self.engine.connect().close()

    def connect_through(self, pooler: Path) -> None:
        """Connect through a pooler (`hpo.storage.pooler.running_pooler`) from now on."""
        self.pooler = pooler
        connect_through(self.engine, pooler)
        self.close()

    def close(self) -> None:
        """Close all connections; the storage opens new ones when it is next used."""
        self.scoped_session.remove()
        self.engine.dispose()

    def rest(self) -> None:
        """Close all connections to a server, which has few; to call when the storage is unused for a while."""
        if self.engine.dialect.name != "sqlite":
            self.close()

    def rest_if_idle(self, seconds: float) -> None:
        """Close all connections to a server, which has few, if none has been used for this many seconds."""
        pool = self.engine.pool
        if isinstance(pool, IdlePool):
            pool.close_idle(seconds)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Make transactions that begin in the block take SQLite's write lock with their first statement.

        Optuna reads before it writes. A SQLite transaction that began by reading can't write once another process
        has written: it fails immediately, whatever the busy timeout.
        """
        self._intent.writing += 1
        try:
            yield
        finally:
            self._intent.writing -= 1

    @contextmanager
    def transaction(self) -> Iterator[orm.Session]:
        """A writing transaction on this thread's session; Optuna's methods called in the block join and end it."""
        with self.patience.whole(), self._writing(), scoped_transaction(self.scoped_session) as session:
            yield session

    @contextmanager
    def single_statements(self) -> Iterator[sa.Connection]:
        """A connection on which each statement is a transaction of its own."""
        with self._explained(), self._autocommit.connect() as conn:
            yield conn

    @contextmanager
    def one_transaction(self) -> Iterator[sa.Connection]:
        """A connection whose statements are one writing transaction; cheaper than a session's (`transaction`)."""
        with self._explained(), self._writing(), self.engine.begin() as conn:
            yield conn

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert the errors of a connection to the types that operations raise."""
        try:
            yield
        except sa.exc.SQLAlchemyError as error:
            raise StorageInternalError(f"the database refused a statement: {error}") from error
        except self.engine.dialect.loaded_dbapi.Error as error:
            # The statement was executed, and the connection broke when it was returned to the pool.
            raise DatabaseAwayError(first_line(error)) from error
