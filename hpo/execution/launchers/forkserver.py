"""The process that workers are forked from: it has imported what they need, and nothing that breaks in a fork."""

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

#: Bytes of the folder of temporary files that leave room in a socket's address for the names of its own.
_LONGEST_TMPDIR: Final = 70
#: Signals that all processes of a job, or of a terminal, get: the supervisor answers them.
_PASSED_BY: Final = (*REQUESTS, signal.SIGINT)


def start_fork_server(spec: StudySpec) -> None:
    """Start importing torch, Optuna and the study's libraries in the fork server; does not wait.

    Signals meant for all processes of a terminal, or of a job, pass it by. A Ctrl-C would end its imports with a
    traceback.
    """
    # The first one stops collections, and the last one freezes what has been imported until then.
    mainless.SERVER.set_forkserver_preload(
        [f"hpo.execution.launchers.{name}" for name in ("uncollected", "deaf", "study_imports", "preload")]
    )
    _make_room_for_sockets()
    variables = {**environment_of(spec), THREADS_VARIABLE: "1"}
    _start_tracker()
    with held_back(_PASSED_BY), large_pages(), safe_path(), in_environment(variables), token_left_out():
        mainless.SERVER.ensure_running()


def not_started(what: str, error: Exception, struck_before: int, then: str) -> StudyError:
    """The error where a process can't be forked from the fork server, with what is known of the cause.

    Args:
        what: The process, for people.
        error: Raised at its start.
        struck_before: `oom_kills` before that.
        then: What to do once the cause is mended.
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
    """Where TMPDIR is too long for the sockets of multiprocessing, here and in workers, let them lie in /tmp."""
    usual = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_TMPDIR:
        return
    tempfile.tempdir = "/tmp"
    try:
        multiprocessing.util.get_temp_dir()  # it stays, and is handed on to every process
    finally:
        tempfile.tempdir = usual


def _start_tracker() -> None:
    """Start what cleans up shared memory, which passes requests to leave by as well: it ignores SIGTERM by itself.

    The others it has blocked for its whole life. Its start lets SIGTERM and SIGINT through again here, and so
    comes before what is to have them blocked, too.
    """
    with held_back(REQUESTS), safe_path():
        resource_tracker.ensure_running()


@contextlib.contextmanager
def without_interrupt() -> Iterator[None]:
    """What is started inside hears no Ctrl-C; one that comes meanwhile is heard here afterwards."""
    _start_tracker()
    with held_back([signal.SIGINT]):
        yield
