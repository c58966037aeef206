"""Few connections for the many processes of one machine: a pooler between them and PostgreSQL.

PostgreSQL has 100 connections by default, and an agent's workers use theirs for a few milliseconds of each second.
So an agent starts pgbouncer where it is installed, and its processes share two connections, each for one
transaction at a time. Nothing depends on it: where it can't be used, or has died, a process connects to the server
itself.

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

#: Connections that one pooler has to the server at most.
CONNECTIONS: Final = 2
_PORT: Final = 6432  # names the socket; no port of the machine is used
_DATABASE: Final = "study"
_FILE: Final = "pgbouncer.ini"
_LOG: Final = "log"
_START_SECONDS: Final = 5
_LOOK_SECONDS: Final = 0.005
#: User and group who pgbouncer runs as where root starts it, which it refuses; `nobody` by number.
_NOBODY: Final = 65534
#: Folders of temporary files, where TMPDIR is closed to that user.
_PLACES: Final = (Path("/tmp"), Path("/var/tmp"))
#: Parameters of a connection (libpq's) that pgbouncer has settings for, or that make no difference to the server.
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
#: What a process tells the pooler of a connection; all else concerns the server.
_FOR_POOLER: Final = ("application_name", "connect_timeout", "prepare_threshold", "context")
_SETTINGS: Final = {
    "listen_addr": "",
    "listen_port": str(_PORT),
    "pool_mode": "transaction",
    "default_pool_size": str(CONNECTIONS),
    "max_db_connections": str(CONNECTIONS),
    "max_client_conn": "500",
    "server_idle_timeout": "20",
    # Who waits for a server that is away asks again by itself (`hpo.storage.outage`).
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
#: Files of libpq's, what pgbouncer calls them, and where libpq looks for one that is not named.
_TLS_FILES: Final = {
    "sslrootcert": ("server_tls_ca_file", "root.crt"),
    "sslcert": ("server_tls_cert_file", "postgresql.crt"),
    "sslkey": ("server_tls_key_file", "postgresql.key"),
}
#: Engines send them to all processes of a job. The agent takes its time to leave, and needs the database for that;
#: pgbouncer would pause, or end.
_REQUESTS: Final = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


class UnpooledError(Exception):
    """No pooler can stand between these processes and their server; the text says why."""


def pooler_program() -> list[str] | None:
    """How pgbouncer is started where it is installed; it ends with the process, and the thread, that starts it.

    Packages put it where servers are, outside of a person's path. ``setpriv`` is of util-linux.
    """
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
    bound = shutil.which("setpriv")
    return [bound, "--pdeathsig", "KILL", program] if program is not None and bound is not None else None


@contextlib.contextmanager
def running_pooler(program: Sequence[str], engine: sa.Engine) -> Iterator[Path]:
    """Run pgbouncer for the time of the block, or until this process dies.

    Args:
        program: The program, `pooler_program`.
        engine: Connects to the server, which is there.

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
    """Where the folder of its socket can be: root's own temporary files may be closed to who pgbouncer runs as."""
    usual = Path(tempfile.gettempdir())
    if os.geteuid() != 0:
        return usual
    for place in (usual, *_PLACES):
        way = (place, *place.absolute().parents)
        if place.is_dir() and all(each.stat().st_mode & stat.S_IXOTH for each in way):
            return place
    raise UnpooledError(f"the user nobody, who pgbouncer runs as, can't enter {usual}")


def connect_through(engine: sa.Engine, folder: Path) -> None:
    """Let an engine's new connections lead to the pooler in that folder, and to the server where there is none."""

    def connect(
        dialect: sa.Dialect, _record: object, arguments: list[Any], parameters: dict[str, Any]
    ) -> sa.engine.interfaces.DBAPIConnection | None:
        if not _listens(folder):
            return None
        return dialect.connect(*arguments, **_to_pooler(parameters, folder))

    sa.event.listen(engine, "do_connect", connect)


def _to_pooler(parameters: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    kept = {name: parameters[name] for name in _FOR_POOLER if name in parameters}
    # Empty, so that none is taken from the environment.
    return kept | {"host": str(folder), "hostaddr": "", "port": _PORT, "dbname": _DATABASE, "user": "any"}


def _listens(folder: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(folder / f".s.PGSQL.{_PORT}"))
        except OSError:
            return False
    return True


def _settings(connection: "psycopg.Connection[Any]") -> str:
    """pgbouncer's settings for the server at the other end of a connection, with what libpq found in files."""
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
        # Who may open the folder may connect, under the one name that is known to the server.
        "auth_type = any",
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    if not value.isprintable():
        raise UnpooledError("a parameter of the connection has characters that can't be in a line of settings")
    return "'" + value.replace("'", "''") + "'"


def _encryption(connection: "psycopg.Connection[Any]") -> dict[str, str]:
    """Settings for a server that is reached as this connection reaches it, and checked as strictly."""
    if not connection.info.pgconn.ssl_in_use:
        return {"server_tls_sslmode": "disable"}
    given = connection.info.get_parameters()
    mode = given.get("sslmode", "prefer")
    files = {}
    for name, (setting, usual) in _TLS_FILES.items():
        file = Path(given.get(name, Path("~/.postgresql", usual).expanduser()))
        if name in given and not file.is_file():  # as with sslrootcert=system
            raise UnpooledError(f"pgbouncer has no setting for {name}={file}")
        if file.is_file():
            files[setting] = str(file)
    if mode == "require" and "server_tls_ca_file" in files:
        mode = "verify-ca"  # libpq checks by the file then, pgbouncer would not
    return files | {"server_tls_sslmode": "require" if mode in {"allow", "prefer"} else mode}


@contextlib.contextmanager
def _started(program: Sequence[str], folder: Path, settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """pgbouncer, until the end of the block."""
    try:
        process = _start(program, folder, settings)
    except OSError as error:  # root, in a container, may not be allowed to start it as another user
        raise UnpooledError(f"pgbouncer did not start: {error}") from error
    try:
        yield process
    finally:
        process.kill()  # it holds nothing that is to be closed in order
        process.wait()


def _start(program: Sequence[str], folder: Path, settings: str) -> subprocess.Popen[bytes]:
    file = folder / _FILE
    file.touch(mode=0o600)
    file.write_text(f"{settings}unix_socket_dir = {folder}\n")
    ids: dict[str, Any] = {}
    if os.geteuid() == 0:
        ids = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
        for path in (file, folder):
            os.chown(path, _NOBODY, _NOBODY)
    with (folder / _LOG).open("wb") as log, held_back(_REQUESTS):
        return subprocess.Popen(
            [*program, str(file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,  # a Ctrl-Z is for this process alone
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
    """Ask the server something through pgbouncer."""
    import psycopg

    try:
        with psycopg.connect(**_to_pooler({"connect_timeout": _START_SECONDS}, folder)) as through:
            through.execute("SELECT 1")
    except psycopg.Error as error:
        raise UnpooledError(f"pgbouncer can't connect: {first_line(error)}: {_last_words(folder)}") from error


def _last_words(folder: Path) -> str:
    """The last line of pgbouncer's log, without the time and the process."""
    line = (folder / _LOG).read_text(errors="replace").strip().rpartition("\n")[2]
    return line.rpartition("] ")[2]
