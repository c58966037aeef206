"""Keeps forks from using the database connections of the process that they were forked from.

Two processes on one connection mix up each other's statements, and a SQLite connection must not even be closed in
a fork. So a fork starts without connections, and the inherited ones stay unused and open.
"""

import functools
import os
import weakref
from collections.abc import Callable

import sqlalchemy as sa

from hpo.errors import ForkedProcessError

_engines: "weakref.WeakSet[sa.Engine]" = weakref.WeakSet()
_inherited: list[sa.Pool] = []


def keep_from_forks(engine: sa.Engine) -> None:
    """Make every process that is forked from now on open its own connections when it uses this engine."""
    _register()
    _engines.add(engine)


def refuse_forks(engine: sa.Engine, process: Callable[[], int | None]) -> None:
    """Refuse new connections of an engine in forks of the process that may use it.

    Args:
        engine: An engine that was given to `keep_from_forks`.
        process: Returns the id of the only process that may use it now; None for any process.
    """

    def refuse(*_: object) -> None:
        allowed = process()
        if allowed not in {None, os.getpid()}:
            raise ForkedProcessError(
                f"process {os.getpid()} can't use the storage of the trial that process {allowed} runs\n"
                "  fix: let the processes that a study's code forks work on data of their own"
            )

    sa.event.listen(engine, "do_connect", refuse, insert=True)  # before listeners that connect


@functools.cache
def _register() -> None:
    os.register_at_fork(after_in_child=_start_without_connections)


def _start_without_connections() -> None:
    for engine in list(_engines):
        _inherited.append(engine.pool)  # kept, because garbage collection would close its connections
        engine.dispose(close=False)
