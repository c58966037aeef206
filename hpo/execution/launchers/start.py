"""Where a worker's process begins: the supervisor names this function, and need not import what a worker does."""

from __future__ import annotations

from multiprocessing.connection import Connection

from hpo.execution.messages import Command, Message, WorkerOrder
from hpo.execution.pulse import Pulse


def work(order: WorkerOrder, channel: Connection[Message, Command], pulse: Pulse) -> None:
    """Run a worker; see `hpo.execution.worker.work`."""
    from hpo.execution.worker import work as run  # the fork server has imported it

    run(order, channel, pulse)
