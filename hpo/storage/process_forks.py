"""What a fork may not use: the connections of the process that it was forked from.

Two processes on one connection mix up each other's statements, and a SQLite connection must not even be closed in
a fork. So a fork starts without connections, and the inherited ones stay as they are, unused and unclosed.
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
    """Make every process that is forked from now on open connections of its own where it uses this engine."""
    _register()
    _engines.add(engine)


def refuse_forks(engine: sa.Engine, process: Callable[[], int | None]) -> None:
    """Refuse an engine to the forks of a process: they get no connection.

    Args:
        engine: An engine that is kept from forks.
        process: The id of the only process that may use it, now; None for any.
    """

    def refuse(*_: object) -> None:
        allowed = process()
        if allowed not in {None, os.getpid()}:
            raise ForkedProcessError(
                f"process {os.getpid()} can't use the storage of the trial that process {allowed} runs\n"
                "  fix: let the processes that a study's code forks work on data of their own"
            )

    sa.event.listen(engine, "do_connect", refuse, insert=True)  # before what connects


@functools.cache
def _register() -> None:
    os.register_at_fork(after_in_child=_start_without_connections)


def _start_without_connections() -> None:
    for engine in list(_engines):
        _inherited.append(engine.pool)  # kept, for what is collected is closed
        engine.dispose(close=False)
