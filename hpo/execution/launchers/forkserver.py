"""Starts the fork server: the process that workers are forked from, which has imported what they need, and nothing
that breaks in a fork.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Final

from hpo.config.spec import StudySpec
from hpo.config.variables import in_environment, token_left_out
from hpo.errors import StudyError
from hpo.execution.launchers.imported_once import environment_of
from hpo.execution.launchers.large_pages import large_pages
from hpo.execution.launchers.safe_path import safe_path
from hpo.execution.limits import death_of
from hpo.execution.messages import REQUESTS
from hpo.search.one_thread import THREADS_VARIABLE
from hpo.signals import held_back
from hpo.trial import mainless

#: Longest path of the folder of temporary files, in bytes: a socket's address needs room for more names after it.
_LONGEST_TMPDIR: Final = 70
#: Signals that all processes of a job or of a terminal get; the supervisor handles them.
_PASSED_BY: Final = (*REQUESTS, signal.SIGINT)


def start_fork_server(spec: StudySpec) -> None:
    """Start the fork server, which imports torch, Optuna and the study's libraries; does not wait for it.

    It ignores signals that all processes of a terminal or of a job get: a Ctrl-C would end its imports with a
    traceback.
    """
    # The first module turns garbage collection off; the last one freezes all objects that exist by then.
    mainless.SERVER.set_forkserver_preload(
        [f"hpo.execution.launchers.{name}" for name in ("uncollected", "deaf", "study_imports", "preload")]
    )
    _make_room_for_sockets()
    variables = {**environment_of(spec), THREADS_VARIABLE: "1"}
    _start_tracker()
    with held_back(_PASSED_BY), large_pages(), safe_path(), in_environment(variables), token_left_out():
        mainless.SERVER.ensure_running()


def not_started(what: str, error: Exception, struck_before: int, then: str) -> StudyError:
    """The error for a process that can't be forked from the fork server, with what is known of the cause.

    Args:
        what: The process, for people.
        error: Raised when it was started.
        struck_before: The value of `oom_kills` before that.
        then: What to do once the cause is fixed.
    """
    code = mainless.server_end()
    if code is None:
        cause = str(error) or type(error).__name__
        fix = "see how many processes and how much memory you may have (`ulimit -a`)"
    else:
        cause = death_of(code, struck_before, who="the fork server, from which it is started,")
        fix = "see what the study's libraries do when they are imported, and whether memory was short"
    return StudyError(f"{what} can't be started: {cause}\n  fix: {fix}; {then}")


def _make_room_for_sockets() -> None:
    """If TMPDIR is too long for multiprocessing's sockets, put these into /tmp, here and in workers."""
    usual = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_TMPDIR:
        return
    tempfile.tempdir = "/tmp"
    try:
        multiprocessing.util.get_temp_dir()  # the folder stays the same from now on, in every child process too
    finally:
        tempfile.tempdir = usual


def _start_tracker() -> None:
    """Start the resource tracker, which cleans up shared memory, so that requests to leave do not end it.

    It ignores SIGTERM by itself, and keeps the other signals blocked for its whole life. Starting it unblocks
    SIGTERM and SIGINT in this process, so this must come before anything that needs them blocked.
    """
    with held_back(REQUESTS), safe_path():
        resource_tracker.ensure_running()


@contextlib.contextmanager
def without_interrupt() -> Iterator[None]:
    """Block Ctrl-C in the block, and so in what is started there; this process gets it after the block."""
    _start_tracker()
    with held_back([signal.SIGINT]):
        yield
