"""The interface of an engine, which places agents on machines, reports what becomes of them, and ends them.

An agent is a supervisor with its local workers: the process of `hpo worker`. A driver (`hpo run --on`) uses only
this interface. Driver and agents exchange no messages: they work together through the study's database, and agents
work on when their driver dies.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from hpo.errors import StudyError
from hpo.execution.launchers.safe_path import looks_here

#: Environment variable in which an agent finds the id of its placement.
PLACEMENT_ENV: Final = "HPO_PLACEMENT"
#: Exit code of an agent or a driver that was asked to leave by a signal (an agent also by the end of its standard
#: input) while there was work left: it should be started again, here or elsewhere (sysexits' EX_TEMPFAIL).
LEFT_EARLY: Final = 75
#: Seconds that an agent waits for a machine before the driver reports why; most wait less.
LONG_WAIT: Final = 30.0


class EngineAwayError(StudyError):
    """An engine does not answer for now (its controller restarts, the network is down); the driver asks again."""


@dataclass(frozen=True)
class Resources:
    """What one agent needs; None leaves the amount to the engine.

    Attributes:
        gpu: GPUs.
        cpu: Processor cores.
        memory: Main memory, in bytes.
    """

    gpu: float | None = None
    cpu: float | None = None
    memory: int | None = None


@dataclass(frozen=True)
class AgentOrder:
    """What the agents of a study do: plain values, no secrets.

    Attributes:
        study: Absolute path of the study file.
        name: The study's name.
        logs: Absolute path of the folder for agents' logs, on a disk that all machines share.
        arguments: Further arguments of `hpo worker` (overrides, ``--output-dir``, …), never a URL with a password.
        workers: Worker processes of one agent; None: as many as its machine has room for.
        resources: The resources of one agent.
        environment: Names (not values) of the environment variables that must reach an agent. An engine gets the
            values from its own store of secrets, or from the environment of the driver.
    """

    study: Path
    name: str
    logs: Path
    arguments: tuple[str, ...] = ()
    workers: int | None = None
    resources: Resources = Resources()
    environment: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Ten hexadecimal digits that differ between studies: a hash of the name and the folder of logs.

        The path of the study file would not do: one file serves many studies (``--output-dir``), and has another
        path on a machine that it is sent to.
        """
        return hashlib.sha256(f"{self.name}\n{self.logs}".encode()).hexdigest()[:10]

    def command(self, *program: str) -> list[str]:
        """The command of one agent, as a list of words without shell quoting.

        Args:
            program: The command that starts hpo where the agent is placed; if left out, hpo of this Python.
        """
        workers = () if self.workers is None else ("--workers", str(self.workers))
        return [*(program or HPO), "worker", str(self.study), *workers, *self.arguments]

    def log(self, placement: Placement) -> Path:
        """The file for what an agent prints, named by the last part of its id."""
        return self.logs / f"agent-{placement.id.rpartition('-')[2]}.log"


def driver_command(command: Sequence[str]) -> list[str]:
    """The command of a submitted driver, from its arguments after ``hpo``."""
    return [*HPO, *command]


#: Starts hpo with the current Python; with ``-P`` if this one imports nothing from its working folder either
#: (see `launchers.safe_path`).
HPO: Final = (sys.executable, *(() if looks_here() else ("-P",)), "-m", "hpo")


@dataclass(frozen=True)
class Placement:
    """One agent as its engine knows it.

    Attributes:
        id: Unique for ever, such as ``slurm:1234_0`` or ``local:<key of the order>-<random>``. The agent finds it
            in its environment as ``HPO_PLACEMENT``, and registers under it.
    """

    id: str


@dataclass(frozen=True)
class Running:
    """An agent has started on a machine."""

    placement: Placement
    host: str


@dataclass(frozen=True)
class Ended:
    """An agent has ended, and the engine will not start it again.

    Attributes:
        placement: The agent.
        cause: Why, for people.
        in_order: It ended by itself with exit code 0; with Ray also if it was taken back before it ran.
        asked: It ended because it was asked to, perhaps by someone other than the driver.
    """

    placement: Placement
    cause: str
    in_order: bool
    asked: bool = False


@dataclass(frozen=True)
class Preempted:
    """The engine has taken an agent's machine for something else.

    Attributes:
        placement: The agent.
        requeued: The engine itself starts it again, so it is still placed.
    """

    placement: Placement
    requeued: bool


@dataclass(frozen=True)
class NodeGone:
    """An agent has ended because its machine is gone, so that, as far as the engine knows, it can write no more.

    If the engine is wrong, fencing keeps later writes from doing harm.
    """

    placement: Placement
    host: str


@dataclass(frozen=True)
class Waits:
    """An agent has waited for a machine for `LONG_WAIT` seconds.

    Attributes:
        placement: The agent.
        cause: Why, for people, in the engine's own terms.
    """

    placement: Placement
    cause: str


Change = Running | Waits | Ended | Preempted | NodeGone


@dataclass
class Waiting:
    """Tracks why an agent waits, so that an engine can report long waits once.

    Attributes:
        cause: Why it waits; empty if it does not.
        since: When this cause was first seen, on the engine's clock.
        said: The last cause that was reported for this wait.
    """

    cause: str = ""
    since: float = 0.0
    said: str = ""

    def is_news(self, cause: str, now: float) -> bool:
        """Note why the agent waits now; returns whether to report it: once, and only after a long wait."""
        if cause != self.cause:
            self.cause, self.since = cause, now
        self.said = self.said if cause else ""
        if not cause or cause == self.said or now < self.since + LONG_WAIT:
            return False
        self.said = cause
        return True


class Engine(Protocol):
    """Places agents.

    A method raises `EngineAwayError` if the engine does not answer for now, `StudyError` for a lasting problem.
    """

    @property
    def agents(self) -> int:
        """The number of agents if a person gives none: from a key such as ``nodes=4``, or the engine's default."""

    def place(self, order: AgentOrder, count: int) -> list[Placement]:
        """Place this many agents; those without room wait in the engine's queue."""

    def changes(self) -> Iterator[Change]:
        """What has changed about placed and found agents since the last call, without waiting long.

        The driver calls this every second; an implementation whose engine is costly to query does so less often.
        If this raises, the changes that it has yielded count, and the next call reports the rest.
        """

    def find(self, order: AgentOrder) -> list[Placement]:
        """The agents that an earlier driver has placed for this study, queued or running.

        `changes` reports on them as on placed agents, with a `Running` for each that already runs.
        """

    def drain(self, placements: Sequence[Placement]) -> None:
        """Ask agents to requeue their trials and to leave (SIGTERM or similar); take queued agents back.

        `changes` reports the end of each. Agents that have ended are ignored.
        """

    def kill(self, placements: Sequence[Placement]) -> None:
        """Kill agents; `changes` reports their end."""

    def logs(self, placement: Placement) -> str:
        """Where an agent's output is: a file's path, or a command that shows it."""

    def script(self, order: AgentOrder, count: int) -> str:
        """What `--dry-run` prints: readable, and complete enough to place agents without a driver."""

    def submit(self, command: Sequence[str], order: AgentOrder) -> str:
        """Start a driver as a job of the engine; returns the job's id.

        Args:
            command: The driver's arguments after ``hpo``.
            order: The order for the agents that it will place; its ``environment`` must reach the driver too.
        """

    def driver_script(self, command: Sequence[str], order: AgentOrder) -> str:
        """What `hpo submit --dry-run` prints: a script that does what `submit` does."""

    def close(self) -> None:
        """Close the connection to the engine; agents stay."""
