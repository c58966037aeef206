"""The connections of an agent and its workers to a server that has few."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from hpo.storage.pooler import CONNECTIONS, UnpooledError, pooler_program, running_pooler
from hpo.storage.study_storage import StudyStorage


@contextlib.contextmanager
def sharing_connections(storage: StudyStorage, workers: int, say: Callable[[str], None]) -> Iterator[None]:
    """Let this process and its workers share two connections for the time of the block, where they can.

    They can where the database is PostgreSQL's and pgbouncer is installed. A process and one worker have no more
    than two without it.

    Args:
        storage: The study's. Workers do as it does (`hpo.execution.messages.Order`).
        workers: How many workers there are.
        say: Called with why pgbouncer is installed and can't be used.
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
