"""Optuna's relational storage with transactions made for many small writers, and patience with its database.

Sessions are thread-local and one transaction long. Optuna's methods open theirs from ``self.scoped_session``; a
check that must share the transaction runs on that session first, and Optuna's method then commits both.
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
    """Whether the current thread's transaction is one that writes."""

    writing = 0


class TransactionalStorage(PreparedStorage):
    """Optuna's storage on tuned connections.

    Args:
        url: A normalised URL (`hpo.storage.engines.normalize_url`) of a database that has the schema.

    Attributes:
        patience: Waits where the database is away.
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
        """Look whether the database's file is still there; a server is not asked.

        Raises:
            DatabaseGoneError: It was removed or replaced.
        """
        if self.engine.dialect.name == "sqlite":
            self.engine.connect().close()

    def connect_through(self, pooler: Path) -> None:
        """Use a pooler (`hpo.storage.pooler.running_pooler`) from now on, in place of connections of its own."""
        self.pooler = pooler
        connect_through(self.engine, pooler)
        self.close()

    def close(self) -> None:
        """Close all connections; the storage opens new ones when it is used again."""
        self.scoped_session.remove()
        self.engine.dispose()

    def rest(self) -> None:
        """Close the connections of which a server has few, where the storage is not used for a while."""
        if self.engine.dialect.name != "sqlite":
            self.close()

    def rest_if_idle(self, seconds: float) -> None:
        """Close the connections of which a server has few, where none has been used for so many seconds."""
        pool = self.engine.pool
        if isinstance(pool, IdlePool):
            pool.close_idle(seconds)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Make the transactions begun inside take SQLite's write lock with their first statement.

        Optuna reads before it writes. A transaction that has read on SQLite can't become a writer once another
        process has written: it fails immediately, with any busy timeout.
        """
        self._intent.writing += 1
        try:
            yield
        finally:
            self._intent.writing -= 1

    @contextmanager
    def transaction(self) -> Iterator[orm.Session]:
        """A writing transaction on this thread's session; Optuna's methods called inside join and end it."""
        with self.patience.whole(), self._writing(), scoped_transaction(self.scoped_session) as session:
            yield session

    @contextmanager
    def single_statements(self) -> Iterator[sa.Connection]:
        """A connection on which each statement is a transaction of its own."""
        with self._explained(), self._autocommit.connect() as conn:
            yield conn

    @contextmanager
    def one_transaction(self) -> Iterator[sa.Connection]:
        """A connection whose statements are one writing transaction; it is no session's, and costs less."""
        with self._explained(), self._writing(), self.engine.begin() as conn:
            yield conn

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Give the errors of a connection the types that operations raise."""
        try:
            yield
        except sa.exc.SQLAlchemyError as error:
            raise StorageInternalError(f"the database refused a statement: {error}") from error
        except self.engine.dialect.loaded_dbapi.Error as error:
            # The statement is done, and the connection broke while it was given back.
            raise DatabaseAwayError(first_line(error)) from error
