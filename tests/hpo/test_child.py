"""What a supervisor makes of a worker's signs, with a real process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from hpo.execution.launchers.local import Child, Running
from hpo.execution.limits import Limits
from hpo.execution.messages import BEAT, PULSE_LENGTH, EpochsEnded, Leaving, Started, Stop
from hpo.storage.recovery import LOST, STOPPED
from hpo.trial.resources import Slot
from tests.hpo.owners import forked

LATE = Limits(wall_s=10.0)
IDLE = Limits(idle_s=5.0)
Worker = tuple[Child, "Connection[object, Stop]"]


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A process that does nothing, and the end of the channel that would be its."""
    ours, theirs = forked.Pipe()
    process = forked.Process(target=time.sleep, args=(60,))
    process.start()
    child = Child("worker-1", Slot("cpu", "cpu", None, 1), process, ours, [0.0] * PULSE_LENGTH, 0)
    yield child, theirs
    child.kill()
    process.join()
    theirs.close()
    ours.close()


def test_a_broken_limit_is_said_first_and_then_enforced(worker: Worker) -> None:
    child, theirs = worker
    now = time.monotonic()
    child.running = Running(3, 0.0, now - 11)
    assert not child.hold_to(LATE, 5.0, now)
    said = theirs.recv()
    assert (said.number, said.verdict and said.verdict.outcome) == (3, "timed_out")
    assert not child.hold_to(LATE, 5.0, now + 4)
    assert not theirs.poll(), "said once"
    assert child.hold_to(LATE, 5.0, now + 5)
    child.process.join()
    assert child.bury() == said.verdict


def test_a_kill_does_not_blame_the_trial_that_came_after(worker: Worker) -> None:
    child, _ = worker
    now = time.monotonic()
    child.running = Running(3, 0.0, now - 11)
    assert child.hold_to(LATE, 0.0, now)
    child.running = Running(4, 0.0, now)
    child.process.join()
    verdict = child.bury()
    assert verdict is not None
    assert (verdict.outcome, verdict.final) == (STOPPED, False)


def test_messages_say_what_runs(worker: Worker) -> None:
    child, theirs = worker
    theirs.send(Started(7, spent_s=3.0))
    assert [type(message) for message in child.messages()] == [Started]
    assert child.running is not None
    assert (child.running.number, child.running.spent_s) == (7, 3.0)
    theirs.send(EpochsEnded(7, 1, (0.5,), 10))
    assert [type(message) for message in child.messages()] == [EpochsEnded]
    assert child.running is not None, "said inside the trial"
    theirs.send(Leaving(within_s=0.5))
    assert [type(message) for message in child.messages()] == [Leaving]
    assert child.running is None
    assert not child.hold_to(Limits(), 30.0, time.monotonic())
    assert child.hold_to(Limits(), 30.0, time.monotonic() + 1), "it said that it would be gone by then"


def test_a_time_without_a_database_is_not_the_trials(worker: Worker) -> None:
    child, theirs = worker
    began = time.monotonic() - 100
    child.running = Running(3, 0.0, began)
    child.pulse[BEAT] = began + 4  # then the database went away
    for now in (began + 6, began + 50, began + 99):
        child.excuse(now)
        assert not child.hold_to(IDLE, 0.0, now)
        assert not child.hold_to(LATE, 0.0, now)
    assert child.running.spent_s == pytest.approx(4)
    assert not child.hold_to(LATE, 0.0, began + 104)
    assert not theirs.poll()
    child.hold_to(LATE, 0.0, began + 106)
    assert theirs.poll()


def test_an_end_of_its_own_is_a_loss_only_if_it_held_something(worker: Worker) -> None:
    child, _ = worker
    child.process.kill()
    child.process.join()
    verdict = child.bury()
    assert verdict is not None
    assert (verdict.outcome, verdict.reason) == (LOST, "its worker was killed by SIGKILL")


FORKS = """
import os, signal, time
from hpo.trial.stopping import StopRequest
from hpo.execution.trial_process import end_forks_at_sigterm

request = StopRequest()
signal.signal(signal.SIGTERM, lambda *_: request.leave())
end_forks_at_sigterm()
for _ in range(60):
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(1)
    os.kill(pid, signal.SIGTERM)  # it may not even have begun to run
    print(-os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), request.leaving)
"""


def test_what_a_worker_forks_ends_at_a_sigterm_from_its_first_instant_on() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=50, check=True)
    assert ended.stdout.split("\n") == ["15 False"] * 60 + [""]
