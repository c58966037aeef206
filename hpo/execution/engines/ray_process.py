"""What Ray runs on a node for hpo: an actor with one process of hpo as its child.

The class is sent to the cluster by value, so this module imports nothing of hpo. On a node without hpo, the output
of the process says so.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

#: Seconds after which an actor leaves if no driver has called `start`: its driver died before that.
_UNWANTED: Final = 120.0
#: Variables that the process does not get: Ray's debugger, and a dashboard's token
#: (`hpo.config.variables.TOKEN_ENV`).
_LEFT_OUT: Final = ("PYTHONBREAKPOINT", "HPO_DASHBOARD_TOKEN")
#: Seconds for which an actor stays after its process has ended, so that drivers learn about it.
_HEARD: Final = 10.0


class HpoProcess:
    """An actor that runs one process of hpo on its node, and leaves after it.

    The process's standard input is a pipe that closes when the actor dies: then an agent requeues its trials and
    leaves. What the process prints goes into a file.

    Args:
        arguments: The arguments of ``python -m hpo``.
        environment: Environment variables that are not secret, because Ray stores them with the actor.
        log: The file for the output; made with its folder if it does not exist.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._arguments = arguments
        self._environment = dict(environment)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._unwanted = threading.Timer(_UNWANTED, os._exit, (0,))
        self._unwanted.daemon = True
        self._unwanted.start()

    async def start(self, secrets: Mapping[str, str]) -> tuple[str, str]:
        """Start the process, if it has not been started.

        Args:
            secrets: More environment variables. They come with this call because Ray neither stores nor shows it.

        Returns:
            The names of the machine and of Ray's node.
        """
        import ray

        if self._process is None:
            self._unwanted.cancel()
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._process = self._started({**self._environment, **secrets}, log)
            self._end = asyncio.ensure_future(asyncio.to_thread(self._process.wait))
            self._leaving = asyncio.ensure_future(self._leave())
        return socket.gethostname(), ray.get_runtime_context().get_node_id()

    async def ended(self) -> int:
        """Wait for the end of the process; returns its exit code."""
        return await asyncio.shield(self._end)

    async def drain(self) -> None:
        """Ask the process to leave."""
        if self._process is not None:
            self._process.terminate()

    def _started(self, environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        kept = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
        # -P: import nothing from the working folder, which may be the study's.
        # A session of its own: Ray may end an actor with its process group, but workers must requeue their trials.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "hpo", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**kept, **environment},
        )

    async def _leave(self) -> None:
        import ray

        await asyncio.shield(self._end)
        await asyncio.sleep(_HEARD)
        ray.kill(ray.get_runtime_context().current_actor)
