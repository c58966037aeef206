"""Runs a pooler (pgbouncer), so that the many processes of an agent need few connections to PostgreSQL.

PostgreSQL allows 100 connections by default, and an agent's workers use theirs for a few milliseconds per second.
So an agent starts pgbouncer if it is installed, and its processes share two connections, each for one transaction
at a time. Nothing depends on it: if it can't be used, or has died, a process connects to the server itself.

Sources: pgbouncer's documentation of its settings; libpq's of connection parameters.
"""

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import sqlalchemy as sa

from hpo.signals import held_back
from hpo.storage.engines import CONNECT_SECONDS, PROBE_SECONDS, SILENCE_SECONDS, session_limits
from hpo.storage.outage import first_line

if TYPE_CHECKING:
    import psycopg

#: The most connections of one pooler to the server.
CONNECTIONS: Final = 2
_PORT: Final = 6432  # only names the socket file; no port of the machine is used
_DATABASE: Final = "study"
_FILE: Final = "pgbouncer.ini"
_LOG: Final = "log"
_START_SECONDS: Final = 5
_LOOK_SECONDS: Final = 0.005
#: Id of an unprivileged user and group; as them pgbouncer runs if root starts it, as it refuses to run as root.
_UNPRIVILEGED: Final = 65534
#: Folders for temporary files, if that user can't enter TMPDIR.
_PLACES: Final = (Path("/tmp"), Path("/var/tmp"))
#: Connection parameters (of libpq) that pgbouncer has settings for, or that make no difference to the server.
_UNDERSTOOD: Final = frozenset(
    {
        "application_name",
        "client_encoding",
        "connect_timeout",
        "dbname",
        "host",
        "hostaddr",
        "keepalives",
        "keepalives_count",
    }
    | {"keepalives_idle", "keepalives_interval", "passfile", "password", "port", "service"}
    | {"sslcert", "sslcertmode", "sslkey", "sslmode", "sslrootcert", "tcp_user_timeout", "user"}
)
#: Connection parameters that a process also uses towards the pooler; all others concern the server.
_FOR_POOLER: Final = ("application_name", "connect_timeout", "prepare_threshold", "context")
_SETTINGS: Final = {
    "listen_addr": "",
    "listen_port": str(_PORT),
    "pool_mode": "transaction",
    "default_pool_size": str(CONNECTIONS),
    "max_db_connections": str(CONNECTIONS),
    "max_client_conn": "500",
    "server_idle_timeout": "20",
    # Short times: clients that wait for a server that is away try again by themselves (`hpo.storage.outage`).
    "server_login_retry": "1",
    "server_connect_timeout": str(CONNECT_SECONDS),
    "query_wait_timeout": "5",
    "tcp_keepidle": str(PROBE_SECONDS),
    "tcp_keepintvl": str(PROBE_SECONDS),
    "tcp_user_timeout": str(SILENCE_SECONDS * 1000),
    "log_connections": "0",
    "log_disconnections": "0",
    "log_stats": "0",
}
#: By libpq's parameter for a file: pgbouncer's setting for it, and the file that libpq uses if none is named.
_TLS_FILES: Final = {
    "sslrootcert": ("server_tls_ca_file", "root.crt"),
    "sslcert": ("server_tls_cert_file", "postgresql.crt"),
    "sslkey": ("server_tls_key_file", "postgresql.key"),
}
#: Signals that engines send to all processes of a job, blocked for pgbouncer, which would pause or end: the agent
#: needs some time to leave, and the database for that.
_REQUESTS: Final = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


class UnpooledError(Exception):
    """No pooler can be used between these processes and their server; the text says why."""


def pooler_program() -> list[str] | None:
    """The command that starts pgbouncer; None if it is not installed.

    pgbouncer ends with the process and the thread that start it, which ``setpriv`` (of util-linux) sees to.
    Packages install it in a folder for servers, which is not in a person's PATH.
    """
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
    bound = shutil.which("setpriv")
    return [bound, "--pdeathsig", "KILL", program] if program is not None and bound is not None else None


@contextlib.contextmanager
def running_pooler(program: Sequence[str], engine: sa.Engine) -> Iterator[Path]:
    """Run pgbouncer during the block, or until this process dies.

    Args:
        program: The command, see `pooler_program`.
        engine: Connects to the server, which must be reachable.

    Yields:
        The folder of its socket, for `connect_through`.

    Raises:
        UnpooledError: pgbouncer does not start, or can't connect as the engine does.
    """
    host = engine.dialect.create_connect_args(engine.url)[1].get("host", os.environ.get("PGHOST", ""))
    if "," in host:
        raise UnpooledError(f"pgbouncer would know only one of the hosts {host}")
    with engine.connect() as conn:
        settings = _settings(cast("psycopg.Connection[Any]", conn.connection.dbapi_connection))
    with tempfile.TemporaryDirectory(prefix="hpo-pool-", dir=_place()) as name:
        folder = Path(name)
        with _started(program, folder, settings) as process:
            try:
                _wait_for(process, folder)
                _try(folder)
            finally:
                (folder / _FILE).unlink()  # it may hold a password
            yield folder


def _place() -> Path:
    """Where the socket's folder can be made: an unprivileged user may not be able to enter root's own folder."""
    usual = Path(tempfile.gettempdir())
    if os.geteuid() != 0:
        return usual
    for place in (usual, *_PLACES):
        way = (place, *place.absolute().parents)
        if place.is_dir() and all(each.stat().st_mode & stat.S_IXOTH for each in way):
            return place
    raise UnpooledError(f"the user nobody, who pgbouncer runs as, can't enter {usual}")


def connect_through(engine: sa.Engine, folder: Path) -> None:
    """Make an engine's new connections go to the pooler in ``folder``, or to the server if none runs there."""

    def connect(
        dialect: sa.Dialect, _record: object, arguments: list[Any], parameters: dict[str, Any]
    ) -> sa.engine.interfaces.DBAPIConnection | None:
        if not _listens(folder):
            return None
        return dialect.connect(*arguments, **_to_pooler(parameters, folder))

    sa.event.listen(engine, "do_connect", connect)


def _to_pooler(parameters: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    kept = {name: parameters[name] for name in _FOR_POOLER if name in parameters}
    # hostaddr is empty so that none is taken from the environment.
    return kept | {"host": str(folder), "hostaddr": "", "port": _PORT, "dbname": _DATABASE, "user": "any"}


def _listens(folder: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(folder / f".s.PGSQL.{_PORT}"))
        except OSError:
            return False
    return True


def _settings(connection: "psycopg.Connection[Any]") -> str:
    """pgbouncer's settings to connect as this connection does, including what libpq has read from files."""
    info = connection.info
    given = info.get_parameters()
    if unknown := sorted(set(given) - _UNDERSTOOD):
        raise UnpooledError(f"pgbouncer has no setting for {', '.join(unknown)}")
    server = {"host": info.host, "port": str(info.port), "dbname": info.dbname, "user": info.user}
    if info.password:
        server["password"] = info.password
    server["connect_query"] = session_limits()
    lines = [
        "[databases]",
        f"{_DATABASE} = " + " ".join(f"{name}={_quoted(value)}" for name, value in server.items()),
        "[pgbouncer]",
        *(f"{name} = {value}" for name, value in (_SETTINGS | _encryption(connection)).items()),
        # Everyone who may open the folder may connect; the server sees the one user of `server`.
        "auth_type = any",
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    if not value.isprintable():
        raise UnpooledError("a parameter of the connection has characters that can't be in a line of settings")
    return "'" + value.replace("'", "''") + "'"


def _encryption(connection: "psycopg.Connection[Any]") -> dict[str, str]:
    """Settings with which the server is reached as by this connection, and its certificate checked as strictly."""
    if not connection.info.pgconn.ssl_in_use:
        return {"server_tls_sslmode": "disable"}
    given = connection.info.get_parameters()
    mode = given.get("sslmode", "prefer")
    files = {}
    for name, (setting, usual) in _TLS_FILES.items():
        file = Path(given.get(name, Path("~/.postgresql", usual).expanduser()))
        if name in given and not file.is_file():  # such as sslrootcert=system
            raise UnpooledError(f"pgbouncer has no setting for {name}={file}")
        if file.is_file():
            files[setting] = str(file)
    if mode == "require" and "server_tls_ca_file" in files:
        mode = "verify-ca"  # with such a file libpq checks the certificate; pgbouncer would not
    return files | {"server_tls_sslmode": "require" if mode in {"allow", "prefer"} else mode}


@contextlib.contextmanager
def _started(program: Sequence[str], folder: Path, settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run pgbouncer during the block."""
    try:
        process = _start(program, folder, settings)
    except OSError as error:  # root, in a container, may not be allowed to start it as another user
        raise UnpooledError(f"pgbouncer did not start: {error}") from error
    try:
        yield process
    finally:
        process.kill()  # it holds nothing that needs an orderly end
        process.wait()


def _start(program: Sequence[str], folder: Path, settings: str) -> subprocess.Popen[bytes]:
    file = folder / _FILE
    file.touch(mode=0o600)
    file.write_text(f"{settings}unix_socket_dir = {folder}\n")
    ids: dict[str, Any] = {}
    if os.geteuid() == 0:
        ids = {"user": _UNPRIVILEGED, "group": _UNPRIVILEGED, "extra_groups": []}
        for path in (file, folder):
            os.chown(path, _UNPRIVILEGED, _UNPRIVILEGED)
    with (folder / _LOG).open("wb") as log, held_back(_REQUESTS):
        return subprocess.Popen(
            [*program, str(file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,  # so that a Ctrl-Z does not stop pgbouncer
            **ids,
        )


def _wait_for(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until pgbouncer listens."""
    deadline = time.monotonic() + _START_SECONDS
    while not _listens(folder):
        if process.poll() is not None or time.monotonic() > deadline:
            raise UnpooledError(f"pgbouncer did not start: {_last_words(folder)}")
        time.sleep(_LOOK_SECONDS)


def _try(folder: Path) -> None:
    """Check with a query that pgbouncer can connect to the server."""
    import psycopg

    try:
        with psycopg.connect(**_to_pooler({"connect_timeout": _START_SECONDS}, folder)) as through:
            through.execute("SELECT 1")
    except psycopg.Error as error:
        raise UnpooledError(f"pgbouncer can't connect: {first_line(error)}: {_last_words(folder)}") from error


def _last_words(folder: Path) -> str:
    """The last line of pgbouncer's log, without its time and process id."""
    line = (folder / _LOG).read_text(errors="replace").strip().rpartition("\n")[2]
    return line.rpartition("] ")[2]
