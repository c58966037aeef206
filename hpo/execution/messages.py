"""The messages between a supervisor and its workers, and those of a run to its listener."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from hpo.config.spec import StudySpec
from hpo.search.schedulers.scheduler import Scheduler
from hpo.storage.grants import Granted
from hpo.storage.ledger import Lease
from hpo.storage.settling import Settled, Verdict
from hpo.trial.report import TrialReport
from hpo.trial.resources import Slot

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """What the workers of a study do.

    Attributes:
        spec: The study file.
        scheduler: Decides what trials do, and which are taken.
        agent: Id of the workers' agent (`hpo.storage.agents`); 0 if it has none.
        pooler: The folder of the agent's pooler (`hpo.storage.pooler`); None if it has none.
    """

    spec: StudySpec
    scheduler: Scheduler
    agent: int = field(default=0, kw_only=True)
    pooler: Path | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class WorkerOrder(Order):
    """What one worker does.

    Attributes:
        label: The worker's name in the ledger and in logs.
        slot: Its device and threads.
        log: File for what it prints outside of trials.
    """

    label: str
    slot: Slot
    log: Path


@dataclass(frozen=True)
class Ready:
    """A worker has loaded the study's modules and data, and takes trials from now on.

    Attributes:
        left: What loading has left behind in the worker's process (a thread, say), so that it can't be forked for
            trials; None: nothing.
        loading_s: Seconds that loading took.
    """

    left: str | None = None
    loading_s: float = 0.0


@dataclass(frozen=True)
class Started:
    """A worker has taken a trial.

    Attributes:
        number: The trial.
        lease: This attempt at it.
        spent_s: Seconds that its earlier attempts took.
        epochs: Epochs that it had reported before this attempt.
        grants: The scheduler's grants to it, the latest last; empty without a scheduler.
    """

    number: int
    lease: Lease
    spent_s: float = 0.0
    epochs: int = 0
    grants: Sequence[Granted] = ()


@dataclass(frozen=True)
class Extended:
    """A trial whose grant has ended has a new one, and trains on without a pause.

    Attributes:
        number: The trial.
        grants: As in `Started`, with the new grant.
    """

    number: int
    grants: Sequence[Granted]


@dataclass(frozen=True)
class EpochsEnded:
    """A trial has finished epochs.

    Attributes:
        number: The trial.
        first: The first of these epochs, counted from 1.
        values: The study's metric after each of these epochs; None for an epoch without validation.
        max_epochs: Epochs of a trial that trains to its end.
        predicted: The final loss predicted after the last of these epochs; None if nothing predicts it.
        resumed: An earlier attempt finished these epochs, and this one resumes after them.
    """

    number: int
    first: int
    values: tuple[float | None, ...]
    max_epochs: int
    predicted: float | None = None
    resumed: bool = False


@dataclass(frozen=True)
class Failed:
    """A worker can't continue, for a reason that is not one trial's.

    Attributes:
        message: The reason.
        final: The reason holds for every worker that starts here, so the run ends.
    """

    message: str
    final: bool = False


@dataclass(frozen=True)
class Leaving:
    """A worker is about to end.

    Attributes:
        within_s: Seconds after which it is killed if it is still there.
    """

    within_s: float = 30.0


@dataclass(frozen=True)
class Stop:
    """To a worker: requeue the running trial, and leave."""


@dataclass(frozen=True)
class End:
    """To a worker: end the trial that it holds under this lease with a verdict, and take another."""

    lease: Lease
    verdict: Verdict


@dataclass(frozen=True)
class Lost:
    """To a worker: the lease of its trial is lost to another attempt; drop the trial."""

    lease: Lease


@dataclass(frozen=True)
class Warned:
    """A tracker shows nothing of a trial, or has stopped showing it.

    Attributes:
        number: The trial.
        what: What the trial lacks; the same text for all trials.
        why: What happened, in one line.
    """

    number: int
    what: str
    why: str


@dataclass(frozen=True)
class Notice:
    """Something that a person should read.

    Attributes:
        text: One line.
    """

    text: str


@dataclass(frozen=True)
class AgentNews:
    """Something has happened to an agent that an engine has placed.

    Attributes:
        placement: The id of its placement.
        what: ``placed``; ``found`` (an earlier driver placed it); ``waiting`` (for a machine, for a long time);
            ``running``; ``requeued`` by its engine; ``ended`` in order; ``died``; ``lost`` with its machine.
        host: Its machine; empty if it has none yet.
        cause: Why it waits or ended, for people.
        logs: Where its output is, for people; set with ``placed`` and ``found``.
    """

    placement: str
    what: str
    host: str = ""
    cause: str = ""
    logs: str = ""


@dataclass(frozen=True)
class Placed:
    """A run whose agents an engine places, instead of workers on this machine.

    Attributes:
        on: The engine, as the person wrote it.
        fewest: The smallest number of agents while trials wait.
        most: The largest number of agents.
    """

    on: str
    fewest: int
    most: int


@dataclass(frozen=True)
class Tick:
    """Time has passed: a listener that shows it can redraw."""


Message = Ready | Started | Extended | EpochsEnded | Warned | TrialReport | Failed | Leaving
#: What a supervisor says to a worker.
Command = Stop | End | Lost
#: What a run says to its listener.
Heard = Message | Settled | Notice | Tick | AgentNews

#: Signals that ask an agent to leave: SIGTERM from systems and engines, SIGUSR1 as Slurm's warning of a time
#: limit, SIGHUP from a closed terminal. Several of them, from several senders, are one request.
REQUESTS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def send(channel: Connection[Message, Command], message: Message) -> None:
    """Send a message to the supervisor; if that is gone, log the message."""
    try:
        channel.send(message)
    except OSError:
        logger.warning("the supervisor is gone; it did not receive %r", message)


def received(channel: Connection[Command, Message]) -> Iterator[Message]:
    """The messages that a worker has sent so far; ends early if it closed the channel or died amid a message."""
    with contextlib.suppress(EOFError, OSError):
        while channel.poll():
            yield channel.recv()
