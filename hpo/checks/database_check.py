"""Asking a database whether it is there, which version it has, and whether a study can be kept in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from hpo.checks.filesystems import network_file_system, refused_writing
from hpo.errors import StudyError
from hpo.storage.engines import (
    display_url,
    engine_kwargs,
    explained,
    normalize_url,
    sqlite_file,
)
from hpo.storage.schema import Tables, tables_of

_SAID: Final = {
    Tables.MISSING: "has no tables yet: `hpo run` makes them",
    Tables.OUTDATED: "has the tables of an earlier version: the next command brings them up to date",
    Tables.PRESENT: "has the tables",
}
#: Seconds for a connection, and for an answer.
_SECONDS: Final = 5


@dataclass(frozen=True)
class Answer:
    """What a database said.

    Attributes:
        found: Where it is, its version, and whether it has the tables.
        fix: What to do; empty where nothing is.
    """

    found: str
    fix: str = ""


def ask(url: str) -> Answer:
    """Ask a database; nothing is written to it, and no file is made.

    Raises:
        InputError: The URL can't be used.
        StudyError: It can't be reached in a few seconds, or its tables are of another version.
    """
    parsed, shown = normalize_url(url), display_url(url)
    file = sqlite_file(parsed)
    with explained(parsed):
        if file is not None and not file.exists():
            return _new_file(file, shown)
        version = _version(parsed)
        tables = _SAID[tables_of(parsed)]
    kind = network_file_system(url)
    if kind is not None:
        fix = "put the file on a local disk, or use a server: SQLite's locks work on one machine only"
        return Answer(f"{shown}: {version}, {tables}, on a network file system ({kind})", fix)
    return Answer(f"{shown}: {version}, {tables}")


def _new_file(file: Path, shown: str) -> Answer:
    if (problem := refused_writing(file.parent)) is not None:
        raise StudyError(f"{shown}: {problem}\n  fix: give another `storage`")
    return Answer(f"{shown}: not there yet: `hpo run` makes it")


def _version(url: sa.URL) -> str:
    engine, backend = sa.create_engine(url, **_impatient(url)), url.get_backend_name()
    question = "SELECT sqlite_version()" if backend == "sqlite" else "SELECT version()"
    try:
        with engine.connect() as conn:
            version = str(conn.execute(sa.text(question)).scalar())
            if backend == "sqlite":
                conn.exec_driver_sql("SELECT count(*) FROM sqlite_master")
    finally:
        engine.dispose()
    names = {"sqlite": "SQLite ", "mysql": "" if "MariaDB" in version else "MySQL "}
    return names.get(backend, "") + version.partition(" on ")[0].partition(",")[0]


def _impatient(url: sa.URL) -> dict[str, Any]:
    """Arguments of the engine, with less time for an answer than a study takes."""
    arguments = engine_kwargs(url)
    connect = dict(arguments["connect_args"])
    limits = ("timeout", "connect_timeout", "read_timeout", "write_timeout")
    connect |= {name: min(connect[name], _SECONDS) for name in limits if name in connect}
    return {**arguments, "connect_args": connect}
