"""Starts processes that do not run the parent's ``__main__`` again, from a fork server of hpo's own."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from multiprocessing.forkserver import ForkServer
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Final

from hpo.config.variables import TOKEN_ENV, token_left_out, without_token
from hpo.search.one_thread import THREADS_VARIABLE

#: The fork server of hpo's processes. The program's own fork server, if any, is separate: it may have been started
#: earlier, without the modules that this one imports.
SERVER: Final = ForkServer()

#: Environment variables that this process had whenever it started others; those missing now were removed since.
_seen: set[str] = set()


class MainlessProcess(ForkServerProcess):
    """A process that does not run the parent's ``__main__`` again.

    Python does so for objects that are pickled by their name in ``__main__``. Workers get no such objects, and a
    script that starts a study at its top level would start it again in each worker.

    The process has the environment of the process that starts it (not of the fork server, which may be older),
    without the token of a dashboard.
    """

    def start(self) -> None:
        """As of `multiprocessing.Process`."""
        kept = without_token(os.environ)
        self._environment = {name: text for name, text in kept.items() if name != THREADS_VARIABLE}
        _seen.update(self._environment)
        self._removed = {TOKEN_ENV, *_seen} - self._environment.keys()
        super().start()

    def run(self) -> None:
        """As of `multiprocessing.Process`."""
        for name in self._removed:
            os.environ.pop(name, None)
        os.environ.update(self._environment)
        super().run()

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802 - multiprocessing's name
        with _without_main(), _at_our_server():
            return ForkServerProcess._Popen(process_obj)  # noqa: SLF001


class MainlessContext(ForkServerContext):
    """The multiprocessing context that starts `MainlessProcess` from hpo's fork server."""

    Process = MainlessProcess


class LoneProcess(SpawnProcess):
    """Like `MainlessProcess`, but spawned without a fork server; it does not have the token either."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802 - multiprocessing's name
        with _without_main(), token_left_out():
            return SpawnProcess._Popen(process_obj)  # noqa: SLF001


class LoneContext(SpawnContext):
    """The multiprocessing context that spawns `LoneProcess`; no helper process stays when they have ended."""

    Process = LoneProcess


def server_end(patience: float = 1.0) -> int | None:
    """The exit code of hpo's fork server, as in `multiprocessing.Process.exitcode`; None while it lives.

    Args:
        patience: Seconds to wait for its end, since its pipes close before it ends.
    """
    pid, until = SERVER._forkserver_pid, time.monotonic() + patience  # type: ignore[attr-defined] # noqa: SLF001
    while pid is not None:
        try:
            # WNOWAIT leaves it to be reaped by multiprocessing, which does so when it starts the next one.
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        if end is not None:
            return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        if time.monotonic() > until:
            return None
        time.sleep(0.01)
    return None


def leave_alone(process: BaseProcess) -> None:
    """Make Python not wait for a process when this one exits; it might wait forever."""
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined] # noqa: SLF001


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide ``__main__`` inside the block: a module without a file and a spec is not run again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _at_our_server() -> Iterator[None]:
    """Make processes that are started inside the block fork from hpo's server, not from multiprocessing's own."""
    usual = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = SERVER.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = usual
