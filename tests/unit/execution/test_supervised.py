"""What a supervisor makes of a worker's signs, with a real process."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pytest

from hpo.execution.launchers.launcher import Said, WorkerEnded
from hpo.execution.launchers.local import LocalWorker
from hpo.execution.limits import Limits
from hpo.execution.messages import Command, End, EpochsEnded, Extended, Leaving, Message, Started
from hpo.execution.pulse import BEAT, DECIDING, PROCESS, PULSE_LENGTH, held_by, show_held
from hpo.execution.pulse import Held as Shown
from hpo.execution.supervised import Running, Supervised
from hpo.storage.ledger import Lease
from hpo.storage.settling import LOST, STOPPED, Verdict
from tests.support.commands import PATIENCE, wait_until
from tests.support.owners import forked

LATE = Limits(wall_s=10.0)
#: A number that no process has.
GONE = 2**23
IDLE = Limits(idle_s=5.0)


@dataclass
class Held:
    """A worker's process that does nothing, under supervision, and the end of the channel that would be its."""

    supervised: Supervised
    process: LocalWorker
    theirs: Connection[Message, Command]

    def hear(self) -> list[type[Message]]:
        """What has arrived, heard by the supervisor's side."""
        said = [change for change in self.process.changes() if isinstance(change, Said)]
        for change in said:
            self.supervised.hear(change.message)
        return [type(change.message) for change in said]

    def verdict(self) -> Verdict | None:
        """Over what it held at its end, which has come."""
        *_, ended = self.process.changes()
        assert isinstance(ended, WorkerEnded)
        return self.supervised.verdict(ended)

    @property
    def lives(self) -> bool:
        """Whether the process runs."""
        return self.process.process.exitcode is None


@pytest.fixture
def held() -> Iterator[Held]:
    ours, theirs = forked.Pipe()
    process = forked.Process(target=time.sleep, args=(60,))
    process.start()
    worker = LocalWorker("worker-1", process, ours, [0.0] * PULSE_LENGTH, 0)
    yield Held(Supervised(worker), worker, theirs)
    worker.kill()
    theirs.close()
    ours.close()


def test_a_broken_limit_is_said_first_and_then_enforced(held: Held) -> None:
    now = time.monotonic()
    held.supervised.running = Running(Lease(4, 1), 0.0, now - 11)
    held.supervised.hold_to(LATE, 5.0, now)
    said = held.theirs.recv()
    assert isinstance(said, End)
    assert (said.lease, said.verdict.outcome) == (Lease(4, 1), "timed_out")
    held.supervised.hold_to(LATE, 5.0, now + 4)
    assert not held.theirs.poll(), "said once"
    assert held.lives
    held.supervised.hold_to(LATE, 5.0, now + 5)
    assert not held.lives
    assert held.verdict() == said.verdict


def test_a_kill_does_not_blame_the_trial_that_came_after(held: Held) -> None:
    now = time.monotonic()
    held.supervised.running = Running(Lease(4, 1), 0.0, now - 11)
    held.supervised.hold_to(LATE, 0.0, now)
    held.supervised.running = Running(Lease(5, 1), 0.0, now)
    verdict = held.verdict()
    assert verdict is not None
    assert (verdict.outcome, verdict.final) == (STOPPED, False)


def test_a_kill_does_not_wait_for_ever_for_a_process_that_lives_on(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that sleeps in the kernel; its end is said once it has come, and not before."""
    signalled: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr("hpo.execution.launchers.local.kill_group", lambda pid, **_: signalled.append(pid))
        patch.setattr("hpo.execution.launchers.local._PATIENCE", 0.2)
        held.process.pulse[PROCESS] = GONE
        for _ in range(3):
            held.supervised.kill()
        worker = held.process.pid
        assert signalled == [worker, GONE, worker, worker], "by then the number may be another process's"
        assert held.lives
        assert list(held.process.changes()) == []
        assert held.process.process not in multiprocessing.active_children(), "an exit of Python waits for those"
    held.supervised.kill()
    wait_until(lambda: not held.lives)
    assert held.verdict() == Verdict(STOPPED, "its worker was stopped immediately")


def test_messages_say_what_runs(held: Held) -> None:
    held.theirs.send(Started(7, Lease(8, 2), spent_s=3.0))
    assert held.hear() == [Started]
    running = held.supervised.running
    assert running is not None
    assert (running.lease, running.spent_s) == (Lease(8, 2), 3.0)
    held.theirs.send(EpochsEnded(7, 1, (0.5,), 10))
    assert held.hear() == [EpochsEnded]
    held.theirs.send(Extended(7, ({"number": 0, "until": 9, "why": {}},)))
    assert held.hear() == [Extended]
    assert held.supervised.running is not None, "said inside the trial"
    held.theirs.send(Leaving(within_s=0.5))
    assert held.hear() == [Leaving]
    assert held.supervised.running is None
    held.supervised.hold_to(Limits(), 30.0, time.monotonic())
    assert held.lives
    held.supervised.hold_to(Limits(), 30.0, time.monotonic() + 1)
    assert not held.lives, "it said that it would be gone by then"


@pytest.mark.parametrize("deciding", [0.0, 1.0])
def test_a_time_without_a_database_is_not_the_trials(held: Held, deciding: float) -> None:
    """Nor is it where the trial waits for a decision meanwhile."""
    began = time.monotonic() - 100
    held.supervised.running = Running(Lease(4, 1), 0.0, began)
    held.process.pulse[BEAT] = began + 4  # then the database went away
    held.process.pulse[DECIDING] = deciding
    for now in (began + 6, began + 50, began + 99):
        held.supervised.excuse(now)
        held.supervised.hold_to(IDLE, 0.0, now)
        held.supervised.hold_to(LATE, 0.0, now)
    assert held.lives
    assert held.supervised.running.spent_s == pytest.approx(4)
    held.supervised.hold_to(LATE, 0.0, began + 104)
    assert not held.theirs.poll()
    held.supervised.hold_to(LATE, 0.0, began + 106)
    assert held.theirs.poll()


def test_a_time_in_which_all_was_stopped_is_not_the_trials(held: Held) -> None:
    """Though its worker ran again before its supervisor looked."""
    began = time.monotonic() - 100
    held.supervised.running = Running(Lease(4, 1), 0.0, began)
    held.process.pulse[BEAT] = began + 99  # it was stopped from 3 to 98
    held.supervised.excuse(began + 99, 96.0)
    held.supervised.hold_to(IDLE, 0.0, began + 103)
    held.supervised.hold_to(LATE, 0.0, began + 103)
    assert not held.theirs.poll()
    assert held.supervised.running.spent_s == pytest.approx(3)
    held.supervised.hold_to(LATE, 0.0, began + 107)
    assert held.theirs.poll(), "what came before and after counts"


def test_a_time_in_which_it_could_not_advance_is_not_stored_as_its_attempts(held: Held) -> None:
    """It would count once the trial resumes; a trial that the worker has taken since is another one."""
    began, pulse = time.monotonic() - 100, held.process.pulse
    show_held(pulse, Lease(3, 1), began - 1)
    held.supervised.running = Running(Lease(4, 1), 0.0, began)
    held.supervised.excuse(began + 9, 6.0)
    assert held_by(pulse) == Shown(Lease(3, 1), began - 1, began - 1, 0.0)
    show_held(pulse, Lease(4, 1), began + 10)
    for now, stopped_s, in_all in ((began + 99, 20.0, 20.0), (began + 109, 10.0, 30.0)):
        pulse[BEAT] = now - 1
        held.supervised.excuse(now, stopped_s)
        shown = held_by(pulse)
        assert shown is not None
        assert shown.excused_s == pytest.approx(in_all)
    show_held(pulse, Lease(5, 1), began + 110)
    assert held_by(pulse) == Shown(Lease(5, 1), began + 110, began + 110, 0.0)


def test_a_time_in_which_all_was_stopped_is_not_of_its_loading(held: Held) -> None:
    began = held.supervised.since
    held.supervised.excuse(began + 100, 98.0)
    held.supervised.hold_to(IDLE, 0.0, began + 102)
    assert held.lives
    held.supervised.hold_to(IDLE, 0.0, began + 104)
    assert not held.lives


def test_a_time_in_which_all_was_stopped_is_not_of_its_end(held: Held) -> None:
    """It was asked to end, with a checkpoint, and stopped before it could."""
    began = time.monotonic()
    held.supervised.running = Running(Lease(4, 1), LATE.wall_s or 0.0, began)
    held.supervised.hold_to(LATE, 30.0, began + 1)
    assert held.theirs.poll()
    held.supervised.excuse(began + 101, 99.0)
    held.supervised.hold_to(LATE, 30.0, began + 120)
    assert held.lives
    held.supervised.hold_to(LATE, 30.0, began + 131)
    assert not held.lives


def test_a_time_in_which_all_was_stopped_is_not_of_its_leaving(held: Held) -> None:
    held.supervised.hear(Leaving(within_s=5.0))
    now = time.monotonic()
    held.supervised.excuse(now + 100, 98.0)
    held.supervised.hold_to(IDLE, 0.0, now + 101)
    assert held.lives
    held.supervised.hold_to(IDLE, 0.0, now + 105)
    assert not held.lives


def test_an_end_of_its_own_is_a_loss_only_if_it_held_something(held: Held) -> None:
    held.process.process.kill()
    held.process.process.join()
    verdict = held.verdict()
    assert verdict is not None
    assert (verdict.outcome, verdict.reason) == (LOST, "its worker was killed by SIGKILL")
    in_order = WorkerEnded(held.process, "its worker ended with exit code 0", in_order=True)
    assert held.supervised.verdict(in_order) is None
    held.supervised.running = Running(Lease(4, 1), 0.0, time.monotonic())
    verdict = held.supervised.verdict(in_order)
    assert verdict is not None
    assert verdict.reason == "its worker ended with exit code 0"


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


@pytest.mark.full
def test_what_a_worker_forks_ends_at_a_sigterm_from_its_first_instant_on() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert ended.stdout.split("\n") == ["15 False"] * 60 + [""]
