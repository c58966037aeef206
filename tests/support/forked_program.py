"""A Python program, such as the command `hpo`, as a process of its own that has no library left to import.

It is forked from the server that this process's workers are forked from, and its own fork server is a fork of it:
to import torch, once for each of the two, takes seconds of a processor, which are not what a test is about. Where
the start of a program is the point, it is started as one; see `tests.support.commands.start_program`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import importlib
import multiprocessing.process
import multiprocessing.util
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import IO, Final, NoReturn, Self

from hpo.execution.launchers import large_pages, safe_path
from tests.support.owners import forked

_spawn = multiprocessing.util.spawnv_passfds
#: What multiprocessing takes a program's first process for; it has no name, and this module is imported in one.
_First = type(multiprocessing.current_process())


#: How multiprocessing's programs begin.
_SERVER: Final = "from multiprocessing.forkserver import"
_ANEW: Final = "from multiprocessing.spawn import"
#: Lets a program say where each of its threads is.
_SHOW_THREADS: Final = signal.SIGPROF


class ForkedProgram:
    """A program that runs, or has run, with the methods of `subprocess.Popen` that tests use.

    Args:
        words: What follows `python`: `-m` and a module or a script's path, and arguments.
        environment: Its variables in place of this process's.
        terminal: The terminal that it is started on, which is closed here.
        stdin: Its standard input, likewise; without it, and without a terminal, there is nothing to read.

    Attributes:
        pid: Its process, which leads a session of its own.
        stdout: What it prints; nothing where it prints on a terminal.
        stderr: What it says; likewise.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        terminal: Connection | None = None,
        stdin: Connection | None = None,
    ) -> None:
        (out, to_out), (err, to_err) = forked.Pipe(duplex=False), forked.Pipe(duplex=False)
        given = dict(os.environ if environment is None else environment)
        ends = {1: to_out, 2: to_err} if terminal is None else dict.fromkeys((0, 1, 2), terminal)
        ends |= {0: stdin} if stdin is not None else {}
        self._process = forked.Process(target=_run, args=(words, given, str(Path.cwd()), ends), daemon=True)
        self._process.start()
        for end in {to_out, to_err, *ends.values()}:
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout, self.stderr = _opened(out), _opened(err)

    @property
    def returncode(self) -> int | None:
        """Its exit code; less than zero is a signal's number."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; its exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait until it has ended; what it has printed and said since somebody read that.

        Raises:
            subprocess.TimeoutExpired: It had not. It is killed, and a note says where each of its threads was.
        """
        with ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(_rest, stream) for stream in (self.stdout, self.stderr)]
            late = wait(texts, timeout).not_done
            if late:
                self.send_signal(_SHOW_THREADS)
                wait(texts, 1.0)
                self.kill()
            out, err = (text.result() for text in texts)
        if late:
            error = subprocess.TimeoutExpired(self._process.name, timeout or 0.0, out, err)
            error.add_note(err)
            raise error
        self.wait(timeout)
        return out, err

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()


def _opened(pipe: Connection) -> IO[str]:
    with pipe:
        return os.fdopen(os.dup(pipe.fileno()), encoding="utf-8")


def _rest(stream: IO[str]) -> str:
    if stream.closed:
        return ""
    with stream:
        return stream.read()


def _run(
    words: Sequence[str], environment: Mapping[str, str], folder: str, ends: Mapping[int, Connection]
) -> NoReturn:
    """What a new program does, as far as a fork can: with this environment, in this folder, a child of none."""
    os.setsid()
    for number, end in ends.items():
        os.dup2(end.fileno(), number)
    for end in ends.values():
        end.close()
    if os.isatty(1):
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)
    if 0 in ends:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a study's fork server hears no Ctrl-C
    # Imported in its fork server, where the preload is there already, this would switch collections off for good.
    importlib.import_module("hpo.execution.launchers.uncollected")
    # What is there already is not looked through again: finalizers of the fork server's would run at any line.
    gc.freeze()
    gc.enable()
    faulthandler.register(_SHOW_THREADS)
    _forget_the_server()
    multiprocessing.util.spawnv_passfds = _fork_or_spawn
    try:
        if words[0] == "-m":
            sys.argv = [*words[1:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*words]
            sys.path.insert(0, str(Path(words[0]).parent.resolve()))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
    raise SystemExit


def _forget_the_server() -> None:
    """Make multiprocessing take this process for a program's first."""
    for number in (forkserver._forkserver._forkserver_alive_fd, resource_tracker._resource_tracker._fd):
        if number is not None:
            os.close(number)
    forkserver._forkserver.__init__()
    resource_tracker._resource_tracker.__init__()
    multiprocessing.process._current_process = _First()
    multiprocessing.process._parent_process = None


def _fork_or_spawn(path: bytes, words: Sequence[str], passed: Sequence[int]) -> int:
    """Start one of multiprocessing's programs: a fork server as a fork, and what the program itself starts anew.

    What a trial's process starts anew is not a fork: it must not have what that process has by then.
    """
    own = (_SERVER, _ANEW) if os.getsid(0) == os.getpid() else (_SERVER,)
    at = next((at for at, word in enumerate(words) if isinstance(word, str) and word.startswith(own)), None)
    if at is None:
        return _spawn(path, words, passed)
    if pid := os.fork():
        return pid
    code = 1
    try:
        for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for low, high in pairwise([2, *sorted(passed), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]):
            os.closerange(low + 1, high)
        forkserver._forkserver.__init__()
        resource_tracker._resource_tracker.__init__()
        large_pages.forget()
        safe_path.forget()
        sys.argv = ["-c", *words[at + 1 :]]
        exec(words[at], {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        os._exit(code)
