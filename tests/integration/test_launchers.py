"""What every launcher does: one suite for processes and for threads of this process."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from optuna.trial import TrialState

from hpo.config.spec import load_spec
from hpo.execution import launchers
from hpo.execution.beating import AgentBeats
from hpo.execution.launchers.forkserver import start_fork_server
from hpo.execution.launchers.launcher import Launcher, Said, Worker, WorkerEnded
from hpo.execution.launchers.local import LocalLauncher
from hpo.execution.messages import End, EpochsEnded, Failed, Leaving, Lost, Message, Order, Ready, Started, Stop
from hpo.execution.supervisor import Ending, Supervisor
from hpo.storage import machine
from hpo.storage.ledger import Attempt
from hpo.storage.machine import process_start
from hpo.storage.recovery import Sightings, requeue_dead, settle_process
from hpo.storage.settling import LOST, Verdict
from hpo.study.folders import worker_logs
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome
from hpo.trial.report import TrialReport
from hpo.trial.resources import deal
from tests.support.commands import wait_until
from tests.support.in_process import InProcessLauncher
from tests.support.studies import Studies
from tests.unit.test_architecture import MODULES, imports

pytestmark = pytest.mark.full

FAULTS = """
import os
import signal

from optuna.exceptions import StorageInternalError

from parts import Explode

os.write(2, b"faults has been imported\\n")


class End(Explode):
    'Does something to the worker.'

    def __init__(self, do):
        super().__init__()
        self.do = do

    def forward(self, outputs, targets):
        getattr(self, self.do)()

    def exit(self):
        os._exit(5)

    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def storage(self):
        raise StorageInternalError("the database fails")
"""

SLOW = ("model.delay=0.02", "trainer.max_epochs=1000")
T = TypeVar("T")
LAUNCHERS: dict[str, Any] = {"local": LocalLauncher, "in_process": InProcessLauncher}
#: The cause of an end by `kill`.
KILLED = {"local": "its worker was killed by SIGKILL", "in_process": "its thread ended: it was asked to leave"}


@dataclass
class Watched:
    """A launcher, and what has come from it so far."""

    launcher: Launcher
    view: OpenStudy
    wake: socket.socket
    workers: list[Worker] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    ended: list[WorkerEnded] = field(default_factory=list)

    def place(self, count: int) -> list[Worker]:
        placed = list(self.launcher.place(Order(self.view.spec, self.view.scheduler), count))
        self.workers += placed
        return placed

    def take(self) -> None:
        for change in self.launcher.changes():
            if isinstance(change, WorkerEnded):
                self.ended.append(change)
            else:
                assert change.worker not in [each.worker for each in self.ended], "nothing comes after its end"
                self.said.append(change)

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for changes until a condition holds."""

        def holds() -> Any:
            self.launcher.wait(1.0, self.wake)
            self.take()
            return condition()

        wait_until(holds)

    def until_ended(self) -> list[WorkerEnded]:
        self.until(lambda: len(self.ended) == len(self.workers))
        return self.ended

    def heard(self, kind: type[T], worker: Worker | None = None) -> list[T]:
        messages = [each.message for each in self.said if worker is None or each.worker is worker]
        return [message for message in messages if isinstance(message, kind)]

    def states(self) -> list[TrialState]:
        return [trial.state for trial in self.view.study.get_trials()]


@pytest.fixture(params=list(LAUNCHERS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@contextmanager
def launched(studies: Studies, kind: str, *overrides: str, slots: int = 1) -> Iterator[Watched]:
    """A launcher with a new study for it; nothing that it has started may be left at the end."""
    (studies.folder / "faults.py").write_text(FAULTS)
    with studies.open("trainer.max_epochs=1", "study.n_trials=4", *overrides) as (view,):
        start_fork_server(view.spec)
        wake, waker = socket.socketpair()
        with wake, waker:
            watched = Watched(LAUNCHERS[kind](deal(["cpu"], slots), worker_logs(view.spec)), view, wake)
            try:
                yield watched
            finally:
                for worker in watched.workers:
                    worker.kill()
        watched.take()
        assert len(watched.ended) == len(watched.workers)
        assert all(process_start(worker.pid) is None for worker in watched.workers if worker.pid != os.getpid())
        assert not [each.name for each in threading.enumerate() if each.name.startswith("worker-")]
        assert watched.launcher.room == slots


def test_workers_load_take_trials_and_end_in_order(studies: Studies, kind: str) -> None:
    with launched(studies, kind, slots=3) as watched:
        assert watched.launcher.room == 3
        first, second = watched.place(2)
        assert watched.launcher.room == 1
        assert first.label != second.label
        assert [each.cause for each in watched.until_ended() if not each.in_order] == []
        assert watched.launcher.room == 3
        assert watched.states() == [TrialState.COMPLETE] * 4
        assert sorted(each.number for each in watched.heard(TrialReport)) == [0, 1, 2, 3]
        for worker in (first, second):
            ready, *trials, leaving = watched.heard(object, worker)
            assert (type(ready), type(leaving)) == (Ready, Leaving)
            assert [type(each) for each in trials] == [Started, EpochsEnded, TrialReport] * (len(trials) // 3)
            numbers = [each.number for each in trials if isinstance(each, Started | EpochsEnded | TrialReport)]
            assert numbers == [number for number in numbers[::3] for _ in range(3)]


def test_there_is_room_for_one_worker_in_each_slot(studies: Studies, kind: str) -> None:
    with launched(studies, kind, "study.n_trials=1", slots=2) as watched:
        assert not watched.place(0)
        assert len(watched.place(9)) == 2
        assert not watched.place(1)
        watched.until_ended()
        (again,) = watched.place(1)
        watched.until_ended()
        assert [type(each) for each in watched.heard(object, again)] == [Ready, Leaving], "no trial is left"


def test_a_worker_that_is_asked_to_leave_requeues_its_trial(studies: Studies, kind: str) -> None:
    with launched(studies, kind, *SLOW) as watched:
        (worker,) = watched.place(1)
        watched.until(lambda: watched.heard(EpochsEnded))
        assert worker.trial_pid
        worker.ask(Stop())
        (ended,) = watched.until_ended()
        assert ended.in_order
        assert worker.advanced
        assert [(each.number, each.outcome) for each in watched.heard(TrialReport)] == [(0, None)]
        assert watched.states() == [TrialState.WAITING]
        worker.ask(Stop())  # it has ended, and needs no asking


def test_drain_asks_every_worker_to_leave(studies: Studies, kind: str) -> None:
    with launched(studies, kind, *SLOW, slots=2) as watched:
        watched.place(2)
        watched.until(lambda: watched.heard(EpochsEnded))
        watched.launcher.drain()
        assert [each.cause for each in watched.until_ended() if not each.in_order] == []
        assert TrialState.RUNNING not in watched.states()


def test_a_verdict_ends_one_trial_and_not_the_worker(studies: Studies, kind: str) -> None:
    with launched(studies, kind, *SLOW, "study.n_trials=2") as watched:
        (worker,) = watched.place(1)
        watched.until(lambda: watched.heard(EpochsEnded))
        before = worker.beat
        assert worker.held is not None
        worker.ask(End(worker.held.lease, Verdict(Outcome.TIMED_OUT, "it took too long", final=True)))
        watched.until(lambda: len(watched.heard(Started)) == 2)
        assert worker.beat > before
        worker.ask(Stop())
        watched.until_ended()
        outcomes = [(each.number, each.outcome, each.reason) for each in watched.heard(TrialReport)]
        assert outcomes == [(0, Outcome.TIMED_OUT, "it took too long"), (1, None, "")]


def test_a_lost_lease_ends_its_trial_and_not_the_worker(studies: Studies, kind: str) -> None:
    with launched(studies, kind, *SLOW, "study.n_trials=2") as watched:
        (worker,) = watched.place(1)
        watched.until(lambda: watched.heard(EpochsEnded))
        assert worker.held is not None
        worker.ask(Lost(worker.held.lease))
        watched.until(lambda: len(watched.heard(Started)) == 2)
        worker.ask(Stop())
        watched.until_ended()
        assert [(each.number, each.outcome) for each in watched.heard(TrialReport)] == [(0, None), (1, None)]
        first, second = watched.view.study.get_trials()
        assert (first.state, second.state) == (TrialState.RUNNING, TrialState.WAITING), "nothing is stored for it"


def lease_of(watched: Watched, worker: Worker) -> Attempt:
    """The latest attempt at the trial that a worker holds."""
    assert worker.held is not None
    return watched.view.storage.attempts_of_trial(worker.held.lease.trial_id)[-1]


def test_a_trial_whose_supervisor_does_not_beat_beats_for_itself(studies: Studies, kind: str) -> None:
    with launched(studies, kind, *SLOW, "run.lost_after=3") as watched:
        (worker,) = watched.place(1)
        watched.until(lambda: worker.held)
        watched.until(lambda: (lease := lease_of(watched, worker)).beat_at > lease.started_at)


@pytest.mark.full
def test_a_stopped_trial_loses_its_lease_though_its_supervisor_beats(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To another machine, which sees only who beats; the trial that continues too late is dropped."""
    with launched(studies, "local", *SLOW, "run.lost_after=3", slots=2) as watched:
        view, (stopped, runs) = watched.view, watched.place(2)
        watched.until(lambda: stopped.held and runs.held and len(watched.heard(EpochsEnded)) > 1)
        lease = lease_of(watched, stopped)
        beats, sightings = AgentBeats(view.storage, None, 0.5), Sightings()

        def look() -> list[int]:
            beats.give([stopped, runs])
            with monkeypatch.context() as patch:
                patch.setattr(machine, "host_name", lambda: "another")
                settled = requeue_dead(view.storage, view.study_id, grace=3.0, sightings=sightings)
            return [each.number for each in settled]

        os.kill(stopped.trial_pid, signal.SIGSTOP)
        taken: list[int] = []
        watched.until(lambda: taken.extend(look()) or taken)
        os.kill(stopped.trial_pid, signal.SIGCONT)
        assert taken == [started.number for started in watched.heard(Started, stopped)]
        assert lease_of(watched, runs).ended_at is None
        watched.until(lambda: look() or len(watched.heard(Started, stopped)) == 2)
        assert [each.outcome for each in view.storage.attempts_of_trial(lease.trial_id)] == [LOST, None]


def test_a_kill_is_reported_with_its_cause_and_its_trial_can_be_settled(studies: Studies, kind: str) -> None:
    with launched(studies, kind, *SLOW) as watched:
        (worker,) = watched.place(1)
        watched.until(lambda: watched.heard(EpochsEnded))
        trial_pid = worker.trial_pid
        worker.kill()
        watched.take()
        (ended,) = watched.ended
        assert trial_pid == os.getpid() or process_start(trial_pid) is None
        assert (ended.worker, ended.cause) == (worker, KILLED[kind])
        settle(watched)
        assert watched.states() == [TrialState.WAITING]


def settle(watched: Watched) -> None:
    """As a supervisor does: first what it knows of the worker, then the leases that no process holds."""
    (ended,) = watched.ended
    verdict = Verdict(LOST, ended.cause)
    settle_process(watched.view.storage, watched.view.study_id, ended.worker.trial_pid, verdict)
    watched.view.requeue_dead()


@pytest.mark.parametrize(
    ("kind", "do", "cause"),
    [
        ("local", "exit", "its worker ended with exit code 5"),
        ("local", "killed", "its worker was killed by SIGKILL"),
        ("local", "storage", "its worker ended with exit code 1"),
        ("in_process", "storage", "its thread ended: it can't continue, and has sent the supervisor the reason"),
    ],
)
def test_a_worker_that_dies_by_itself_is_reported(studies: Studies, kind: str, do: str, cause: str) -> None:
    with launched(studies, kind, f"loss={{_target_: faults.End, do: {do}}}") as watched:
        watched.place(1)
        (ended,) = watched.until_ended()
        assert (ended.cause, ended.in_order) == (cause, False)
        said = [each.message for each in watched.heard(Failed)]
        assert said == ["StorageInternalError: the database fails"] * (do == "storage")
        settle(watched)
        assert watched.states() == [TrialState.WAITING]


def test_a_worker_that_can_not_begin_says_why(studies: Studies, kind: str) -> None:
    with launched(studies, kind) as watched:
        spec = load_spec(studies.folder / "study.yaml", ["study.name=other"])
        watched.workers += watched.launcher.place(Order(spec, watched.view.scheduler), 1)
        (ended,) = watched.until_ended()
        assert not ended.in_order
        (failed, leaving) = watched.heard(object)
        assert isinstance(failed, Failed)
        assert isinstance(leaving, Leaving)
        assert "there is no such database yet" in failed.message


def test_logs_are_where_the_launcher_says(studies: Studies, kind: str) -> None:
    with launched(studies, kind, "loss={_target_: faults.End, do: storage}", "study.n_trials=1") as watched:
        (worker,) = watched.place(1)
        watched.until_ended()
        log = watched.launcher.logs(worker.label)
        assert log.parent == worker_logs(watched.view.spec)
        assert "faults has been imported" in log.read_text()


def test_waiting_ends_at_a_change_at_a_wake_and_in_time(studies: Studies, kind: str) -> None:
    with launched(studies, kind, "study.n_trials=1") as watched:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert not watched.launcher.wait(0.0, ours)
            theirs.send(b"!")
            assert watched.launcher.wait(60.0, ours)
            ours.recv(1)
            watched.place(1)
            assert not watched.launcher.wait(60.0, ours)
        watched.take()
        assert watched.said


def test_a_supervisor_runs_a_study_on_it(studies: Studies, kind: str) -> None:
    heard: list[tuple[str, type[Message]]] = []
    with launched(studies, kind, slots=2) as watched:
        ending = Supervisor(
            watched.view, watched.launcher, lambda label, said: heard.append((label, type(said)))
        ).run()
        assert ending is Ending.DONE
        assert watched.states() == [TrialState.COMPLETE] * 4
        assert [said for _, said in heard].count(TrialReport) == 4


@pytest.mark.parametrize("name", ["supervisor", "supervised", "upkeep", "failures"])
def test_what_supervises_knows_no_process_pipe_or_shared_memory(name: str) -> None:
    named = {each.target for each in imports(MODULES[f"hpo.execution.{name}"])}
    assert not [each for each in named if each.startswith(("multiprocessing", "subprocess", "os"))]
    assert {each for each in named if "launchers" in each} <= {"hpo.execution.launchers.launcher"}


def test_every_launcher_is_held_by_this_suite() -> None:
    """What has all of a launcher's methods, and is not made to be completed by another class."""
    methods = {name for name in vars(Launcher) if not name.startswith("_")}
    modules = [info.name for info in pkgutil.iter_modules(launchers.__path__, f"{launchers.__name__}.")]
    found = {kind for name in modules for kind in _classes(name)}
    missing = {
        kind.__name__
        for kind in found - set(LAUNCHERS.values())
        if methods <= set(dir(kind)) and not inspect.isabstract(kind) and kind is not Launcher
    }
    assert not missing, f"add to LAUNCHERS above, so that the contract holds it: {', '.join(missing)}"


def _classes(module: str) -> set[type]:
    own = vars(importlib.import_module(module)).values()
    return {each for each in own if isinstance(each, type) and each.__module__ == module}
