"""Reading a SQLite file that this user may not change, as on an archive's read-only disk."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote


class UnwatchedConnection(sqlite3.Connection):
    """Reads a file as one that stays as it is: SQLite looks neither for a log beside it, nor for what has changed.

    Attributes:
        file: The file.
        stamp: Of the file, from before it was opened; None where it was not there.
    """

    file: Path
    stamp: tuple[int, int] | None

    def is_outdated(self) -> bool:
        """Whether another process writes to the file now, or has done so."""
        return _log(self.file).exists() or _stamp(self.file) != self.stamp


def is_read_only(file: Path) -> bool:
    """Whether a file is there, and this user may not change it or what SQLite lays beside it."""
    return file.is_file() and not (os.access(file, os.W_OK) and os.access(file.parent, os.W_OK))


def read_only(file: Path, connect: dict[str, Any]) -> sqlite3.Connection:
    """A connection that changes nothing.

    SQLite wants to write even to read a file that keeps a write-ahead log. Where there is no log beside it, no
    process has it open for writing, and it can be read as a file that stays as it is
    (https://www.sqlite.org/wal.html, "Read-Only Databases").

    Args:
        file: The database, with an absolute path.
        connect: Arguments of `sqlite3.connect`.
    """
    uri, stamp = f"file:{quote(str(file))}?mode=ro", _stamp(file)
    if _log(file).exists():
        found: sqlite3.Connection = sqlite3.connect(uri, uri=True, check_same_thread=False, **connect)
        return found
    unwatched: UnwatchedConnection = sqlite3.connect(
        f"{uri}&immutable=1", uri=True, check_same_thread=False, factory=UnwatchedConnection, **connect
    )
    unwatched.file, unwatched.stamp = file, stamp
    return unwatched


def _log(file: Path) -> Path:
    return file.with_name(f"{file.name}-wal")


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:  # what opens the file says why
        return None
    return found.st_mtime_ns, found.st_size
