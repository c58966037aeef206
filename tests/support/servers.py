"""Private database servers in temporary folders, which tests and benchmarks start, stop and break.

Each runs as the unprivileged user of its Debian package and listens on a socket in its own folder only. What has
been committed survives a crash of the server's processes, not one of the machine.
"""

import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from hpo.storage.engines import engine_kwargs
from hpo.storage.opening import open_storage
from tests.support.commands import PATIENCE

_POSTGRES_SETTINGS = {
    "listen_addresses": "''",
    "fsync": "off",
    "full_page_writes": "off",
    "autovacuum": "off",
    "jit": "off",
    "max_connections": "100",
    "shared_buffers": "32MB",
}
_MARIADB_SETTINGS = {
    "skip-networking": "1",
    "skip-log-bin": "1",
    "performance-schema": "off",
    "innodb-flush-log-at-trx-commit": "2",  # each commit reaches the kernel, no disk is waited for
    "innodb-flush-method": "nosync",
    "innodb-buffer-pool-size": "16M",
    "innodb-log-file-size": "8M",
    "aria-pagecache-buffer-size": "1M",
}


class ServerMissingError(Exception):
    """The server's programs are not on this machine; the text says how to get them."""


class DatabaseServer(ABC):
    """A running server of its own.

    Attributes:
        folder: Holds the server's data, socket and log.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names = itertools.count()
        self._ready = ""

    @abstractmethod
    def url(self, database: str) -> str:
        """The URL of one of the server's databases."""

    @abstractmethod
    def start(self) -> None:
        """Start the server, and wait until it answers."""

    @abstractmethod
    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server if it runs, and wait for its end; immediate: as in a crash, closing nothing."""

    def restart(self, *, immediate: bool = False, pause: float = 0.0) -> None:
        """Stop and start the server, which is away for at least ``pause`` seconds."""
        self.stop(immediate=immediate)
        time.sleep(pause)
        self.start()

    @abstractmethod
    def connections(self, database: str) -> list[int]:
        """The server's ids of the open connections to a database."""

    @abstractmethod
    def disconnect(self, connection: int) -> None:
        """End one connection from the server's side; one that has ended already is no error."""

    def new_database(self, *, ready: bool = False) -> str:
        """URL of a new database: empty, or with the schema (copied, which is faster than creating it)."""
        if ready and not self._ready:
            self._ready = "ready"
            self._create(self._ready)
            open_storage(self.url(self._ready), create=True).close()
        name = f"study{next(self._names)}"
        self._create(name, self._ready if ready else "")
        return self.url(name)

    @abstractmethod
    def _create(self, name: str, template: str = "") -> None:
        """Create a database as a copy of another one."""

    def administer(self, *statements: str, database: str) -> list[Any]:
        """Run statements outside of any transaction; the rows of the last one, if it has any."""
        url = sa.make_url(self.url(database))
        engine = sa.create_engine(url, **(engine_kwargs(url) | {"isolation_level": "AUTOCOMMIT"}))
        try:
            with engine.connect() as conn:
                for statement in statements:
                    result = conn.exec_driver_sql(statement)
                return list(result) if result.returns_rows else []
        finally:
            engine.dispose()


class PostgresServer(DatabaseServer):
    """PostgreSQL, of the newest version that is installed."""

    port = 5432  # of the socket in its folder; no port of the machine is used

    def __init__(self, folder: Path, binaries: Path) -> None:
        super().__init__(folder)
        self._pg_ctl = [str(binaries / "pg_ctl"), "-D", str(folder / "data")]
        data = ["-D", str(folder / "data")]
        _run_as("postgres", [str(binaries / "initdb"), *data, "-A", "trust", "-U", "postgres", "--no-sync"])

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@/{database}?host={self.folder}&port={self.port}"

    def start(self) -> None:
        settings = " ".join(f"-c {name}={value}" for name, value in _POSTGRES_SETTINGS.items())
        options = ["-o", f"-k {self.folder} -p {self.port} {settings}", "-l", str(self.folder / "log")]
        _run_as("postgres", [*self._pg_ctl, *options, "-w", "-t", f"{PATIENCE:.0f}", "start"])

    def stop(self, *, immediate: bool = False) -> None:
        if not (self.folder / "data" / "postmaster.pid").exists():
            return
        _run_as("postgres", [*self._pg_ctl, "-m", "immediate" if immediate else "fast", "-w", "stop"])

    def connections(self, database: str) -> list[int]:
        query = f"SELECT pid FROM pg_stat_activity WHERE datname = '{database}'"
        return [row[0] for row in self.administer(query, database="postgres")]

    def disconnect(self, connection: int) -> None:
        self.administer(f"SELECT pg_terminate_backend({connection})", database="postgres")

    def _create(self, name: str, template: str = "") -> None:
        # Copying files beats logging pages only where the disk need not be waited for: not here.
        statement = f"CREATE DATABASE {name} TEMPLATE {template or 'template1'} STRATEGY wal_log"
        self.administer(statement, database="postgres")


class MariaServer(DatabaseServer):
    """MariaDB."""

    def __init__(self, folder: Path, binaries: Path, install: Path) -> None:
        super().__init__(folder)
        user = ["--user=mysql"] if os.geteuid() == 0 else []
        # Servers that start at once delete each other's temporary tables in a common folder.
        data, scratch = f"--datadir={folder / 'data'}", f"--tmpdir={folder}"
        self._command = [
            *(str(binaries / "mariadbd"), "--no-defaults", *user, data, scratch),
            *(f"--socket={folder / 'socket'}", f"--pid-file={folder / 'pid'}"),
            *(f"--{name}={value}" for name, value in _MARIADB_SETTINGS.items()),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._copying: list[str] = []
        options = ["--auth-root-authentication-method=normal", "--skip-test-db", "--innodb-flush-method=nosync"]
        _run_as("mysql", [str(install), "--no-defaults", data, scratch, *options])

    def url(self, database: str) -> str:
        return f"mysql+pymysql://root@localhost/{database}?unix_socket={self.folder / 'socket'}"

    def start(self) -> None:
        # Root's rights are dropped by the server itself: its process is our child, and can be waited for.
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd="/"
            )
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"mariadbd: {(self.folder / 'log').read_text(errors='replace')}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:  # the driver leaves sockets open that found no server
            try:
                probe.connect(str(self.folder / "socket"))
            except OSError:
                return False
        self.administer("SELECT 1", database="mysql")
        return True

    def stop(self, *, immediate: bool = False) -> None:
        if self._process is None:
            return
        if immediate:
            self._process.kill()
        else:
            self._process.terminate()
        self._process.wait()
        self._process = None

    def connections(self, database: str) -> list[int]:
        query = f"SELECT id FROM information_schema.processlist WHERE db = '{database}'"
        return [row[0] for row in self.administer(query, database="mysql")]

    def disconnect(self, connection: int) -> None:
        try:
            self.administer(f"KILL {connection}", database="mysql")
        except sa.exc.OperationalError as error:
            if error.orig is None or error.orig.args[0] != 1094:  # no such connection any more
                raise

    def _create(self, name: str, template: str = "") -> None:
        self.administer(f"CREATE DATABASE {name}", database="mysql")
        if template and not self._copying:
            self._copying = self._statements_that_copy(template)
        if template:
            self.administer("SET foreign_key_checks = 0", *self._copying, database=name)

    def _statements_that_copy(self, template: str) -> list[str]:
        tables = [row[0] for row in self.administer("SHOW TABLES", database=template)]
        created = [self.administer(f"SHOW CREATE TABLE {each}", database=template)[0][1] for each in tables]
        filled = [each for each in tables if self.administer(f"SELECT 1 FROM {each}", database=template)]
        return [*created, *(f"INSERT INTO {each} SELECT * FROM {template}.{each}" for each in filled)]


def _run_as(user: str, command: list[str]) -> None:
    """Run as the server's user where this process is root, which the servers refuse to run as."""
    prefix = ["runuser", "-u", user, "--"] if os.geteuid() == 0 else []
    # Not captured through a pipe: the server would inherit it, and reading would never end.
    with tempfile.TemporaryFile() as log:
        done = subprocess.run(
            prefix + command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd="/", check=False
        )
        if done.returncode:
            log.seek(0)
            raise RuntimeError(f"{command[0]}: {log.read().decode(errors='replace')}")


@contextmanager
def _folder(user: str) -> Iterator[Path]:
    """A folder of the server's user; not under pytest's own: closed to others, and too long for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="hpo-db-"))
    folder.chmod(0o755)  # its socket is for every user, as a package's
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, user, user)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(server: DatabaseServer) -> Iterator[None]:
    server.start()
    try:
        yield
    finally:
        server.stop(immediate=True)


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for the time of the block; ServerMissingError where there are no programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3].split(".")[0]))
    initdb = found[-1] if found else shutil.which("initdb")
    if initdb is None:
        raise ServerMissingError("no PostgreSQL server programs (initdb) here: apt-get install postgresql")
    with _folder("postgres") as folder:
        server = PostgresServer(folder, Path(initdb).resolve().parent)
        with _running(server):
            yield server


@contextmanager
def pooled(server: PostgresServer, url: str, connections: int) -> Iterator[str]:
    """The URL of a server's database through pgbouncer, which pools transactions on so many connections.

    Raises:
        ServerMissingError: pgbouncer is not installed.
    """
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        raise ServerMissingError("no pgbouncer here: apt-get install pgbouncer")
    with _folder("postgres") as folder:
        pool = f"pool_mode = transaction\ndefault_pool_size = {connections}\nmax_client_conn = 500"
        place = f"listen_addr =\nunix_socket_dir = {folder}\nlisten_port = 6432\nauth_type = any"
        files = f"logfile = {folder}/log\npidfile = {folder}/pid"
        database = f"* = host={server.folder} port=5432 user=postgres"
        settings = folder / "pgbouncer.ini"
        settings.write_text(f"[databases]\n{database}\n[pgbouncer]\n{pool}\n{place}\n{files}\n")
        _run_as("postgres", [program, "-d", str(settings)])
        while not (folder / "pid").exists():
            time.sleep(0.02)
        try:
            yield url.replace(str(server.folder), str(folder)).replace("port=5432", "port=6432")
        finally:
            pid = int((folder / "pid").read_text())
            os.kill(pid, signal.SIGTERM)
            while psutil.pid_exists(pid):
                time.sleep(0.02)


@contextmanager
def running_mariadb() -> Iterator[MariaServer]:
    """A MariaDB server for the time of the block; ServerMissingError where there are no programs."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"  # where Debian keeps servers, outside of a user's path
    mariadbd, install = (shutil.which(name, path=path) for name in ("mariadbd", "mariadb-install-db"))
    if mariadbd is None or install is None:
        raise ServerMissingError("no MariaDB server programs (mariadbd) here: apt-get install mariadb-server")
    with _folder("mysql") as folder:
        server = MariaServer(folder, Path(mariadbd).parent, Path(install))
        with _running(server):
            yield server
