"""The tables of a database, Optuna's and ours: checks them, makes missing ones, and brings them up to date."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Final

import optuna
import sqlalchemy as sa

from hpo.errors import StudyError
from hpo.storage import ledger
from hpo.storage.agents import AGENTS
from hpo.storage.attributes import HASH_ATTR
from hpo.storage.changes import CHANGES
from hpo.storage.engines import LOCK_SECONDS, display_url, engine_kwargs
from hpo.storage.mysql_text import convert_text, tables_of_other_text
from hpo.storage.optuna_private import STUDIES, STUDY_USER_ATTRS, TRIALS, models
from hpo.storage.outage import DatabaseAwayError, DatabaseError, first_line, tell_outages
from hpo.storage.pooler import connect_through

#: The head of Optuna 5.0's migrations; asking Optuna for it would load every migration script.
OPTUNA_REVISION: Final = "v3.2.0.a"

_TRIES: Final = 3
_LOCK: Final = 0x68706F  # "hpo"; could be any number that no other program uses in the database


class Tables(Enum):
    """Which of the tables a database has: Optuna's, at the right version, and ours."""

    MISSING = "it lacks some, or all"
    OUTDATED = "it has those of an earlier version of hpo"
    PRESENT = "it has all of them"


def tables_of(url: sa.URL, pooler: Path | None = None) -> Tables:
    """Which of the tables the database has.

    Args:
        url: The database's URL.
        pooler: The folder of a pooler to connect through (`hpo.storage.pooler`); None for none.

    Raises:
        StudyError: Optuna's tables are of another version.
        DatabaseAwayError: The database can't be reached, at least not now.
    """
    with _connection(url, pooler) as conn:
        if not sa.inspect(conn).has_table(CHANGES.name):  # the newest of our tables
            return Tables.MISSING
        revision = _revision(conn)
        is_outdated = bool(_missing_columns(conn) or tables_of_other_text(conn))
    if revision is not None and revision != OPTUNA_REVISION:
        raise _wrong_revision(url, revision)
    if revision is None:
        return Tables.MISSING
    return Tables.OUTDATED if is_outdated else Tables.PRESENT


class PlainStudyError(StudyError):
    """The database has a study of this name that was made by Optuna without hpo, and none of our tables."""


def refuse_plain_study(url: sa.URL, name: str) -> None:
    """Refuse to add our tables to a database for a study that another program has already made there.

    Raises:
        PlainStudyError: The study exists and has trials.
    """
    with _connection(url) as conn:
        if sa.inspect(conn).has_table(TRIALS.name) and conn.execute(_PLAIN, {"name": name}).first():
            raise PlainStudyError(f"the storage has a study named {name} that was not started by `hpo run`")


_PLAIN: Final = (
    sa.select(TRIALS.c.trial_id)
    .join(STUDIES, STUDIES.c.study_id == TRIALS.c.study_id)
    .outerjoin(
        STUDY_USER_ATTRS,
        sa.and_(STUDY_USER_ATTRS.c.study_id == STUDIES.c.study_id, STUDY_USER_ATTRS.c.key == HASH_ATTR),
    )
    .where(STUDIES.c.study_name == sa.bindparam("name", type_=sa.String), STUDY_USER_ATTRS.c.key.is_(None))
    .limit(1)
)


def _revision(conn: sa.Connection) -> str | None:
    """The version of Optuna's tables, according to its migrations; None if there are no such tables."""
    if not sa.inspect(conn).has_table("alembic_version"):
        return None
    return conn.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


def _wrong_revision(url: sa.URL, revision: str) -> StudyError:
    return StudyError(
        f"{display_url(url)}: its tables are at version {revision}, "
        f"Optuna {optuna.__version__} needs {OPTUNA_REVISION}\n"
        "  fix: run `optuna storage upgrade --storage URL` if they are older; else install the newer Optuna"
    )


def create_schema(url: sa.URL) -> None:
    """Create the missing tables, Optuna's and ours; safe if several processes do so at the same time.

    On SQLite and PostgreSQL it is one transaction: a process that is killed inside leaves nothing half made.
    """
    for left in reversed(range(_TRIES)):
        engine = sa.create_engine(url, **engine_kwargs(url))
        try:
            if url.get_backend_name() == "sqlite":
                _use_wal(engine)
            with engine.connect() as conn, _alone(conn):
                _create_missing(conn, url)
        except sa.exc.DBAPIError:  # a program without our lock creates the same tables
            if not left:
                raise
            time.sleep(0.2)
        else:
            return
        finally:
            engine.dispose()


def bring_up_to_date(url: sa.URL) -> None:
    """Bring tables of an earlier version of hpo up to date; their content stays the same.

    Raises:
        StudyError: This user may not change the tables.
        DatabaseAwayError: The database can't be reached now.
    """
    try:
        with _connection(url) as conn, _alone(conn):
            _add_columns(conn)
            convert_text(conn)
    except (sa.exc.DBAPIError, DatabaseError) as error:
        raise StudyError(
            f"{display_url(url)}: its tables are of an earlier version of hpo, and can't be changed here: "
            f"{first_line(error)}\n"
            "  fix: run `hpo status` once as a user who may change them, where they can be written"
        ) from error


@contextmanager
def _connection(url: sa.URL, pooler: Path | None = None) -> Iterator[sa.Connection]:
    """A connection of a temporary engine, which raises `DatabaseAwayError` if the database is away."""
    engine = sa.create_engine(url, **engine_kwargs(url))
    tell_outages(engine, display_url(url))
    if pooler is not None:
        connect_through(engine, pooler)
    try:
        with engine.connect() as conn:
            yield conn
    finally:
        engine.dispose()


def _use_wal(engine: sa.Engine) -> None:
    """Switch the file to a write-ahead log, a setting that the file keeps."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            with engine.connect() as conn:
                conn.exec_driver_sql("PRAGMA journal_mode=WAL")
        except sa.exc.OperationalError:  # the busy timeout does not apply to this statement
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


@contextmanager
def _alone(conn: sa.Connection) -> Iterator[None]:
    """A transaction that only one process at a time can be in."""
    backend = conn.dialect.name
    if backend == "sqlite":
        conn.exec_driver_sql("BEGIN IMMEDIATE")
    elif backend == "postgresql":
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
    elif not conn.execute(sa.select(sa.func.get_lock("hpo_schema", LOCK_SECONDS))).scalar():
        raise DatabaseAwayError(f"another process has been making the tables for more than {LOCK_SECONDS} s")
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
    _optunas_tables().create_all(conn)
    ledger.metadata.create_all(conn)
    _add_columns(conn)
    convert_text(conn)
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


def _optunas_tables() -> sa.MetaData:
    """Optuna's tables, changed so that SQLite never reuses an id: a worker of a deleted trial may still live."""
    tables = sa.MetaData()
    for table in models.BaseModel.metadata.sorted_tables:
        copy = table.to_metadata(tables)
        if table in (STUDIES, TRIALS):
            copy.dialect_kwargs["sqlite_autoincrement"] = True
    return tables


def _add_columns(conn: sa.Connection) -> None:
    for column in _missing_columns(conn):
        kind = column.type.compile(conn.dialect)
        conn.execute(sa.text(f"ALTER TABLE {AGENTS.name} ADD COLUMN {column.name} {kind}"))


def _missing_columns(conn: sa.Connection) -> list[sa.Column[Any]]:
    """Columns that the table of agents lacks if an earlier version has made it; all of them may be null."""
    # Not by SQLAlchemy's inspection, whose queries to MariaDB bypass `tell_outages`.
    there = set(conn.execute(sa.text(f"SELECT * FROM {AGENTS.name} LIMIT 0")).keys())
    return [column for column in AGENTS.columns if column.name not in there]


def _keep_microseconds(conn: sa.Connection) -> None:
    """Make MySQL store microseconds, as other databases do; its DATETIME has whole seconds only."""
    for column in ("datetime_start", "datetime_complete"):
        conn.execute(sa.text(f"ALTER TABLE trials MODIFY {column} DATETIME(6)"))
