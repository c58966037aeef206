"""What a worker answers the process of its trial."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpo.errors import LeaseLostError, StudyError
from hpo.execution import standby
from hpo.execution.launchers import preload  # noqa: F401 - workers look for it
from hpo.execution.messages import Failed, Ready
from hpo.execution.pulse import PROCESS, PULSE_LENGTH
from hpo.execution.standby import Processes
from hpo.execution.trial_process import Extension, GrantEnds, Over, WhyOver
from hpo.execution.worker import _Worker, work
from hpo.storage.ledger import Lease
from hpo.storage.optuna_private import known_of
from hpo.study.open_study import OpenStudy
from hpo.study.taking import Taker, begin
from hpo.trial.builder import Builder
from hpo.trial.peers import Peers
from hpo.trial.stopping import StopRequest
from tests.support.commands import PATIENCE, alive
from tests.support.studies import Studies
from tests.unit.study.test_granting import two_by_two

pytestmark = pytest.mark.full


def test_a_trial_that_was_taken_away_meanwhile_is_granted_nothing_and_ends_no_worker(studies: Studies) -> None:
    with studies.open("study.n_trials=1", "trainer.max_epochs=4", views=2) as (view, other):
        view = two_by_two(view)
        taker = Taker(view)
        lease = taker.take()
        assert isinstance(lease, Lease)
        trial = view.storage.get_trial(lease.trial_id)
        other.storage.hold(lease)
        other.storage.set_trial_intermediate_value(lease.trial_id, 2, 1.0)
        other.storage.requeue(lease.trial_id)
        assert other.storage.set_trial_state_values(lease.trial_id, trial.state)
        ours, theirs = Pipe()
        worker: Any = _Worker.__new__(_Worker)
        worker._taker, worker._opened = taker, view
        worker._extend(ours, lease, GrantEnds({3: 0.5}))
        extension = theirs.recv()
        assert isinstance(extension, Extension)
        assert extension.granted is None
        assert isinstance(extension.error, LeaseLostError)
        assert other.storage.get_trial(lease.trial_id).intermediate_values == {2: 1.0}


class Trains:
    """Completes its trial at once, as a trial's process does."""

    def __init__(self, opened: OpenStudy) -> None:
        self.opened, self.request, self.peers = opened, StopRequest(), Peers(Builder(opened.spec), ())

    def begin_fork(self) -> None:
        """It has one thread."""

    def start_device(self) -> None:
        """It has none."""

    def run(self, lease: Lease, *_: object) -> Over:
        storage = self.opened.storage
        assert storage.owner is not None
        storage.owner = storage.owner.in_process(os.getpid())
        self.opened.study.tell(begin(self.opened, lease), 1.0)
        storage.close()
        return Over(WhyOver.TRIAL)


class Kills(Taker):
    """Takes a trial, and kills the processes that were to train the first ones before they get them."""

    def __init__(self, opened: OpenStudy, pulse: list[float], killed: list[int], lost: bool) -> None:
        super().__init__(opened)
        self.pulse, self.killed, self.lost = pulse, killed, lost

    def take(self) -> Any:
        taken = super().take()
        if taken is not None and not self.killed:
            self.killed.append(int(self.pulse[PROCESS]))
            os.kill(self.killed[0], signal.SIGKILL)
            os.waitid(os.P_PID, self.killed[0], os.WEXITED | os.WNOWAIT)  # until it is gone
            if self.lost:
                assert isinstance(taken, Lease)
                self.opened.storage.requeue(taken.trial_id)
                self.opened.storage.hold(taken)
        return taken


def test_processes_beyond_the_room_end(studies: Studies) -> None:
    with studies.open() as (view,):
        trial: Any = Trains(view)
        assert view.storage.owner is not None
        with contextlib.closing(Processes(trial, view.storage.owner)) as processes:
            made, pids = [], list[int]()
            for trial_id in range(3):
                processes.standby()
                made.append(processes.take(trial_id))
                pids.append(made[-1].pid)
                processes.standby()  # forked while the other one trains
                processes.keep(trial_id, made[-1], spare=2)
            made[0].process.join(PATIENCE)
            assert [each.process.exitcode for each in made] == [0, None, None]
            assert sorted(processes.owners) == [1, 2]
            assert processes.take(2) is made[2]  # whose trial never ends
        assert not any(map(alive, pids))


def test_the_next_trial_does_not_wait_for_ever_for_a_process_that_lives_on(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that sleeps in the kernel: here no signal ends it."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(10,))
    process.start()
    with studies.open() as (view,), monkeypatch.context() as patch:
        assert view.storage.owner is not None
        asleep = standby.Standby(process, Pipe()[0], view.storage.owner)
        patch.setattr(standby, "_LINGER", 0.1)
        patch.setattr(standby, "_PATIENCE", 0.1)
        patch.setattr(standby, "kill_group", lambda *_, **__: None)
        patch.setattr(process, "kill", lambda: None)
        asleep.bury()
        assert alive(asleep.pid)
        assert process not in multiprocessing.active_children(), "an exit of Python waits for those"
    process.kill()
    process.join()


class Starts(Trains):
    """Leaves behind that it has started its device."""

    def start_device(self) -> None:
        (self.opened.spec.folder / f"started-{os.getpid()}").touch()


def test_the_next_process_starts_its_device_where_there_is_room_for_another(studies: Studies) -> None:
    with studies.open() as (view,):
        trial: Any = Starts(view)
        assert view.storage.owner is not None

        def have_started() -> list[bool]:
            """Of the processes so far; each is asked once it has come so far that it waits for a trial."""
            for each in made:
                each.line.send(None)
                each.process.join(PATIENCE)
            return [(view.spec.folder / f"started-{each.pid}").exists() for each in made]

        with contextlib.closing(Processes(trial, view.storage.owner)) as processes:
            made = []
            for spare in (
                0,
                0,
                1,
                0,
            ):  # nothing trains; what trains has not said; it has said so, and the contrary
                processes.fit(spare)
                processes.standby()
                made.append(processes.take(len(made)))
            assert have_started() == [True, False, True, False]


class DiesAtStart(Trains):
    """Its device ends each process that starts it."""

    def start_device(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Patient(Taker):
    """Takes a trial once the process that is to train it has died, the first time."""

    def __init__(self, opened: OpenStudy, pulse: list[float]) -> None:
        super().__init__(opened)
        self.pulse, self.waited = pulse, False

    def take(self) -> Any:
        if not self.waited:
            os.waitid(os.P_PID, int(self.pulse[PROCESS]), os.WEXITED | os.WNOWAIT)
            self.waited = True
        return super().take()


def test_a_device_that_kills_what_starts_it_is_left_to_the_trial(studies: Studies) -> None:
    with studies.open("study.n_trials=2") as (view,):
        pulse = [0.0] * PULSE_LENGTH
        with worker_of(view, DiesAtStart(view), Patient(view, pulse), pulse) as worker:
            assert worker.run()
        assert outcomes_of(view) == [["complete"], ["complete"]]


class Hangs(Trains):
    """Its device does not answer."""

    def start_device(self) -> None:
        signal.pause()


def test_a_device_that_does_not_answer_is_left_to_the_trial(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "_LONGEST_START", 0.5)
    with studies.open("study.n_trials=2") as (view,):
        pulse = [0.0] * PULSE_LENGTH
        with worker_of(view, Hangs(view), Taker(view), pulse) as worker:
            assert worker.run()
        assert outcomes_of(view) == [["complete"], ["complete"]]


@contextlib.contextmanager
def worker_of(view: OpenStudy, trial: Any, taker: Taker, pulse: list[float]) -> Iterator[Any]:
    """A worker without a supervisor."""
    worker: Any = _Worker.__new__(_Worker)
    channel, _supervisor = Pipe()
    wake, _waker = os.pipe()
    worker._channel, worker._wake, worker._leaving, worker._unassigned = channel, wake, False, None
    worker._pulse, worker._opened, worker._ready = pulse, view, Ready()
    worker._taker = taker
    assert view.storage.owner is not None
    worker._processes = Processes(trial, view.storage.owner)
    try:
        yield worker
    finally:
        os.close(wake)
        os.close(_waker)


def outcomes_of(view: OpenStudy) -> list[list[str | None]]:
    view.storage.owner = None
    attempts = [view.storage.attempts_of_trial(trial._trial_id) for trial in view.study.trials]
    return [[each.outcome for each in of_trial] for of_trial in attempts]


@pytest.mark.parametrize("lost", [False, True])
def test_a_process_that_dies_before_it_is_handed_a_trial_costs_no_attempt(studies: Studies, *, lost: bool) -> None:
    with studies.open("study.n_trials=2") as (view,):
        killed: list[int] = []
        pulse = [0.0] * PULSE_LENGTH
        with worker_of(view, Trains(view), Kills(view, pulse, killed, lost), pulse) as worker:
            assert worker.run()
        assert pulse[PROCESS] == 0.0
        assert outcomes_of(view) == [["requeued", "complete"] if lost else ["complete"], ["complete"]]
        attempts = [view.storage.attempts_of_trial(trial._trial_id) for trial in view.study.trials]
        assert killed[0] not in {
            each.pid for of_trial in attempts for each in of_trial if each.outcome == "complete"
        }


class Requeues(Trains):
    """Requeues its trial with an attribute, as after too little memory, and completes it where that is there."""

    def run(self, lease: Lease, *_: object) -> Over:
        storage = self.opened.storage
        assert storage.owner is not None
        storage.owner = storage.owner.in_process(os.getpid())
        trial = begin(self.opened, lease)
        if "parts" in known_of(trial).user_attrs:
            self.opened.study.tell(trial, 1.0)
        else:
            trial.set_user_attr("parts", 2)
            storage.requeue(lease.trial_id)
        storage.close()
        return Over(WhyOver.TRIAL)


def test_a_process_that_was_forked_while_a_trial_trained_knows_what_that_has_stored(studies: Studies) -> None:
    with studies.open("study.n_trials=2") as (view,):
        pulse = [0.0] * PULSE_LENGTH
        with worker_of(view, Requeues(view), Taker(view), pulse) as worker:
            assert worker.run()
        assert outcomes_of(view) == [["requeued", "complete"]] * 2


def test_a_worker_whose_log_can_not_be_written_says_what_it_died_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise StudyError("the disk is full")

    monkeypatch.setattr(_Worker, "__init__", fails)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)  # as outside of tests
    assert said_with_log("/dev/full") == Failed("the disk is full", final=False)


def test_a_worker_whose_log_can_not_be_opened_says_so() -> None:
    said = Failed("its log /dev/null/logs/worker.log can't be written: Not a directory", final=False)
    assert said_with_log("/dev/null/logs/worker.log") == said


def said_with_log(log: str) -> Any:
    """What a worker with this log says first, which has ended."""
    ours, theirs = Pipe()
    order: Any = SimpleNamespace(slot=SimpleNamespace(visible=None), log=Path(log))
    process = multiprocessing.get_context("fork").Process(target=work, args=(order, theirs, None))
    process.start()
    process.join()
    assert process.exitcode == 1
    assert ours.poll(0)
    return ours.recv()
