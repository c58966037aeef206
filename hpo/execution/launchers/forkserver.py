"""The process that workers are forked from: it has imported what they need, and nothing that breaks in a fork."""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any, Final

from hpo.config.schema import FREE_SECTIONS
from hpo.config.spec import StudySpec
from hpo.execution.launchers.large_pages import large_pages
from hpo.execution.messages import REQUESTS
from hpo.search.one_thread import THREADS_VARIABLE

#: Libraries known to start no thread, no CUDA and no connection when they are imported. What a study imports of
#: them is imported once, ahead of the workers; any other library each worker imports by itself.
FORKABLE: Final = frozenset({"pytorch_optimizer", "schedulefree", "scipy", "sklearn"})

#: Bytes of the folder of temporary files that leave room in a socket's address for the names of its own.
_LONGEST_TMPDIR: Final = 70


def start_fork_server(spec: StudySpec) -> None:
    """Start importing torch, Optuna and the study's libraries in the fork server; does not wait.

    Signals meant for all processes of a terminal, or of a job, pass it by: the supervisor answers them.
    """
    context = multiprocessing.get_context("forkserver")
    # The first one stops collections, and the last one freezes what has been imported until then.
    first, last = "hpo.execution.launchers.uncollected", "hpo.execution.launchers.preload"
    context.set_forkserver_preload([first, *sorted(forkable_imports(spec)), last])
    _make_room_for_sockets()
    with ignored(*REQUESTS), large_pages(), _in_environment(THREADS_VARIABLE, "1"):
        forkserver.ensure_running()


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


def forkable_imports(spec: StudySpec) -> set[str]:
    """The modules of forkable libraries that the study's code imports or its targets name; nothing is run."""
    found = set(_target_roots([getattr(spec.config, section) for section in FREE_SECTIONS]))
    found |= set(_target_roots(spec.base_config()["search_space"]))
    for file in spec.folder.glob("*.py"):
        with contextlib.suppress(SyntaxError, UnicodeDecodeError, OSError):  # said when the study is checked
            found |= set(_imported(ast.parse(file.read_bytes())))
    return {name for name in found if name.partition(".")[0] in FORKABLE}


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _target_roots(node: Any) -> Iterator[str]:
    """First parts of all texts that look like import paths."""
    if isinstance(node, str) and "." in node:
        yield node.partition(".")[0]
    elif isinstance(node, dict):
        for value in node.values():
            yield from _target_roots(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _target_roots(value)


@contextlib.contextmanager
def ignored(*numbers: signal.Signals) -> Iterator[None]:
    """Signals that a process started inside ignores from its first instant."""
    kept = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def without_interrupt() -> Iterator[None]:
    """What is started inside hears no Ctrl-C; one that comes meanwhile is heard here afterwards."""
    # Its start would let the signal through again.
    with ignored(*REQUESTS):
        resource_tracker.ensure_running()
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


@contextlib.contextmanager
def _in_environment(name: str, value: str) -> Iterator[None]:
    """A variable that a process started inside inherits."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
