"""`hpo run --on` as a process of its own: what it says, and whether it lives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.support.commands import PATIENCE, wait_until

#: Events after which an agent is not at work.
_GONE = ("agent_requeued", "agent_ended", "agent_died", "agent_lost")


class Driver:
    """A driver that runs, or has run.

    Args:
        process: It; its standard error goes where its events go.

    Attributes:
        events: What it has said so far, less lines that are no events.
        process: The process.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """Everything that it has printed."""
        return "".join(self._lines)

    @property
    def hosts(self) -> dict[str, str]:
        """The machines of the agents that run, by placement, as far as it has said."""
        found: dict[str, str] = {}
        for event in list(self.events):
            if event["event"] == "agent_running":
                found[event["placement"]] = event["host"]
            elif event["event"] in _GONE:
                found.pop(event["placement"], None)
        return found

    def said(self, name: str) -> list[dict[str, Any]]:
        """Its events of a name."""
        return [event for event in list(self.events) if event["event"] == name]

    def wait(self, condition: Callable[[], Any]) -> Any:
        """Wait until something is so; AssertionError with all that the driver has said where it ends before."""

        def found() -> Any:
            ended = self.process.poll() is not None
            if ended:
                self._reader.join()
            value = condition()
            assert value or not ended, f"the driver has ended: {self.process.returncode}\n{self.output}"
            return value or None

        try:
            return wait_until(found)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from error

    def end(self) -> int:
        """Wait for its end; its exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join()
        return code

    def kill(self) -> None:
        """End it with everything that it has started, as far as that is in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.end()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.append(line)
                if line.startswith("{"):
                    self.events.append(json.loads(line))


@contextlib.contextmanager
def driving(*arguments: object, environment: Mapping[str, str], within: Sequence[str] = ()) -> Iterator[Driver]:
    """`hpo run` with these arguments for the time of the block; the command ``within`` starts it."""
    command = [*within, sys.executable, "-m", "hpo", "run", *map(str, arguments), "--json"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )
    driver = Driver(process)
    try:
        yield driver
    finally:
        driver.kill()
