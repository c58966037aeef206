"""Lets an agent and its workers share a few connections to the database server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from hpo.storage.pooler import CONNECTIONS, UnpooledError, pooler_program, running_pooler
from hpo.storage.study_storage import StudyStorage


@contextlib.contextmanager
def sharing_connections(storage: StudyStorage, workers: int, say: Callable[[str], None]) -> Iterator[None]:
    """Let this process and its workers share two connections during the block, if possible.

    This needs a PostgreSQL database and pgbouncer. It is not done for a single worker, which has no more than two
    connections with this process anyway.

    Args:
        storage: The study's. Workers connect in the same way (`hpo.execution.messages.Order`).
        workers: How many workers there are.
        say: Called with the reason if pgbouncer is installed but can't be used.
    """
    with contextlib.ExitStack() as stack:
        program = pooler_program()
        if program is not None and workers >= CONNECTIONS and storage.engine.dialect.name == "postgresql":
            try:
                pooler = stack.enter_context(running_pooler(program, storage.engine))
            except UnpooledError as error:
                say(f"each worker has a connection of its own to the database: {error}")
            else:
                storage.connect_through(pooler)
        yield
