"""Checks whether a database can be reached, which version it has, and whether it can store a study."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from hpo.checks.filesystems import network_file_system, refused_writing
from hpo.checks.findings import Finding, as_finding, finding
from hpo.config.code import code_identity
from hpo.config.spec import StudySpec
from hpo.errors import InputError, StudyError
from hpo.storage import ledger
from hpo.storage.engines import (
    display_url,
    engine_kwargs,
    explained,
    normalize_url,
    sqlite_file,
)
from hpo.storage.opening import open_storage
from hpo.storage.schema import Tables, tables_of
from hpo.study.code_record import CodeRecord, code_fix, code_problem
from hpo.study.config_record import refused_config

_SAID: Final = {
    Tables.MISSING: "has no tables yet: `hpo run` makes them",
    Tables.OUTDATED: "has the tables of an earlier version: the next command brings them up to date",
    Tables.PRESENT: "has the tables",
}
#: The time limit in seconds for a connection, and for an answer.
_SECONDS: Final = 5


@dataclass(frozen=True)
class Answer:
    """The state of a database.

    Attributes:
        found: Where it is, its version, and whether it has the tables.
        fix: What to do; empty if nothing.
    """

    found: str
    fix: str = ""


def ask(url: str) -> Answer:
    """Ask a database for its state; writes nothing to it, and creates no file.

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


def check_stored(spec: StudySpec) -> list[Finding]:
    """Warnings about what would stop a run at the study's database; like `ask`, this writes nothing.

    They are only warnings: an engine's agents may reach a database that this machine does not, and a person may
    accept a change.
    """
    try:
        parsed = normalize_url(spec.storage_url)
    except InputError:  # `check_imports` reports it
        return []
    file = sqlite_file(parsed)
    if file is not None and not file.exists():
        return []
    try:
        with explained(parsed):
            _version(parsed)
            tables = tables_of(parsed)
        # Tables of an earlier version are not opened: that would migrate them.
        refusals = _refusals(spec) if tables is Tables.PRESENT else []
    except StudyError as error:
        problem, _, fix = str(error).partition("\n  fix: ")
        return [finding(spec, problem, path="run.storage", fix=fix)]
    return [as_finding(each) for each in refusals]


def _refusals(spec: StudySpec) -> list[InputError]:
    """Why a run would refuse to resume the stored study with this file and code; empty if it would not."""
    storage = open_storage(spec.storage_url, create=False)
    try:
        study_id = storage.get_study_id_from_name(spec.study.name)
        stored = storage.get_study_user_attrs(study_id)
        with storage.engine.connect() as conn:
            has_begun = ledger.has_begun(conn, study_id)
    except KeyError:  # there is no such study
        return []
    finally:
        storage.close()
    found = [refused_config(spec, stored)]
    if has_begun and (problem := code_problem(CodeRecord.of(stored), code_identity(spec))):
        found.append(spec.error(problem, path="study.name", fix=code_fix(spec)))
    return [each for each in found if each is not None]


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
    """The engine's arguments, with a shorter time limit than a study has."""
    arguments = engine_kwargs(url)
    connect = dict(arguments["connect_args"])
    limits = ("timeout", "connect_timeout", "read_timeout", "write_timeout")
    connect |= {name: min(connect[name], _SECONDS) for name in limits if name in connect}
    return {**arguments, "connect_args": connect}
