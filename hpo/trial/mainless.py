"""Processes of our own that leave the script which starts them alone."""

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

#: What our processes are forked from. A program has a fork server of its own beside it: that may have been started
#: before, without what ours imports.
SERVER: Final = ForkServer()

#: The environment variables that this process has had when it started others; what is none now was removed.
_seen: set[str] = set()


class MainlessProcess(ForkServerProcess):
    """A process that does not run the parent's ``__main__`` once more.

    Python does that for the sake of what is pickled by its name there. Workers are sent nothing of the kind, and a
    script that starts a study on its top level would start it again in each worker.

    It has the environment of the process that starts it, which may have changed since the fork server began, but
    for the token of a dashboard.
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
    """The context of our fork server with such processes."""

    Process = MainlessProcess


class LoneProcess(SpawnProcess):
    """Such a process that is started anew, and needs no fork server; it does not have the token either."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802 - multiprocessing's name
        with _without_main(), token_left_out():
            return SpawnProcess._Popen(process_obj)  # noqa: SLF001


class LoneContext(SpawnContext):
    """The context of processes that are started anew: nothing of them stays when they have ended."""

    Process = LoneProcess


def server_end(patience: float = 1.0) -> int | None:
    """How our fork server has ended, as `multiprocessing.Process.exitcode` says it; None where it lives.

    Args:
        patience: Seconds for it to end: its pipes are closed before that.
    """
    pid, until = SERVER._forkserver_pid, time.monotonic() + patience  # type: ignore[attr-defined] # noqa: SLF001
    while pid is not None:
        try:
            # It stays to be waited for: multiprocessing does so when it starts the next one.
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
    """Have Python not wait for a process when this one exits; it would do so without end."""
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined] # noqa: SLF001


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Without a file and a spec there is nothing to run."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _at_our_server() -> Iterator[None]:
    """What is started inside is forked from our server: multiprocessing knows one by itself."""
    usual = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = SERVER.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = usual
