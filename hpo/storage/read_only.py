"""Opens a SQLite file that this user may not change, such as one on an archive's read-only disk."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from hpo.storage.outage import DatabaseError

#: Seconds that another process may take between making or removing the log and making or removing its index.
_MOMENT: Final = 1.0
_PAUSE: Final = 0.005


class UnwatchedConnection(sqlite3.Connection):
    """Reads a file as immutable: SQLite checks neither for a log beside it nor for changes.

    Attributes:
        file: The file.
        stamp: The file's time and size before it was opened; None if it did not exist.
    """

    file: Path
    stamp: tuple[int, int] | None

    def is_outdated(self) -> bool:
        """Whether another process is writing to the file, or has done so since it was opened."""
        return _log(self.file).exists() or _stamp(self.file) != self.stamp


def is_read_only(file: Path) -> bool:
    """Whether a file exists and this user may not change it, or not the folder in which SQLite puts its log."""
    return file.is_file() and not (os.access(file, os.W_OK) and os.access(file.parent, os.W_OK))


def read_only(file: Path, connect: dict[str, Any]) -> sqlite3.Connection:
    """A connection that changes nothing.

    Even to read a file that uses a write-ahead log, SQLite normally writes. If there is no log beside the file, no
    process has it open for writing, and it can be read as immutable (https://www.sqlite.org/wal.html, "Read-Only
    Databases"). If there is a log, SQLite reads it by its index, which must exist.

    Args:
        file: The database, as an absolute path.
        connect: Arguments of `sqlite3.connect`.

    Raises:
        DatabaseError: There is a log without an index, such as beside a copy of a file that was in use.
    """
    deadline = time.monotonic() + _MOMENT
    while _log(file).exists():
        found: sqlite3.Connection = sqlite3.connect(
            f"{_uri(file)}?mode=ro", uri=True, check_same_thread=False, **connect
        )
        try:
            found.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
        except sqlite3.OperationalError as error:
            found.close()
            if error.sqlite_errorcode == sqlite3.SQLITE_CANTOPEN and time.monotonic() < deadline:
                time.sleep(_PAUSE)
                continue
            if _index(file).exists():
                raise
            raise _without_index(file) from error
        else:
            return found
    stamp = _stamp(file)
    unwatched: UnwatchedConnection = sqlite3.connect(
        f"{_uri(file)}?mode=ro&immutable=1",
        uri=True,
        check_same_thread=False,
        factory=UnwatchedConnection,
        **connect,
    )
    unwatched.file, unwatched.stamp = file, stamp
    return unwatched


def _uri(file: Path) -> str:
    return f"file:{quote(str(file))}"


def _log(file: Path) -> Path:
    return file.with_name(f"{file.name}-wal")


def _index(file: Path) -> Path:
    return file.with_name(f"{file.name}-shm")


def _without_index(file: Path) -> DatabaseError:
    return DatabaseError(
        f"sqlite:///{file}: the latest of it lies in {_log(file).name}, which can't be read where nothing may be "
        "written\n  fix: copy both files to a folder that you may write to, and name the copy with `--storage`"
    )


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:  # opening the file will report why
        return None
    return found.st_mtime_ns, found.st_size
