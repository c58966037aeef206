"""Real databases for tests: a SQLite file, and a private PostgreSQL server; a pytest plugin."""

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sqlalchemy as sa

from hpo.storage import open_storage

# Nothing here need survive a power cut.
_SETTINGS = " ".join(
    f"-c {setting}"
    for setting in (
        "fsync=off",
        "full_page_writes=off",
        "synchronous_commit=off",
        "autovacuum=off",
        "jit=off",
        "max_connections=60",
        "shared_buffers=32MB",
    )
)


@dataclass
class PostgresServer:
    """A server of this test session only, reached through a socket in its own folder."""

    folder: Path
    binaries: Path
    _names: Iterator[int] = field(default_factory=itertools.count)
    _ready: str = ""

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@/{database}?host={self.folder}&port=5432"

    def new_database(self, *, ready: bool = False) -> str:
        """URL of a new database: empty, or with the schema (copied, which is faster than creating it)."""
        if ready and not self._ready:
            self._ready = self.new_database()
            open_storage(self._ready, create=True).close()
        name = f"study{next(self._names)}"
        template = sa.make_url(self._ready).database if ready else "template1"
        # Copying files beats logging pages only where the disk need not be waited for: not here.
        self._administer(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY wal_log")
        return self.url(name)

    def _administer(self, statement: str) -> None:
        engine = sa.create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as conn:
                conn.exec_driver_sql(statement)
        finally:
            engine.dispose()


def _postgres_binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3].split(".")[0]))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


def _as_server_user(command: list[str]) -> None:
    """Run as the user ``postgres`` where this process is root, which the server refuses to run as."""
    prefix = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    # Not captured through a pipe: the server would inherit it, and reading would never end.
    with tempfile.TemporaryFile() as log:
        done = subprocess.run(
            prefix + command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd="/", check=False
        )
        if done.returncode:
            log.seek(0)
            pytest.fail(f"{command[0]}: {log.read().decode(errors='replace')}")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    binaries = _postgres_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server programs (initdb) on this machine: apt-get install postgresql")
    # Not under pytest's own folder: that one is closed to other users, and too long for a socket's path.
    folder = Path(tempfile.mkdtemp(prefix="hpo-pg-"))
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres", "postgres")
    data = str(folder / "data")
    options = f"-c listen_addresses='' -k {folder} -p 5432 {_SETTINGS}"
    pg_ctl = [str(binaries / "pg_ctl"), "-D", data]
    try:
        _as_server_user([str(binaries / "initdb"), "-D", data, "-A", "trust", "-U", "postgres", "--no-sync"])
        _as_server_user([*pg_ctl, "-o", options, "-l", str(folder / "log"), "-w", "start"])
        try:
            yield PostgresServer(folder, binaries)
        finally:
            _as_server_user([*pg_ctl, "-m", "immediate", "-w", "stop"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """URL of an empty PostgreSQL database."""
    return postgres_server.new_database()  # never dropped: that takes a checkpoint, and the server goes anyway


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty database, once for each kind of database."""
    name = "sqlite_url" if request.param == "sqlite" else "postgres_url"
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture(scope="session")
def ready_sqlite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with the schema, to copy."""
    file = tmp_path_factory.mktemp("ready") / "study.db"
    open_storage(f"sqlite:///{file}", create=True).close()
    return file


@pytest.fixture(params=["sqlite", "postgresql"])
def ready_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database with the schema and no study, once for each kind of database."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("ready_sqlite_file"), tmp_path / "study.db")
        return f"sqlite:///{tmp_path / 'study.db'}"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.new_database(ready=True)
