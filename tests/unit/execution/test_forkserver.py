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
from hpo.execution.launchers.forkserver import not_started, start_fork_server
from hpo.execution.launchers.launcher import WorkerEnded
from hpo.execution.launchers.local import LocalLauncher
from hpo.execution.limits import oom_kills
from hpo.execution.messages import REQUESTS, Order
from hpo.search.one_thread import THREADS_VARIABLE
from hpo.search.schedulers.freeze_thaw.scheduler import FreezeThaw
from hpo.signals import handled
from hpo.trial import mainless
from hpo.trial.resources import Slot
from tests.support.commands import make_study, wait_until


def _are_in(numbers: Sequence[signal.Signals], pid: int, *sets: str) -> bool:
    """Whether a process has each of the signals in one of the sets that the kernel shows."""
    shown = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    masks = [int(shown[name], 16) for name in sets]
    return all(any(mask >> (number - 1) & 1 for mask in masks) for number in numbers)


def test_a_request_to_leave_while_the_fork_server_starts_is_heard_and_ends_none_of_what_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who ask send it to this process, or to all of a job; a terminal's Ctrl-C is for all of them, too."""
    spec = load_spec(make_study(tmp_path))
    came = (*REQUESTS, signal.SIGINT)
    spawn, started, heard = multiprocessing.util.spawnv_passfds, [], []

    def start_amid_requests(path: bytes, words: Sequence[str], passed: Sequence[int]) -> int:
        for number in came:
            os.kill(os.getpid(), number)
        started.append(spawn(path, words, passed))
        for number in came:
            os.kill(started[-1], number)
        return started[-1]

    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", start_amid_requests)
    monkeypatch.setattr(mainless, "SERVER", server := ForkServer())
    tracker = ResourceTracker()
    monkeypatch.setattr(resource_tracker, "ensure_running", tracker.ensure_running)
    try:
        with handled(came, lambda number, _: heard.append(number)):
            start_fork_server(spec)
        assert sorted(heard) == sorted(2 * came), "at the start of the tracker, and of the server"
        assert len(started) == 2
        wait_until(lambda: _are_in(REQUESTS, started[1], "SigIgn") and not _are_in(REQUESTS, started[1], "SigBlk"))
        wait_until(lambda: _are_in([signal.SIGTERM], started[0], "SigIgn"))
        assert _are_in(came, started[0], "SigIgn", "SigBlk")
        for pid in started:
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it lives"
    finally:
        tracker._stop()
        os.kill(started[1], signal.SIGKILL)
        server._stop()


def test_one_that_has_died_is_started_for_the_next_worker_as_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may choose it where memory is short."""
    spec = load_spec(make_study(tmp_path))
    monkeypatch.setenv(THREADS_VARIABLE, "2")
    monkeypatch.setattr(mainless, "SERVER", server := ForkServer())
    try:
        start_fork_server(spec)
        os.kill(died := server._forkserver_pid, signal.SIGKILL)
        wait_until(lambda: "State:\tZ" in Path(f"/proc/{died}/status").read_text())
        launcher = LocalLauncher([Slot("cpu", "cpu", None, 1)], tmp_path)
        (worker,) = launcher.place(Order(spec, FreezeThaw()), 1)
        variables = Path(f"/proc/{server._forkserver_pid}/environ").read_bytes().split(b"\0")
        assert f"{THREADS_VARIABLE}=1".encode() in variables
        wait_until(lambda: _are_in(REQUESTS, server._forkserver_pid, "SigIgn"))
        wait_until(lambda: any(isinstance(change, WorkerEnded) for change in worker.changes()))
    finally:
        server._stop()


def test_that_the_fork_server_has_died_is_said_where_nothing_can_be_started_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mainless, "SERVER", server := ForkServer())
    process = mainless.MainlessContext().Process(target=print)
    try:
        start_fork_server(load_spec(make_study(tmp_path)))
        assert mainless.server_end(0.0) is None
        os.kill(server._forkserver_pid, signal.SIGKILL)
        monkeypatch.setattr(server, "ensure_running", lambda: None)  # as where it dies just then
        with pytest.raises((EOFError, OSError)) as caught:
            process.start()
        error = not_started("a worker", caught.value, oom_kills(), "then run it again")
    finally:
        server._stop()
    assert str(error) == (
        "a worker can't be started: the fork server, from which it is started, was killed by SIGKILL\n  fix: see "
        "what the study's libraries do when they are imported, and whether memory was short; then run it again"
    )
