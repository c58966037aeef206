"""Agents as Slurm jobs: tasks of an array, each on one node, which Slurm requeues if it takes their node away.

Nothing is stored: a study's agents are this user's jobs of one name, and a placement's id contains the job's id.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hpo.errors import StudyError
from hpo.execution.engines.by_name import Address
from hpo.execution.engines.engine import (
    LEFT_EARLY,
    AgentOrder,
    Change,
    Ended,
    NodeGone,
    Placement,
    Preempted,
    Running,
    Waiting,
    Waits,
)
from hpo.execution.engines.slurm_commands import Job, SlurmCommands
from hpo.execution.engines.slurm_script import PREFIX, agents_script, driver_script, job_name, log_file
from hpo.execution.engines.slurm_settings import KEYS, Settings, settings_of

__all__ = ["KEYS", "SlurmEngine", "make"]

#: Seconds between two looks at the jobs: the controller serves many users.
_INTERVAL: Final = 5.0
#: Seconds after which an agent that was asked to leave but has not is asked again.
_ASK_AGAIN: Final = 10.0
#: The "signal" that Slurm reports for a job whose output could not be opened.
_NO_OUTPUT: Final = 53
#: Reasons for which a job waits for ever: its time limit is above that of its partition, its QOS or its account.
_TOO_LONG: Final = ("PartitionTimeLimit", "QOSMaxWallDurationPerJobLimit", "AssocMaxWallDurationPerJobLimit")
#: States of a job whose machine Slurm has taken for something else, or whose time is over.
_TAKEN: Final = ("PREEMPTED", "TIMEOUT")


def make(address: Address) -> SlurmEngine:
    """The engine of an address.

    Raises:
        InputError: A value does not fit.
    """
    return SlurmEngine(settings_of(address))


@dataclass
class _Agent:
    """What is known of an agent.

    Attributes:
        host: Its machine, once it was reported as running there.
        restarts: How many times it was requeued.
        asked_at: The monotonic clock when it was last asked to leave; infinite if it was not.
        waiting: Why it waits.
    """

    host: str = ""
    restarts: int = 0
    asked_at: float = math.inf
    waiting: Waiting = field(default_factory=Waiting)


class SlurmEngine:
    """Places agents as jobs.

    Args:
        settings: Where agents run, and for how long.
        interval: Seconds between two looks at the jobs.

    Attributes:
        agents: The value of the key `nodes`.
    """

    def __init__(self, settings: Settings, interval: float = _INTERVAL) -> None:
        self.agents = settings.agents
        self._settings = settings
        self._slurm = SlurmCommands()
        self._interval = interval
        self._agents: dict[Placement, _Agent] = {}
        self._logs: dict[Placement, Path] = {}
        self._names: set[str] = set()
        self._next_look = 0.0

    def place(self, order: AgentOrder, count: int) -> list[Placement]:
        """Queue an array with a task for each agent."""
        _make_folder(order.logs)
        array = self._slurm.submit(agents_script(order, self._settings, count))
        placed = [Placement(f"{PREFIX}{array}_{task}") for task in range(count)]
        self._take_in(order, placed)
        return placed

    def changes(self) -> Iterator[Change]:
        """The changes that squeue shows; asks it at most every few seconds."""
        if not self._agents or time.monotonic() < self._next_look:
            return
        jobs = self._slurm.jobs(self._names)
        self._next_look = time.monotonic() + self._interval
        for placement, agent in list(self._agents.items()):
            yield from self._changes_of(placement, agent, jobs.get(_job_id(placement)))
        # Ask again: a job that was just starting had no process to signal, and a requeued job is queued again.
        due = time.monotonic() - _ASK_AGAIN
        self._ask([placement for placement, agent in self._agents.items() if agent.asked_at < due], jobs)

    def find(self, order: AgentOrder) -> list[Placement]:
        """This user's jobs that have the name of the study's agents and have not ended."""
        jobs = self._slurm.jobs([job_name(order)])
        found = [Placement(f"{PREFIX}{job.id}") for job in jobs.values() if not job.ended]
        self._take_in(order, [placement for placement in found if placement not in self._agents])
        return found

    def drain(self, placements: Sequence[Placement]) -> None:
        """Cancel queued jobs; send running ones SIGTERM, and keep Slurm from requeuing them."""
        known = [placement for placement in placements if placement in self._agents]
        if known:
            self._ask(known, self._slurm.jobs(self._names))

    def kill(self, placements: Sequence[Placement]) -> None:
        """Cancel jobs; Slurm kills what is left of them after its `KillWait`."""
        self._slurm.cancel([_job_id(placement) for placement in placements if placement in self._agents])

    def logs(self, placement: Placement) -> str:
        """The file with what an agent has printed."""
        return str(self._logs[placement])

    def script(self, order: AgentOrder, count: int) -> str:
        """The script for sbatch."""
        return agents_script(order, self._settings, count)

    def submit(self, command: Sequence[str], order: AgentOrder) -> str:
        """Queue the driver; returns its job's id."""
        _make_folder(order.logs)
        return self._slurm.submit(self.driver_script(command, order))

    def driver_script(self, command: Sequence[str], order: AgentOrder) -> str:
        """The driver's script for sbatch."""
        return driver_script(command, order, self._settings)

    def close(self) -> None:
        """Nothing needs closing."""

    def _take_in(self, order: AgentOrder, placements: Sequence[Placement]) -> None:
        self._names.add(job_name(order))
        for placement in placements:
            self._agents[placement] = _Agent()
            self._logs[placement] = log_file(order, _job_id(placement))

    def _ask(self, placements: Sequence[Placement], jobs: dict[str, Job]) -> None:
        """Cancel queued jobs, and ask the others to leave; asking a job twice does no harm."""
        for placement in placements:
            self._agents[placement].asked_at = time.monotonic()
        asked = [jobs[job] for job in map(_job_id, placements) if job in jobs]
        self._slurm.cancel([job.id for job in asked if job.queued])
        running = [job.id for job in asked if job.runs]
        for job in running:
            self._slurm.forbid_requeue(job)
        self._slurm.cancel(running, "--signal=TERM")

    def _changes_of(self, placement: Placement, agent: _Agent, job: Job | None) -> Iterator[Change]:
        if job is None:
            del self._agents[placement]
            yield Ended(placement, "Slurm does not know its job any more", in_order=False)
        elif job.ended:
            end = self._end(placement, agent, job)
            del self._agents[placement]
            yield end
        elif not job.completing:
            yield from self._lives(placement, agent, job)

    def _lives(self, placement: Placement, agent: _Agent, job: Job) -> Iterator[Change]:
        if job.queued and job.reason in _TOO_LONG:
            self._slurm.cancel([job.id])
            del self._agents[placement]
            yield Ended(
                placement, f"it can't start ({job.reason}): `time` is above what is allowed", in_order=False
            )
            return
        if agent.host and (job.queued or job.restarts > agent.restarts):
            # Only if it is still queued: an agent that runs again by now may hold new leases under the same id.
            if job.queued and self._slurm.is_down(agent.host):
                if agent.asked_at < math.inf:
                    self._slurm.cancel([job.id])
                del self._agents[placement]  # if it is still wanted, `find` adds the requeued job as a new agent
                yield NodeGone(placement, agent.host)
                return
            agent.host = ""
            yield Preempted(placement, requeued=True)
        agent.restarts = job.restarts
        cause = _wait_of(job) if job.queued else ""
        if agent.waiting.is_news(cause, time.monotonic()):
            yield Waits(placement, cause)
        if job.runs and not agent.host:
            agent.host = job.host
            yield Running(placement, job.host)

    def _end(self, placement: Placement, agent: _Agent, job: Job) -> Change:
        if job.state == "NODE_FAIL":
            return NodeGone(placement, agent.host or job.host)
        if job.state in _TAKEN:
            return Preempted(placement, requeued=False)
        if job.state == "COMPLETED":
            return Ended(placement, "it has left", in_order=True)
        code, number = self._slurm.exit_code(job.id)
        if number == _NO_OUTPUT:
            cause = f"{job.host} can't write to {self._logs[placement].parent}, where its output goes"
        else:
            how = f", signal {number}" if number else f", exit code {code}" if code else ""
            cause = f"its job is {job.state}{how}"
        asked = job.state == "CANCELLED" or code == LEFT_EARLY  # `scancel`, and one with `--signal=TERM`
        return Ended(placement, cause, in_order=False, asked=asked)


def _wait_of(job: Job) -> str:
    """Why a job waits; empty if Slurm has not considered it yet."""
    if job.reason in ("", "None"):
        return ""
    release = f"; `scontrol release {job.id}` lets it start" if "held" in job.reason.lower() else ""
    return f"Slurm's reason is {job.reason}{release}"


def _job_id(placement: Placement) -> str:
    return placement.id.removeprefix(PREFIX)


def _make_folder(folder: Path) -> None:
    """Make the folder for jobs' output, because Slurm does not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(f"can't make {folder}: {error.strerror or error}") from error
