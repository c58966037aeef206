"""Machines for agents on one: each with a name and a boot of its own, and a network that can be cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

_BOOT = "/proc/sys/kernel/random/boot_id"
_BECOME = f'hostname "$1" && mount --bind "$2" {_BOOT} && shift 2 && exec "$@"'
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="another machine's name and boot need root and unshare",
)


class Machine:
    """A machine, or a container; equal names are no hindrance.

    Args:
        folder: For the file with its boot's id.
        name: Its host name.
        boot: Its boot's id; empty for a container, which has this machine's, and processes of its own.
    """

    def __init__(self, folder: Path, name: str, boot: str) -> None:
        file = folder / f"boot-{boot}"
        file.write_text(f"{boot}\n" if boot else Path(_BOOT).read_text())
        pids = [] if boot else ["--pid", "--fork", "--mount-proc", "--kill-child"]
        self._prefix = ["unshare", "--uts", "--mount", *pids, "sh", "-c", _BECOME, "sh", name, str(file)]

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start the command `hpo` there."""
        return subprocess.Popen(
            [*self._prefix, sys.executable, "-m", "hpo", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


class Network:
    """The way to a database server; nothing gets through while it is cut, and no end hears of that.

    Attributes:
        url: Of the database, this way.
    """

    def __init__(self, url: str, whole: threading.Event) -> None:
        self.url = url
        self._whole = whole

    def cut(self) -> None:
        """Let nothing through."""
        self._whole.clear()

    def mend(self) -> None:
        """Let through what has waited, and what comes."""
        self._whole.set()


class _Proxy(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, own: Path, target: Path, whole: threading.Event) -> None:
        self.target, self.whole = target, whole
        super().__init__(str(own), _Connection)


class _Connection(socketserver.BaseRequestHandler):
    server: _Proxy

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as upstream:
            upstream.connect(str(self.server.target))
            back = threading.Thread(target=self._forward, args=(upstream, self.request), daemon=True)
            back.start()
            self._forward(self.request, upstream)
            back.join()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.server.whole.wait()
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def network(url: str) -> Iterator[Network]:
    """A way of its own to the PostgreSQL server of a database."""
    parsed = sa.make_url(url)
    folder = Path(tempfile.mkdtemp(prefix="hpo-net-"))  # a socket's path is short
    name = f".s.PGSQL.{parsed.query['port']}"
    whole = threading.Event()
    whole.set()
    with _Proxy(folder / name, Path(str(parsed.query["host"])) / name, whole) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            through = parsed.update_query_dict({"host": str(folder)})
            yield Network(through.render_as_string(hide_password=False), whole)
        finally:
            whole.set()
            proxy.shutdown()
            thread.join()
            shutil.rmtree(folder)
