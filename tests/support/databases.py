"""Real databases for tests: a SQLite file, private PostgreSQL and MariaDB servers; a pytest plugin."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpo.storage.opening import open_storage
from tests.support.servers import (
    DatabaseServer,
    MariaServer,
    PostgresServer,
    ServerMissingError,
    running_mariadb,
    running_postgres,
)

KINDS = ("sqlite", "postgresql", "mariadb")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A server of this test process only."""
    try:
        with running_postgres() as server:
            yield server
    except ServerMissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariaServer]:
    """A server of this test process only."""
    try:
        with running_mariadb() as server:
            yield server
    except ServerMissingError as error:
        pytest.skip(str(error))


def server_of(kind: str, request: pytest.FixtureRequest) -> DatabaseServer:
    """The server of a kind of database; started when the first test asks for it."""
    server: DatabaseServer = request.getfixturevalue({"postgresql": "postgres_server"}.get(kind, "mariadb_server"))
    return server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """URL of an empty PostgreSQL database."""
    return postgres_server.new_database()  # never dropped: that takes a checkpoint, and the server goes anyway


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty database, once for each kind of database."""
    if request.param == "sqlite":
        url: str = request.getfixturevalue("sqlite_url")
        return url
    return server_of(request.param, request).new_database()


@pytest.fixture(scope="session")
def ready_sqlite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with the schema, to copy."""
    file = tmp_path_factory.mktemp("ready") / "study.db"
    open_storage(f"sqlite:///{file}", create=True).close()
    return file


@pytest.fixture(params=KINDS)
def ready_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database with the schema and no study, once for each kind of database."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("ready_sqlite_file"), tmp_path / "study.db")
        return f"sqlite:///{tmp_path / 'study.db'}"
    return server_of(request.param, request).new_database(ready=True)
