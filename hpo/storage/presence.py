"""Notices that a SQLite database's files were removed or replaced under open connections.

Such connections keep working with files that no longer have a name, and what they store is lost; a new connection
would make an empty database, or use the one that is there now. So a storage remembers the files by device and
inode, and uses a connection only while the files on disk are the ones that it has open.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from hpo.storage.outage import DatabaseGoneError
from hpo.storage.read_only import UnwatchedConnection

_LOGS: Final = "hpo_logs"
#: Suffixes of the write-ahead log and its index.
_SUFFIXES: Final = ("-wal", "-shm")

#: Device and inode; None for a file that is not there.
_Identity = tuple[int, int] | None


def watch_file(engine: sa.Engine, file: Path, shown: str) -> None:
    """Make an engine raise `DatabaseGoneError` once the files on disk are no longer those that it has open.

    Args:
        engine: The engine.
        file: The database.
        shown: Its name, for people.
    """
    watched = _Watched(file.absolute(), shown)  # the process may change its folder
    sa.event.listen(engine, "do_connect", watched.before_connecting)
    sa.event.listen(engine, "checkout", watched.before_use)


class _Watched:
    def __init__(self, file: Path, shown: str) -> None:
        self._file = file
        self._shown = shown
        self._known = _identity(file)
        self._problem = ""

    def before_connecting(self, *_: object) -> None:
        self._check("", self._known)

    def before_use(
        self, connection: sqlite3.Connection, record: sa.pool.ConnectionPoolEntry, _: sa.pool.PoolProxiedConnection
    ) -> None:
        self._check("", self._known)
        if isinstance(connection, UnwatchedConnection):
            if connection.is_outdated():
                raise sa.exc.DisconnectionError("another process writes to the file")  # the pool reconnects
            return
        if _LOGS not in record.info:
            # Reading opens the log. From then on no other connection removes it until this one is closed.
            connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
            record.info[_LOGS] = [(suffix, _identity(self._path(suffix))) for suffix in _SUFFIXES]
        for suffix, before in record.info[_LOGS]:
            self._check(suffix, before)

    def _check(self, suffix: str, before: _Identity) -> None:
        now = before if self._problem else _identity(self._path(suffix))
        if now != before:
            happened = "was removed" if now is None else "was replaced by another file"
            self._problem = f"{self._path(suffix).name} {happened}"
        if self._problem:
            raise DatabaseGoneError(
                f"{self._shown}: {self._problem} while it was in use: nothing can be stored\n"
                "  fix: put the file back that you want to use, then start `hpo run` again: it resumes from "
                "checkpoints"
            )

    def _path(self, suffix: str) -> Path:
        return Path(f"{self._file}{suffix}")


def _identity(file: Path) -> _Identity:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
