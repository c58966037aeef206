"""What is started beside a run passes signals by, and takes none from it."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.forkserver import ForkServer
from multiprocessing.resource_tracker import ResourceTracker
from pathlib import Path

import pytest

from hpo.config.spec import load_spec
from hpo.execution.launchers.forkserver import start_fork_server
from hpo.execution.messages import REQUESTS
from hpo.execution.signals import handled
from hpo.trial import mainless
from tests.support.commands import make_study, wait_until


def _are_in(numbers: Sequence[signal.Signals], pid: int, *sets: str) -> bool:
    """Whether a process has each of the signals in one of the sets that the kernel shows."""
    shown = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    masks = [int(shown[name], 16) for name in sets]
    return all(any(mask >> (number - 1) & 1 for mask in masks) for number in numbers)


def test_a_request_to_leave_while_the_fork_server_starts_is_heard_and_ends_none_of_what_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who ask send it to this process, or to all of a job."""
    spec = load_spec(make_study(tmp_path))
    spawn, started, heard = multiprocessing.util.spawnv_passfds, [], []

    def start_amid_requests(path: bytes, words: Sequence[str], passed: Sequence[int]) -> int:
        for number in REQUESTS:
            os.kill(os.getpid(), number)
        started.append(spawn(path, words, passed))
        for number in REQUESTS:
            os.kill(started[-1], number)
        return started[-1]

    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", start_amid_requests)
    monkeypatch.setattr(mainless, "SERVER", server := ForkServer())
    tracker = ResourceTracker()
    monkeypatch.setattr(resource_tracker, "ensure_running", tracker.ensure_running)
    try:
        with handled(REQUESTS, lambda number, _: heard.append(number)):
            start_fork_server(spec)
        assert sorted(heard) == sorted(2 * REQUESTS), "at the start of the tracker, and of the server"
        assert len(started) == 2
        wait_until(lambda: _are_in(REQUESTS, started[1], "SigIgn") and not _are_in(REQUESTS, started[1], "SigBlk"))
        wait_until(lambda: _are_in([signal.SIGTERM], started[0], "SigIgn"))
        assert _are_in(REQUESTS, started[0], "SigIgn", "SigBlk")
        for pid in started:
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it lives"
    finally:
        tracker._stop()
        os.kill(started[1], signal.SIGKILL)
        server._stop()
