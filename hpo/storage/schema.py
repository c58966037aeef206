"""The tables of a database: Optuna's and ours, made where they are missing."""

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

#: The head of Optuna 5.0's migrations. Asking Optuna for it loads every migration script.
OPTUNA_REVISION: Final = "v3.2.0.a"

_TRIES: Final = 3
_LOCK: Final = 0x68706F  # "hpo"; any number that no other program of the database uses


class Tables(Enum):
    """What a database has of the tables: Optuna's, at our version of them, and ours."""

    MISSING = "it lacks some, or all"
    OUTDATED = "it has those of an earlier version of hpo"
    PRESENT = "it has all of them"


def tables_of(url: sa.URL, pooler: Path | None = None) -> Tables:
    """What the database has of the tables.

    Args:
        url: The database's.
        pooler: The folder of a pooler to connect through (`hpo.storage.pooler`); None for none.

    Raises:
        StudyError: Optuna's tables are of another version.
        DatabaseAwayError: It can't be reached, or not now.
    """
    with _connection(url, pooler) as conn:
        if not sa.inspect(conn).has_table(CHANGES.name):  # the youngest of our tables
            return Tables.MISSING
        revision = _revision(conn)
        is_outdated = bool(_missing_columns(conn) or tables_of_other_text(conn))
    if revision is not None and revision != OPTUNA_REVISION:
        raise _wrong_revision(url, revision)
    if revision is None:
        return Tables.MISSING
    return Tables.OUTDATED if is_outdated else Tables.PRESENT


class PlainStudyError(StudyError):
    """The database has a study of that name which Optuna alone has made, and no tables of ours."""


def refuse_plain_study(url: sa.URL, name: str) -> None:
    """Refuse to add our tables to a database for a study that is there already, as another program's.

    Raises:
        PlainStudyError: It is there, and has trials.
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
    """The version that Optuna's migrations have brought the tables to; None where there are none."""
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
    """Create what is missing of Optuna's tables and the ledger; safe when several processes do it together.

    On SQLite and PostgreSQL it is one transaction: a process killed inside leaves nothing half made.
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
    """Bring tables of an earlier version of ours to what they are today; nothing that is stored changes.

    Raises:
        StudyError: This user may not change the tables.
        DatabaseAwayError: It can't be reached now.
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
    """A connection by an engine of its own; what says that the database is away is a `DatabaseAwayError`."""
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
    """Switch the file to a write-ahead log, which it keeps from then on."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            with engine.connect() as conn:
                conn.exec_driver_sql("PRAGMA journal_mode=WAL")
        except sa.exc.OperationalError:  # the switch is one of the few things that the busy timeout skips
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


@contextmanager
def _alone(conn: sa.Connection) -> Iterator[None]:
    """A transaction that one process at a time is in."""
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
    """Optuna's tables, which on SQLite give no id out again: a worker of a deleted trial may still live."""
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
    """Columns that the agents' table of an earlier version is without; all of them may be null."""
    # What SQLAlchemy's inspection asks of MariaDB passes over `tell_outages`.
    there = set(conn.execute(sa.text(f"SELECT * FROM {AGENTS.name} LIMIT 0")).keys())
    return [column for column in AGENTS.columns if column.name not in there]


def _keep_microseconds(conn: sa.Connection) -> None:
    """MySQL's DATETIME has whole seconds only, where every other database keeps what Optuna stores."""
    for column in ("datetime_start", "datetime_complete"):
        conn.execute(sa.text(f"ALTER TABLE trials MODIFY {column} DATETIME(6)"))
