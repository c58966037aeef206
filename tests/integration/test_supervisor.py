"""Workers that end otherwise than they should, in real processes."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import types
from types import NoneType
from typing import Any, TypeVar

import psutil
import pytest
from optuna.trial import TrialState

from hpo.errors import StudyError
from hpo.execution.launchers.forkserver import start_fork_server
from hpo.execution.launchers.launcher import WorkerEnded
from hpo.execution.launchers.local import LocalLauncher
from hpo.execution.limits import Limits
from hpo.execution.messages import EpochsEnded, Leaving, Notice, Ready, Started, Tick
from hpo.execution.news import News
from hpo.execution.supervisor import Ending, Supervisor
from hpo.execution.upkeep import Upkeep
from hpo.execution.worker import _check_preload
from hpo.storage.ledger import Owner
from hpo.storage.outage import DatabaseError
from hpo.storage.settling import Settled
from hpo.study.folders import worker_logs
from hpo.study.open_study import OpenStudy, load_study
from hpo.study.outcome import Outcome
from hpo.study.status import study_best, study_status
from hpo.study.trial_entries import study_trials
from hpo.trial.report import TrialReport
from hpo.trial.resources import deal
from tests.support.commands import CRAWLING, make_study, wait_until
from tests.support.in_process import InProcessLauncher
from tests.support.studies import Studies

pytestmark = pytest.mark.full

FAULTS = '''
import multiprocessing
import os
import subprocess
import sys
import threading
import types
import time
from pathlib import Path

import torch
from tqdm import tqdm

from parts import Explode, load
from trainer.callbacks.mirror import Service


def vanish(code, times):
    marks = Path(__file__).parent / "marks"
    marks.mkdir(exist_ok=True)
    if len(list(marks.iterdir())) < times:
        (marks / str(len(list(marks.iterdir())))).touch()
        os._exit(code)
    return load()


class Vanish(Explode):
    """Ends its process, so many times."""

    def __init__(self, code, times):
        super().__init__()
        vanish(code, times)


def counted():
    with (Path(__file__).parent / "loaded").open("a") as file:
        print(os.getpid(), file=file)
    return load()


def slow_data(seconds):
    time.sleep(seconds)
    return counted()


def with_thread():
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return counted()


def with_open_file():
    with_open_file.kept = open(__file__)
    return counted()


class Bar(tqdm):
    """As libraries have bars of their own, each with a thread of its own."""


def with_bar():
    for bar in (tqdm, Bar):
        for _ in bar([1, 2]):
            pass
    return counted()


class Unseen(Explode):
    """Trains, and its tracker does not answer."""

    def __init__(self):
        super().__init__()
        Service("Tracker").failed("this run is not shown in Tracker", "no route\\nto it")


def pooled():
    for _ in range(5):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(abs, [1, 2])
    return load()


class Hang(Explode):
    """Works for some batches, then does something else, in the trials that have this hidden size."""

    def __init__(self, do, batches=2):
        super().__init__()
        self.do, self.left = do, batches

    def forward(self, outputs, targets):
        if outputs.requires_grad:
            self.left -= 1
        if self.left < 0:
            getattr(self, self.do)()
        return super().forward(outputs, targets)

    def sleep(self):
        time.sleep(600)

    def deaf(self):
        subprocess.run([sys.executable, "-c", "import time; time.sleep(600)", __file__])

    def eat(self):
        self.kept = bytearray(700_000_000)
        time.sleep(600)

    def device_memory(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Small(Explode):
    """A device on which batches of more than four samples do not fit."""

    def forward(self, outputs, targets):
        if len(outputs) > 4 and outputs.requires_grad:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(outputs)} GiB.")
        return super().forward(outputs, targets)


class First(Explode):
    """Trains in the first trial, and fails in the others once that trains."""

    def __init__(self):
        super().__init__()
        self.begun = Path(__file__).parent / "begun"
        try:
            (Path(__file__).parent / "first").touch(exist_ok=False)
        except FileExistsError:
            while not self.begun.exists():
                time.sleep(0.01)
            raise ValueError("no room left")

    def forward(self, outputs, targets):
        self.begun.touch()
        return super().forward(outputs, targets)


class Pid(Explode):
    """Leaves the process's number behind, and fails in the second and fourth trial."""

    def __init__(self):
        super().__init__()
        pids = Path(__file__).parent / "pids"
        with pids.open("a") as file:
            print(os.getpid(), os.getppid(), file=file)
        if len(pids.read_text().splitlines()) in (2, 4):
            raise ValueError("no room left")
'''

T = TypeVar("T")


def supervise(
    studies: Studies,
    *overrides: str,
    workers: int = 1,
    timeout: float | None = None,
    grace: float = 0.5,
    until: type[Any] = NoneType,
    launch: type[Any] = LocalLauncher,
) -> tuple[Ending, list[Any]]:
    """Run the study, to its end or until a message of some kind: how it ended, and what was heard.

    With `InProcessLauncher` where no process is the point.
    """

    def hear(_: str, said: object) -> None:
        heard.append(said)
        if isinstance(said, until):
            raise BrokenPipeError  # as when the reader has ended

    (studies.folder / "faults.py").write_text(FAULTS)
    heard: list[Any] = []
    with studies.open("trainer.max_epochs=1", "study.n_trials=3", *overrides) as (view,):
        slots = deal(["cpu"], workers)
        if launch is LocalLauncher:
            start_fork_server(view.spec)
        supervisor = Supervisor(view, launch(slots, worker_logs(view.spec)), hear, timeout, grace)
        return supervisor.run(), heard


def of(kind: type[T], heard: list[Any]) -> list[T]:
    return [message for message in heard if isinstance(message, kind)]


def status(studies: Studies, *overrides: str) -> dict[str, Any]:
    with studies.open("trainer.max_epochs=1", "study.n_trials=3", *overrides) as (view,):
        return study_status(view)


def test_every_trial_is_announced_and_reported(studies: Studies) -> None:
    ending, heard = supervise(studies, launch=InProcessLauncher)
    assert ending is Ending.DONE
    kinds = [type(message) for message in heard if not isinstance(message, Tick)]
    assert kinds == [Started, EpochsEnded, TrialReport] * 3
    for message in of(EpochsEnded, heard):
        (report,) = [each for each in of(TrialReport, heard) if each.number == message.number]
        assert (message.first, message.values, message.max_epochs) == (1, (report.value,), 1)
        assert (message.predicted, message.resumed) == (None, False)
    assert of(Tick, heard)
    assert [message.number for message in heard if isinstance(message, Started)] == [0, 1, 2]
    assert all(message.outcome == Outcome.COMPLETE for message in heard if isinstance(message, TrialReport))


def test_each_epoch_is_told_once_and_a_resumed_trials_curve_again(studies: Studies) -> None:
    overrides = ("trainer.max_epochs=8", "study.n_trials=1", "loader.batch_size=1")
    make_study(studies.folder, code=CRAWLING)
    _, first = supervise(studies, *overrides, until=EpochsEnded, launch=InProcessLauncher)
    (studies.folder / "go").touch()
    _, second = supervise(studies, *overrides, launch=InProcessLauncher)
    new, again = [], []
    for message in [*of(EpochsEnded, first), *of(EpochsEnded, second)]:
        numbers = range(message.first, message.first + len(message.values))
        (again if message.resumed else new).extend(numbers)
        assert message.max_epochs == 8
    assert new == list(range(1, 9))
    assert 0 < len(again) < 8
    assert again == list(range(1, len(again) + 1))


def test_training_does_not_wait_for_a_supervisor_that_does_not_listen() -> None:
    """With the channel full, news wait; what was not sent in time is sent at the end, nothing twice."""
    ours, theirs = multiprocessing.Pipe()
    news = News(theirs, 3, "val_loss")
    state: Any = types.SimpleNamespace(max_epochs=100_000, history=[], resumed_at=0)
    news.follow(state, 0.0)
    for epoch in range(1, 60_001):
        state.history.append({"val_loss": float(epoch), "predicted_final_loss": 0.5})
        news.follow(state, float(epoch))
    heard: list[EpochsEnded] = []
    reader = threading.Thread(target=_read_all, args=(ours, heard))
    reader.start()
    news.finish()
    theirs.close()
    reader.join()
    values = [value for message in heard for value in message.values]
    assert values == [float(epoch) for epoch in range(1, 60_001)]
    assert {(message.number, message.predicted) for message in heard} == {(3, 0.5)}
    assert max(len(message.values) for message in heard) > 1, "the channel was never full"


def _read_all(channel: Any, heard: list[Any]) -> None:
    with contextlib.suppress(EOFError):
        while True:
            heard.append(channel.recv())


def test_a_worker_that_leaves_inside_a_trial_is_replaced_even_if_it_leaves_in_order(studies: Studies) -> None:
    override = "loss={_target_: faults.Vanish, code: 0, times: 2}"
    ending, heard = supervise(studies, override)
    assert ending is Ending.DONE
    assert [message.number for message in of(Started, heard)] == [0, 0, 0, 1, 2]
    assert [(each.number, each.attempt, each.reason) for each in of(Settled, heard)] == [
        (0, 1, "its worker ended with exit code 0"),
        (0, 2, "its worker ended with exit code 0"),
    ]
    shown = status(studies, override)
    assert (shown["finished"], shown["running"]) == (3, 0)


def test_a_trial_that_kills_its_workers_comes_to_its_end_before_the_study_does(studies: Studies) -> None:
    override = "loss={_target_: faults.Vanish, code: 1, times: 4}"
    ending, heard = supervise(studies, override)
    assert ending is Ending.DONE
    assert [each.state.name for each in of(Settled, heard)] == ["WAITING"] * 3 + ["FAIL"]
    outcomes = status(studies, override)["outcomes"]
    assert (outcomes["lost"], outcomes["complete"]) == (1, 2)


def test_a_pool_of_a_studys_own_ends_in_a_worker(studies: Studies) -> None:
    overrides = ("data={_target_: faults.pooled}", "run.no_progress_timeout=60")
    supervise(studies, *overrides)
    assert status(studies, *overrides)["outcomes"]["complete"] == 3


def test_data_that_ends_the_process_is_no_trials_fault(studies: Studies) -> None:
    override = "data={_target_: faults.vanish, code: 7, times: 100}"
    with pytest.raises(StudyError, match=r"4 workers died.*\n.*its worker ended with exit code 7"):
        supervise(studies, override)
    assert status(studies, override)["finished"] == 0


def test_data_that_takes_longer_than_a_batch_may_ends_the_study_and_no_trial(studies: Studies) -> None:
    overrides = ("data={_target_: faults.slow_data, seconds: 600}", "run.no_progress_timeout=1")
    with pytest.raises(StudyError, match="while it loaded the study's modules and data, no batch was finished"):
        supervise(studies, *overrides, "run.max_retries=0")
    assert status(studies, *overrides)["finished"] == 0


@pytest.mark.parametrize(("data", "left"), [("with_thread", "thread Thread-1"), ("with_open_file", "open file /")])
def test_a_worker_that_can_not_be_forked_runs_one_trial_itself(
    studies: Studies, data: str, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpo.execution.supervisor._LONG_LOADING", 0.0)
    overrides = ("loss={_target_: faults.Pid}", f"data={{_target_: faults.{data}}}", "study.n_trials=3")
    ending, heard = supervise(studies, *overrides)
    assert ending is Ending.DONE
    assert [each.outcome for each in of(TrialReport, heard)] == ["complete", "error", "complete"]
    pids = [line.split()[0] for line in (studies.folder / "pids").read_text().splitlines()]
    assert pids == (studies.folder / "loaded").read_text().split()
    assert len(set(pids)) == 3
    (said,) = (notice.text for notice in of(Notice, heard) if "anew" in notice.text)
    assert f"these leave behind {left}" in said


def test_a_tracker_that_lacks_the_trials_is_said_once(studies: Studies) -> None:
    ending, heard = supervise(studies, "loss={_target_: faults.Unseen}", workers=2)
    assert ending is Ending.DONE
    assert len(of(TrialReport, heard)) == 3
    (said,) = (notice.text for notice in of(Notice, heard) if "Tracker" in notice.text)
    assert re.fullmatch(r"trial \d: this run is not shown in Tracker: no route", said)


def test_workers_that_die_again_and_again_stop_the_study(studies: Studies) -> None:
    see = r"8 workers died without a trial finished(.*\n)+ *fix: see .*/logs/.*-worker-[12]\.log"
    with pytest.raises(StudyError, match=see):
        supervise(studies, "data={_target_: faults.vanish, code: 1, times: 99}", workers=2)


def test_workers_whose_logs_can_not_be_written_stop_the_study(studies: Studies) -> None:
    (studies.folder / "runs" / "tiny").mkdir(parents=True)
    (studies.folder / "runs" / "tiny" / "logs").write_text("in the way of the workers' logs")
    said = r"the first 3 workers failed alike:\n  its log .*-worker-[12]\.log can't be written: File exists\n"
    with pytest.raises(StudyError, match=said):
        supervise(studies, "run.storage=sqlite:///other.db", workers=2)


def test_a_study_whose_first_trials_fail_alike_stops_with_the_error(studies: Studies) -> None:
    with pytest.raises(StudyError, match="the first 3 trials failed alike:\n  RuntimeError: the data is broken"):
        supervise(studies, "data.broken=true", launch=InProcessLauncher)


def test_a_study_that_fails_keeps_what_a_trial_has_trained_of_its_epoch(studies: Studies) -> None:
    overrides = ("loss={_target_: faults.First}", "model.delay=0.2", "loader.batch_size=1", "study.n_trials=9")
    with pytest.raises(StudyError, match="the first 3 trials failed alike:\n  ValueError: no room left"):
        supervise(studies, *overrides, workers=2, grace=60)
    assert status(studies, *overrides)["running"] == 0
    assert len(list(studies.folder.rglob("checkpoints/*.pt"))) == 1


def test_trials_that_fail_after_one_has_succeeded_stop_nothing(studies: Studies) -> None:
    space = "search_space={loss.fail: {type: categorical, choices: [false, true]}}"
    ending, heard = supervise(
        studies, space, "study.sampler=grid", "study.sampler.seed=3", launch=InProcessLauncher
    )
    assert ending is Ending.DONE
    assert len(of(TrialReport, heard)) == 2


def commands() -> list[str]:
    return [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]


@pytest.mark.parametrize("do", ["sleep", "deaf"])
def test_a_trial_that_hangs_is_ended_with_all_its_processes(studies: Studies, do: str) -> None:
    hang = f"loss={{_target_: faults.Hang, do: {do}}}"
    ending, heard = supervise(studies, hang, "run.no_progress_timeout=3", "study.n_trials=1")
    assert ending is Ending.DONE
    (settled,) = of(Settled, heard)
    assert (settled.state, settled.outcome) == (TrialState.FAIL, Outcome.TIMED_OUT)
    assert settled.reason == "no batch was finished within no_progress_timeout, 3 s"
    with studies.open("trainer.max_epochs=1", "study.n_trials=1", hang) as (view,):
        (trial,) = view.study.get_trials()
        (entry,) = study_trials(view)
    assert trial.user_attrs["hpo:reason"] == settled.reason
    assert entry["outcome"] == "timed_out"
    wait_until(lambda: not [each for each in commands() if str(studies.folder) in each])


def test_a_trial_that_was_stopped_with_its_supervisor_has_not_hung(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all of an agent is where its container is frozen, or its job suspended."""
    wait = LocalLauncher.wait

    def stopped(launcher: LocalLauncher, seconds: float, wake: socket.socket) -> bool:
        trials = [worker.trial_pid for worker in launcher._workers if worker.trial_pid and worker.held]
        if not trials or slept:
            return wait(launcher, seconds, wake)
        slept.append(trials)
        for trial in trials:
            os.kill(trial, signal.SIGSTOP)
        time.sleep(8)
        threading.Timer(2, lambda: [os.kill(trial, signal.SIGCONT) for trial in trials]).start()
        return wait(launcher, 0.0, wake)

    slept: list[list[int]] = []
    monkeypatch.setattr(LocalLauncher, "wait", stopped)
    overrides = ("model.delay=0.2", "run.no_progress_timeout=5", "study.n_trials=1")
    ending, heard = supervise(studies, *overrides)
    assert ending is Ending.DONE
    assert slept
    (report,) = of(TrialReport, heard)
    assert report.outcome == Outcome.COMPLETE


def test_a_trial_that_takes_too_long_ends_with_a_checkpoint(studies: Studies) -> None:
    overrides = ("model.delay=0.05", "trainer.max_epochs=1000", "study.n_trials=1")
    _, heard = supervise(studies, *overrides, "run.trial_timeout=1", grace=60, launch=InProcessLauncher)
    (report,) = of(TrialReport, heard)
    assert report.outcome == Outcome.TIMED_OUT
    assert report.reason == "it took longer than trial_timeout, 1 s"
    assert list(studies.folder.rglob("checkpoints/epoch-*.pt"))


def test_time_is_counted_over_attempts(studies: Studies) -> None:
    overrides = ("model.delay=0.05", "trainer.max_epochs=1000", "study.n_trials=1", "run.trial_timeout=2.5")
    ending, _ = supervise(studies, *overrides, grace=60, until=Started, launch=InProcessLauncher)
    assert ending is Ending.INTERRUPTED
    # As if the clock had been set while the attempt ran.
    with studies.open(*overrides) as (view,), view.storage.engine.begin() as conn:
        conn.exec_driver_sql("UPDATE hpo_attempts SET started_at = started_at - 36000")
    _, heard = supervise(studies, *overrides, grace=60, launch=InProcessLauncher)
    (started,) = of(Started, heard)
    assert 0 < started.spent_s < 600
    (report,) = of(TrialReport, heard)
    assert report.outcome == Outcome.TIMED_OUT


def test_a_trial_that_uses_too_much_memory_is_ended(studies: Studies) -> None:
    _, heard = supervise(
        studies, "loss={_target_: faults.Hang, do: eat}", "run.trial_memory=600MB", "study.n_trials=1"
    )
    (settled,) = of(Settled, heard)
    assert (settled.state, settled.outcome) == (TrialState.FAIL, Outcome.OUT_OF_MEMORY)
    assert "of main memory, trial_memory allows 0.559 GiB" in settled.reason


def test_a_trial_without_device_memory_fails_unless_it_may_go_on_in_parts(studies: Studies) -> None:
    small = ("loss={_target_: faults.Small}", "study.n_trials=1", "trainer.max_epochs=2")
    _, heard = supervise(studies, *small, launch=InProcessLauncher)
    assert [report.outcome for report in of(TrialReport, heard)] == [Outcome.OUT_OF_MEMORY]
    _, heard = supervise(
        studies, *small, "study.n_trials=2", "run.on_oom=retry_with_accumulation", launch=InProcessLauncher
    )
    reports = of(TrialReport, heard)
    assert [(each.number, each.outcome) for each in reports] == [(1, None), (1, None), (1, Outcome.COMPLETE)]
    assert "it resumes with each batch in 4 parts" in reports[1].reason


def test_batches_that_can_not_be_cut_any_further_are_the_end(studies: Studies) -> None:
    overrides = ("loss={_target_: faults.Hang, do: device_memory, batches: 0}", "study.n_trials=1")
    _, heard = supervise(
        studies, *overrides, "loader.batch_size=2", "run.on_oom=retry_with_accumulation", launch=InProcessLauncher
    )
    reports = of(TrialReport, heard)
    assert [each.outcome for each in reports] == [None, Outcome.OUT_OF_MEMORY]
    assert "its batches can't be cut any further" in reports[-1].reason


@pytest.mark.parametrize("data", ["counted", "with_bar"])
def test_each_trial_has_a_process_of_its_own_and_all_share_a_worker_that_loaded_the_data_once(
    studies: Studies,
    data: str,
) -> None:
    overrides = ("loss={_target_: faults.Pid}", f"data={{_target_: faults.{data}}}", "study.n_trials=6")
    ending, _ = supervise(studies, *overrides)
    assert ending is Ending.DONE
    assert status(studies, *overrides)["outcomes"]["error"] == 2
    pids, parents = zip(
        *(line.split() for line in (studies.folder / "pids").read_text().splitlines()), strict=True
    )
    assert len(set(pids)) == 6
    assert set(parents) == set((studies.folder / "loaded").read_text().split())
    assert len(set(parents)) == 1


def test_trials_that_run_elsewhere_are_waited_for_and_taken_over(studies: Studies) -> None:
    """The other worker is silent, on another machine; its trial comes here after the grace."""
    overrides = ("study.n_trials=2", "run.lost_after=3")
    with studies.open("trainer.max_epochs=1", *overrides) as (view,):
        far = dataclasses.replace(Owner.current(worker="far"), host="elsewhere")
        other = load_study(view.spec, far)
        assert other.study.ask().number == 0
        ending, heard = supervise(studies, *overrides, launch=InProcessLauncher)
        assert ending is Ending.DONE
        assert {notice.text for notice in of(Notice, heard)} <= {"waiting for 1 trial elsewhere"}
        assert [(each.number, each.state) for each in of(Settled, heard)] == [(0, TrialState.WAITING)]
        assert sorted(message.number for message in of(Started, heard)) == [0, 1]
        other.storage.close()


def test_output_whose_reader_is_gone_interrupts_the_trials(studies: Studies) -> None:
    def closed(_: str, message: object) -> None:
        if isinstance(message, Started):
            raise BrokenPipeError

    overrides = ("trainer.max_epochs=100", "model.delay=0.05")
    with studies.open(*overrides) as (view,):
        ending = Supervisor(view, InProcessLauncher(deal(["cpu"], 2), worker_logs(view.spec)), closed).run()
        assert ending is Ending.INTERRUPTED
        assert study_status(view)["running"] == 0


def test_workers_that_load_data_are_not_waited_for_at_the_end(studies: Studies) -> None:
    ending, _ = supervise(studies, "data={_target_: faults.slow_data, seconds: 25}", workers=2, timeout=1.0)
    assert ending is Ending.TIMEOUT
    assert not (studies.folder / "loaded").exists()


def test_a_timeout_puts_running_trials_down(studies: Studies) -> None:
    overrides = ("model.delay=0.3", "trainer.max_epochs=1000")
    ending, _ = supervise(studies, *overrides, timeout=0.5, launch=InProcessLauncher)
    assert ending is Ending.TIMEOUT
    shown = status(studies, *overrides)
    assert (shown["running"], shown["finished"]) == (0, 0)


@pytest.mark.parametrize("ending", [Ending.INTERRUPTED, Ending.STOPPED, Ending.GOAL, Ending.IDLE])
def test_a_time_limit_that_passes_while_workers_leave_is_not_why_they_leave(
    studies: Studies, ending: Ending
) -> None:
    with studies.open() as (view,):
        launcher = LocalLauncher(deal(["cpu"], 1), worker_logs(view.spec))
        supervisor = Supervisor(view, launcher, lambda *_: None, timeout=0.0)
        supervisor._ask_to_stop(ending)
        supervisor._tick()
        assert supervisor._ending is ending


def test_workers_that_are_stopped_immediately_are_heard_as_any(studies: Studies) -> None:
    """That they are ready, or leave, is of no use to who listens."""
    heard: list[Any] = []
    with studies.open("trainer.max_epochs=1", "study.n_trials=3") as (view,):
        launcher = InProcessLauncher(deal(["cpu"], 1), worker_logs(view.spec))
        supervisor = Supervisor(view, launcher, lambda _, said: heard.append(said))
        supervisor._refill()
        supervisor._kill_all()
    assert not of(Ready, heard) + of(Leaving, heard)


def test_a_second_ctrl_c_does_not_wait_for_a_process_that_lives_on_nor_gives_its_trial_to_others(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in an uninterruptible sleep is one that no signal ends."""
    overrides = ("model.delay=0.3", "trainer.max_epochs=1000")
    monkeypatch.setattr("hpo.execution.launchers.local._PATIENCE", 0.2)
    heard: list[Any] = []
    with studies.open(*overrides) as (view,):
        start_fork_server(view.spec)
        launcher = LocalLauncher(deal(["cpu"], 1), worker_logs(view.spec))
        supervisor = Supervisor(view, launcher, lambda _, said: heard.append(said))

        def insist(signals: object) -> None:
            launcher.wait(1.0, wake)
            supervisor._take_changes()
            if of(EpochsEnded, heard):
                supervisor._hear_signals(types.SimpleNamespace(take=lambda: None, insisted=True))

        monkeypatch.setattr(supervisor, "_wait", insist)
        with monkeypatch.context() as patch:
            patch.setattr("hpo.execution.launchers.local.kill_group", lambda *_, **__: None)
            wake, waker = socket.socketpair()
            with wake, waker:
                assert supervisor.run() is Ending.INTERRUPTED
            (worker,) = [each.worker for each in supervisor._workers.values()]
            assert view.requeue_dead() == []
            assert [trial.state for trial in view.study.get_trials()] == [TrialState.RUNNING]
        said = [each.text for each in of(Notice, heard)]
        assert [text for text in said if f"process {worker.pid} lives on: it waits inside the kernel" in text]
        worker.kill()
        wait_until(lambda: [each for each in launcher.changes() if isinstance(each, WorkerEnded)])
        assert [each.state for each in view.requeue_dead()] == [TrialState.WAITING]


def test_a_first_ctrl_c_does_not_wait_for_a_process_that_was_killed_for_a_limit_and_lives_on(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpo.execution.launchers.local._PATIENCE", 0.2)
    heard: list[Any] = []
    signals: Any = types.SimpleNamespace(take=lambda: None, insisted=False)
    with studies.open("model.delay=0.3", "trainer.max_epochs=1000") as (view,):
        start_fork_server(view.spec)
        launcher = LocalLauncher(deal(["cpu"], 1), worker_logs(view.spec))
        supervisor = Supervisor(view, launcher, lambda _, said: heard.append(said))

        def hear(_: object) -> None:
            assert supervisor._ending is Ending.DONE, "it waits"
            launcher.wait(1.0, wake)
            supervisor._take_changes()
            if of(EpochsEnded, heard):
                for worker in supervisor._workers.values():
                    worker.hold_to(Limits(wall_s=0.0), 0.0, time.monotonic())
                supervisor._hear_signals(signals)

        monkeypatch.setattr(supervisor, "_wait", hear)
        wake, waker = socket.socketpair()
        with monkeypatch.context() as patch, wake, waker:
            patch.setattr("hpo.execution.launchers.local.kill_group", lambda *_, **__: None)
            patch.setattr("hpo.execution.launchers.local.LocalWorker.ask", lambda *_: None)
            assert supervisor.run() is Ending.INTERRUPTED
        (worker,) = [each.worker for each in supervisor._workers.values()]
        assert [each for each in of(Notice, heard) if f"process {worker.pid} lives on" in each.text]
        worker.kill()


def test_a_worker_without_the_preload_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hpo.execution.launchers.preload", raising=False)
    with pytest.raises(RuntimeError, match="could not import its preload"):
        _check_preload()


def test_a_database_that_fails_while_the_quota_is_looked_at_is_no_matter_of_the_quota(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: OpenStudy) -> None:
        raise DatabaseError("the disk of the database is full")

    monkeypatch.setattr("hpo.execution.upkeep.enforce_quota", fails)
    with studies.open() as (view,), pytest.raises(DatabaseError):
        Upkeep(view, lambda *_: pytest.fail("that is no notice")).look(time.monotonic())


def test_checkpoints_above_the_quota_go_while_the_study_runs(studies: Studies) -> None:
    overrides = ("study.n_trials=4", "trainer.max_epochs=4", "model.delay=0.04", "run.keep_best=1")
    _, heard = supervise(studies, *overrides, "run.disk_quota=90kB", "run.lost_after=3", launch=InProcessLauncher)
    said = [notice.text for notice in of(Notice, heard)]
    assert [text for text in said if text.startswith("disk_quota: removed ")]
    complete = [report.number for report in of(TrialReport, heard)]
    left = {int(path.parts[-4]) for path in studies.folder.rglob("checkpoints/*.pt")}
    assert left < set(complete)
    with studies.open(*overrides) as (view,):
        best = study_best(view)
    assert best["trial"] in left


def test_an_agent_leaves_where_it_was_idle_at_two_looks_and_between(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single look, long after the one before, may find a trial just taken, whose worker has yet to say so."""
    with studies.open() as (view,):
        launcher = LocalLauncher(deal(["cpu"], 1), worker_logs(view.spec))
        supervisor = Supervisor(view, launcher, lambda *_: None, leave_when_idle=1.0)
        clock = types.SimpleNamespace(monotonic=lambda: now)
        monkeypatch.setattr("hpo.execution.supervisor.time", clock)
        for now, claimable, ending in [
            (100.0, False, Ending.DONE),
            (100.9, False, Ending.DONE),
            (101.5, True, Ending.DONE),
            (200.0, False, Ending.DONE),
            (201.1, False, Ending.IDLE),
        ]:
            monkeypatch.setattr(supervisor._upkeep, "is_claimable_or_unknown", lambda value=claimable: value)
            supervisor._leave_if_idle()
            assert supervisor._ending is ending, now
