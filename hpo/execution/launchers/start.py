"""Entry point of a worker's process: a supervisor can name it without importing what a worker needs."""

from __future__ import annotations

from multiprocessing.connection import Connection

from hpo.execution.messages import Command, Message, WorkerOrder
from hpo.execution.pulse import Pulse


def work(order: WorkerOrder, channel: Connection[Message, Command], pulse: Pulse) -> None:
    """Run a worker; see `hpo.execution.worker.work`."""
    from hpo.execution.worker import work as run  # the fork server has imported it

    run(order, channel, pulse)
