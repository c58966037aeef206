"""A connection to a database server that breaks while a transaction is being committed."""

import contextlib
import select
import shutil
import socket
import socketserver
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa


class Losses:
    """Which commit is to be lost: the next one of a transaction in which ``statement`` was sent."""

    def __init__(self) -> None:
        self.statement = b""
        self.arrives = False
        self.count = 0

    def arm(self, statement: str, *, arrives: bool) -> None:
        """Break one connection: before the server gets the commit, or before its answer gets back."""
        self.statement, self.arrives, self.count = statement.encode(), arrives, 0


class _Proxy(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, own: Path, target: Path, losses: Losses) -> None:
        self.target = target
        self.losses = losses
        super().__init__(str(own), _Connection)


class _Connection(socketserver.BaseRequestHandler):
    server: _Proxy

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as upstream, contextlib.suppress(OSError):
            upstream.connect(str(self.server.target))
            self._forward(self.request, upstream)

    def _forward(self, client: socket.socket, upstream: socket.socket) -> None:
        losses, seen, doomed = self.server.losses, False, False
        while True:
            for source in select.select([client, upstream], [], [])[0]:
                data = source.recv(1 << 16)
                if not data or (doomed and source is upstream):
                    return  # both ends are closed
                if source is client and losses.statement:
                    seen = seen or losses.statement in data
                    if seen and b"COMMIT" in data:
                        losses.statement, losses.count, doomed = b"", losses.count + 1, True
                        if not losses.arrives:
                            return
                (upstream if source is client else client).sendall(data)


@contextlib.contextmanager
def lossy(url: str) -> Iterator[tuple[str, Losses]]:
    """The URL of a server's database by way of a proxy, and what it is to lose."""
    parsed = sa.make_url(url)
    folder = Path(tempfile.mkdtemp(prefix="hpo-lossy-"))  # a socket's path is short
    if parsed.get_backend_name() == "postgresql":
        name = f".s.PGSQL.{parsed.query['port']}"
        target, through = Path(str(parsed.query["host"])) / name, {"host": str(folder)}
    else:
        name = "socket"
        target, through = Path(str(parsed.query["unix_socket"])), {"unix_socket": str(folder / name)}
    losses = Losses()
    with _Proxy(folder / name, target, losses) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield parsed.update_query_dict(through).render_as_string(hide_password=False), losses
        finally:
            proxy.shutdown()
            thread.join()
            shutil.rmtree(folder)
