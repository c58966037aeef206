"""What an engine is: it places agents on machines, reports what becomes of them, and ends them.

An agent is a supervisor with its local workers, the process of `hpo worker`. A driver (`hpo run --on`) knows this
interface and no more. No message goes between the driver and its agents: they work together through the study's
database, and a driver that dies leaves its agents at work.
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
#: input) while there was work left: start it again, here or elsewhere (sysexits' EX_TEMPFAIL).
LEFT_EARLY: Final = 75
#: Seconds that an agent waits before the driver says why: most wait for less.
LONG_WAIT: Final = 30.0


class EngineAwayError(StudyError):
    """An engine does not answer for now (its controller restarts, the network is down); the driver asks again."""


@dataclass(frozen=True)
class Resources:
    """What one agent needs; None leaves it to the engine.

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
    """What the agents of a study are to do: plain values, no secrets.

    Attributes:
        study: The study file, absolute.
        name: The study's name.
        logs: Folder for what agents print, absolute; on a disk that all machines share.
        arguments: Further arguments of `hpo worker` (overrides, ``--output-dir``, …), never a URL with a password.
        workers: Worker processes of one agent; None: as many as its machine has room for.
        resources: Of one agent.
        environment: Names of the environment variables that have to reach an agent, not their values. An engine
            gets the values from its own store of secrets, or from the environment of the driver.
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
        """Ten hexadecimal digits that differ between studies: of the name and the folder with its output.

        One study file serves many studies (``--output-dir``), and a machine that it is sent to has it elsewhere.
        """
        return hashlib.sha256(f"{self.name}\n{self.logs}".encode()).hexdigest()[:10]

    def command(self, *program: str) -> list[str]:
        """The command of one agent, without a shell's quotes.

        Args:
            program: What starts hpo where the agent is placed; this Python's hpo when left out.
        """
        workers = () if self.workers is None else ("--workers", str(self.workers))
        return [*(program or HPO), "worker", str(self.study), *workers, *self.arguments]

    def log(self, placement: Placement) -> Path:
        """The file with what an agent prints, by the last part of its id."""
        return self.logs / f"agent-{placement.id.rpartition('-')[2]}.log"


def driver_command(command: Sequence[str]) -> list[str]:
    """The command of a driver that is submitted, from its arguments after ``hpo``."""
    return [*HPO, *command]


#: What starts hpo with the Python that runs now, and with what it finds; see `launchers.safe_path`.
HPO: Final = (sys.executable, *(() if looks_here() else ("-P",)), "-m", "hpo")


@dataclass(frozen=True)
class Placement:
    """One agent as its engine knows it.

    Attributes:
        id: Unique for ever, as ``slurm:1234_0`` or ``local:<pid>:<start>``. The agent finds it in its environment
            as ``HPO_PLACEMENT``, and registers under it.
    """

    id: str


@dataclass(frozen=True)
class Running:
    """An agent has started on a machine."""

    placement: Placement
    host: str


@dataclass(frozen=True)
class Ended:
    """An agent has ended, and will not start again.

    Attributes:
        placement: The agent.
        cause: Why, for people.
        in_order: It ended by itself, with exit code 0.
        asked: It was asked to end, perhaps not by the driver, and has done so.
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
        requeued: The engine itself starts it again; then it is still placed.
    """

    placement: Placement
    requeued: bool


@dataclass(frozen=True)
class NodeGone:
    """An agent's machine is gone: as far as the engine knows, what ran there can write no more. It has ended.

    Where the engine is wrong, fencing keeps what is still written from doing harm.
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
    """What an agent waits for, as an engine has seen it again and again.

    Attributes:
        cause: Why it waits; empty where it does not.
        since: When that was first seen, on the engine's clock.
        said: The last cause that was reported of this wait.
    """

    cause: str = ""
    since: float = 0.0
    said: str = ""

    def is_news(self, cause: str, now: float) -> bool:
        """Take in why the agent waits now; whether that is to be reported: once, and only after a long wait."""
        if cause != self.cause:
            self.cause, self.since = cause, now
        self.said = self.said if cause else ""
        if not cause or cause == self.said or now < self.since + LONG_WAIT:
            return False
        self.said = cause
        return True


class Engine(Protocol):
    """Places agents. A method raises `EngineAwayError` where the engine does not answer, `StudyError` for good."""

    @property
    def agents(self) -> int:
        """How many agents there are to be where a person gives no number: by its keys, as ``nodes=4``, or one."""

    def place(self, order: AgentOrder, count: int) -> list[Placement]:
        """Place this many agents, or queue them where there is no room yet."""

    def changes(self) -> Iterator[Change]:
        """What has changed about placed and found agents since this was last asked, without waiting long.

        The driver asks every second; an engine that is costly to ask asks it less often. Where this raises, what
        it has yielded before is known, and the next call reports the rest.
        """

    def find(self, order: AgentOrder) -> list[Placement]:
        """The agents that an earlier driver has placed for this study, queued or running.

        `changes` reports on them as on placed ones, and `Running` once for each that runs.
        """

    def drain(self, placements: Sequence[Placement]) -> None:
        """Ask agents to requeue their trials and to leave (SIGTERM or the like); queued ones are taken back.

        The end of each is reported by `changes`. One that has ended needs no asking.
        """

    def kill(self, placements: Sequence[Placement]) -> None:
        """End agents at once; `changes` reports it."""

    def logs(self, placement: Placement) -> str:
        """Where an agent's output is: a file's path, or a command that shows it."""

    def script(self, order: AgentOrder, count: int) -> str:
        """What `--dry-run` prints: readable, and complete enough to place agents without a driver."""

    def submit(self, command: Sequence[str], order: AgentOrder) -> str:
        """Start a driver as a job of the engine; the job's id.

        Args:
            command: Its arguments after ``hpo``.
            order: Of the agents that it will place; its ``environment`` must reach the driver, too.
        """

    def driver_script(self, command: Sequence[str], order: AgentOrder) -> str:
        """What `hpo submit --dry-run` prints: `submit` as a script."""

    def close(self) -> None:
        """Let the connection to the engine go; agents stay."""
