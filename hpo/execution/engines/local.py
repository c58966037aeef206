"""Agents as processes on this machine, each in a session of its own, so that they outlive their driver.

Nothing about them is stored. An agent is the first process of its session, and was started with the id of its
placement in its environment, where any other driver finds it; the processes that it starts do not inherit that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from hpo.config.variables import without_token
from hpo.errors import StudyError
from hpo.execution.engines.by_name import Address
from hpo.execution.engines.engine import (
    LEFT_EARLY,
    PLACEMENT_ENV,
    AgentOrder,
    Change,
    Ended,
    Placement,
    Running,
    driver_command,
)
from hpo.execution.limits import agent_end, oom_kills
from hpo.execution.messages import REQUESTS
from hpo.storage.machine import host_name
from hpo.wording import count_of

#: The keys of `--on local:…`: there are none.
KEYS: Final[tuple[str, ...]] = ()

#: Seconds between two checks of a process that is being started.
_LOOK: Final = 0.001


def make(address: Address) -> LocalEngine:
    """The engine of an address.

    Raises:
        InputError: It names a place.
    """
    if address.place:
        raise address.error("this machine has no other place", "write `local`")
    return LocalEngine()


class LocalEngine:
    """Starts agents beside the driver; resources are not limited.

    Attributes:
        agents: One.
    """

    agents: Final = 1

    def __init__(self) -> None:
        self._agents: dict[Placement, psutil.Process] = {}
        self._started: set[Placement] = set()
        self._new: list[Placement] = []
        self._logs: dict[Placement, Path] = {}
        self._struck = oom_kills()

    def place(self, order: AgentOrder, count: int) -> list[Placement]:
        """Start this many agents."""
        placed = []
        for _ in range(count):
            placement = Placement(f"{_prefix(order)}{secrets.token_hex(4)}")
            log = order.log(placement)
            pid = _start(order.command(), log, {PLACEMENT_ENV: placement.id})
            agent = psutil.Process(pid)
            _wait_until_others_see(agent)
            self._started.add(placement)
            self._take_in(order, placement, agent)
            placed.append(placement)
        return placed

    def changes(self) -> Iterator[Change]:
        """The agents that have started or ended since the last call."""
        new, self._new = self._new, []
        for placement in new:
            yield Running(placement, host_name())
        for placement, agent in list(self._agents.items()):
            ended = self._end(placement, agent)
            if ended is not None:
                del self._agents[placement]
                self._started.discard(placement)
                yield ended

    def find(self, order: AgentOrder) -> list[Placement]:
        """The living agents of this study that run on this machine."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) != process.pid:
                    continue
                placement = Placement(process.environ().get(PLACEMENT_ENV, ""))
                if placement.id.startswith(_prefix(order)) and _lives(process):
                    found.append(placement)
                    if placement not in self._agents:
                        self._take_in(order, placement, process)
        return found

    def drain(self, placements: Sequence[Placement]) -> None:
        """Send each agent SIGTERM."""
        for agent in self._living(placements):
            with contextlib.suppress(psutil.NoSuchProcess):
                agent.terminate()

    def kill(self, placements: Sequence[Placement]) -> None:
        """Kill each agent with all its child processes."""
        for agent in self._living(placements):
            with contextlib.suppress(psutil.NoSuchProcess):
                agent.suspend()  # so that it starts nothing meanwhile
                below = agent.children(recursive=True)
                agent.kill()
                for process in below:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()

    def logs(self, placement: Placement) -> str:
        """The file with what an agent has printed."""
        return str(self._logs[placement])

    def script(self, order: AgentOrder, count: int) -> str:
        """A shell script that starts agents, which outlive the terminal."""
        log = shlex.quote(str(order.logs / "agent"))
        return "\n".join(
            [
                "#!/bin/sh",
                f"# {count_of(count, 'agent')} of the study {order.name}; `hpo stop` asks them to leave",
                f"mkdir -p {shlex.quote(str(order.logs))}",
                f"for agent in $(seq {count}); do",
                f"  setsid {shlex.join(order.command())} </dev/null >>{log}-$agent.log 2>&1 &",
                "done\n",
            ]
        )

    def submit(self, command: Sequence[str], order: AgentOrder) -> str:
        """Start the driver in a session of its own; returns its process id."""
        return str(_start(driver_command(command), _driver_log(order), {}))

    def driver_script(self, command: Sequence[str], order: AgentOrder) -> str:
        """A shell script that starts the driver, which outlives the terminal."""
        log = _driver_log(order)
        return "\n".join(
            [
                "#!/bin/sh",
                f"mkdir -p {shlex.quote(str(log.parent))}",
                f"setsid {shlex.join(driver_command(command))} </dev/null >>{shlex.quote(str(log))} 2>&1 &\n",
            ]
        )

    def close(self) -> None:
        """Nothing needs closing."""

    def _take_in(self, order: AgentOrder, placement: Placement, process: psutil.Process) -> None:
        self._agents[placement] = process
        self._logs[placement] = order.log(placement)
        self._new.append(placement)

    def _living(self, placements: Sequence[Placement]) -> list[psutil.Process]:
        return [self._agents[placement] for placement in placements if placement in self._agents]

    def _end(self, placement: Placement, agent: psutil.Process) -> Ended | None:
        """How an agent has ended; None while it lives."""
        gone = Ended(placement, "its process is gone", in_order=False)
        if placement not in self._started:  # another process started it, so only that one gets its exit code
            return None if _lives(agent) else gone
        try:
            pid, status = os.waitpid(agent.pid, os.WNOHANG)
        except ChildProcessError:  # this process ignores SIGCHLD, and so gets no exit codes
            return gone
        if not pid:
            return None
        code = os.waitstatus_to_exitcode(status)
        return Ended(placement, agent_end(code, self._struck), in_order=code == 0, asked=code == LEFT_EARLY)


def _prefix(order: AgentOrder) -> str:
    return f"local:{order.key}-"


def _driver_log(order: AgentOrder) -> Path:
    return order.logs / "driver.log"


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _wait_until_others_see(agent: psutil.Process) -> None:
    """Wait until the environment of a new process can be read.

    On Linux the parent continues while the new program is still being loaded, without an environment until then.
    """
    with contextlib.suppress(psutil.Error):  # it has ended already
        while not agent.environ() and _lives(agent):
            time.sleep(_LOOK)


def _start(command: list[str], log: Path, environment: Mapping[str, str]) -> int:
    """Start a process that outlives this one, in a session of its own; returns its process id."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return os.posix_spawn(
            command[0],
            command,
            {**without_token(os.environ), **environment},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGINT, *REQUESTS),  # else it would inherit that they are ignored
        )
    except OSError as error:
        raise StudyError(f"can't start {shlex.join(command)}: {error.strerror or error}") from error
