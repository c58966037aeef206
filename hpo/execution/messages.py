"""What a supervisor and its workers send each other, and what a run says to its listener."""

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
from hpo.storage.recovery import Settled, Verdict
from hpo.trial.report import TrialReport
from hpo.trial.resources import Slot

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """What the workers of a study are to do.

    Attributes:
        spec: The study file.
        scheduler: Decides what trials do, and which are taken.
        agent: Id of the agent that they are workers of (`hpo.storage.agents`); 0 where it has none.
        pooler: The folder of the agent's pooler (`hpo.storage.pooler`); None where it has none.
    """

    spec: StudySpec
    scheduler: Scheduler
    agent: int = field(default=0, kw_only=True)
    pooler: Path | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class WorkerOrder(Order):
    """What one worker is to do.

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
    """A worker has loaded the study's modules and data, and takes trials from here on.

    Attributes:
        left: What loading them has left in its process, which can't be forked for trials then; None: nothing.
        loading_s: Seconds that loading them took.
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
        epochs: Epochs that it had reported before.
        grants: What a scheduler has granted it, the latest last; empty without a scheduler.
    """

    number: int
    lease: Lease
    spent_s: float = 0.0
    epochs: int = 0
    grants: Sequence[Granted] = ()


@dataclass(frozen=True)
class Extended:
    """A trial whose grant has ended trains on without a pause.

    Attributes:
        number: The trial.
        grants: As of `Started`.
    """

    number: int
    grants: Sequence[Granted]


@dataclass(frozen=True)
class EpochsEnded:
    """A trial has finished epochs.

    Attributes:
        number: The trial.
        first: The first of these epochs, counted from 1.
        values: The study's metric after each of them, None where there was no validation.
        max_epochs: Epochs of a run to the end.
        predicted: The final loss predicted after the last of them, None where nothing predicts one.
        resumed: They were finished by an earlier attempt, from which this one resumes.
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
        final: It is the same for every worker that starts here, so the run ends.
    """

    message: str
    final: bool = False


@dataclass(frozen=True)
class Leaving:
    """A worker is about to end.

    Attributes:
        within_s: Seconds that this may take.
    """

    within_s: float = 30.0


@dataclass(frozen=True)
class Stop:
    """To a worker: requeue what runs, and leave."""


@dataclass(frozen=True)
class End:
    """To a worker: end the trial that it holds under this lease with a verdict, and take another."""

    lease: Lease
    verdict: Verdict


@dataclass(frozen=True)
class Lost:
    """To a worker: another attempt has the trial that it holds under this lease, so it drops the trial."""

    lease: Lease


@dataclass(frozen=True)
class Warned:
    """A tracker shows nothing of a trial, or nothing more of it.

    Attributes:
        number: The trial.
        what: What the trial is without; the same for all trials.
        why: What happened, in a line.
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
        what: ``placed``; ``found``, placed by an earlier driver; ``waiting`` for long for a machine; ``running``;
            ``requeued`` by its engine; ``ended`` in order; ``died``; ``lost`` with its machine.
        host: Its machine; empty where it has none yet.
        cause: Why it waits or ended, for people.
        logs: Where its output is, for people; with ``placed`` and ``found``.
    """

    placement: str
    what: str
    host: str = ""
    cause: str = ""
    logs: str = ""


@dataclass(frozen=True)
class Placed:
    """Agents that an engine places, in place of workers of one's own.

    Attributes:
        on: The engine, as the person wrote it.
        fewest: How many agents there are to be while trials wait.
        most: How many there may be.
    """

    on: str
    fewest: int
    most: int


@dataclass(frozen=True)
class Tick:
    """Time has passed: a listener that shows it can draw it again."""


Message = Ready | Started | Extended | EpochsEnded | Warned | TrialReport | Failed | Leaving
#: What a supervisor says to a worker.
Command = Stop | End | Lost
#: What a run says to its listener.
Heard = Message | Settled | Notice | Tick | AgentNews

#: Signals that ask an agent to leave: of systems and engines, Slurm's warning of a time limit, a closed terminal.
#: Each may come several times, and from several who ask; that is one request.
REQUESTS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def send(channel: Connection[Message, Command], message: Message) -> None:
    """Send a message to the supervisor; where that is gone, log it."""
    try:
        channel.send(message)
    except OSError:
        logger.warning("the supervisor is gone; it did not receive %r", message)


def received(channel: Connection[Command, Message]) -> Iterator[Message]:
    """The messages that a worker has sent so far; none where it has closed the channel, or died inside one."""
    with contextlib.suppress(EOFError, OSError):
        while channel.poll():
            yield channel.recv()
