"""Whole studies whose trials are all paused and resumed, in real processes: no trial changes by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import NoneType
from typing import Any

import pytest
import torch
from optuna.trial import TrialState

from hpo.execution.launchers.forkserver import start_fork_server
from hpo.execution.launchers.local import LocalLauncher
from hpo.execution.supervisor import Ending, Supervisor
from hpo.search.schedulers.scheduler import Scheduler
from hpo.storage.attributes import PAUSE_AT_ATTR
from hpo.storage.settling import Settled
from hpo.study.folders import attempt_folders, worker_logs
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import outcome_of
from hpo.study.status import study_status
from hpo.trial.report import TrialReport
from hpo.trial.resources import deal
from tests.support.commands import alive
from tests.support.pausing import PauseAll
from tests.support.studies import Studies
from trainer.checkpoint.manager import newest_checkpoint

pytestmark = pytest.mark.full

_EPOCHS = 5
_TRIALS = 4
_OVERRIDES = (f"study.n_trials={_TRIALS}", f"trainer.max_epochs={_EPOCHS}", "run.max_retries=100")

#: Kills its process once a trial at each of the instants where a pause is hardest to get right.
MINES = '''
import os
import signal
from pathlib import Path

from trainer.callback import Callback


class Mine(Callback):
    """Ends its process once a trial at the end of the epoch that pauses, at the end of that fit, and after it."""

    def __init__(self, priority):
        self.priority = priority

    def _once(self, trainer, hook):
        trial = f"{float(trainer.optimizer.param_groups[0]['initial_lr'])}"
        mark = Path(__file__).parent / f"mark-{self.priority}-{hook}-{trial}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_start(self, trainer):
        if trainer.state.epoch == 2:
            self._once(trainer, "start")

    def on_epoch_end(self, trainer):
        if trainer.state.epoch == 2:
            self._once(trainer, "epoch")

    def on_fit_end(self, trainer):
        if trainer.state.epoch == 2:
            self._once(trainer, "end")
'''
#: One leaves a child running in each process, the other kills the first trial's process where it is kept.
SPOILERS = """
import os
import signal
import subprocess
import time
from pathlib import Path

from trainer.callback import Callback

PIDS = Path(__file__).parent / "pids"


def note(pid):
    with PIDS.open("a") as file:
        file.write(f"{pid}\\n")


class LeavesChild(Callback):
    def on_fit_start(self, trainer):
        note(subprocess.Popen(["sleep", "600"]).pid)


class KillsKept(Callback):
    def on_fit_start(self, trainer):
        note(os.getpid())
        pids = list(map(int, PIDS.read_text().split()))
        if len(pids) == 2:  # the second trial's; the first one has paused
            os.kill(pids[0], signal.SIGKILL)
"""
_MINED = (
    "callbacks.before_the_checkpoint._target_=mines.Mine",
    "callbacks.before_the_checkpoint.priority=86",
    "callbacks.after_the_checkpoint._target_=mines.Mine",
    "callbacks.after_the_checkpoint.priority=97",
)


def run(
    view: OpenStudy, scheduler: Scheduler | None, workers: int, *, until: type[Any] = NoneType, **options: Any
) -> tuple[Ending, list[Any]]:
    """Run a study to its end, or until a message of some kind; how it ended, and what was heard."""

    def hear(_: str, message: object) -> None:
        heard.append(message)
        if isinstance(message, until):
            raise BrokenPipeError  # as when the reader has ended

    heard: list[Any] = []
    view = view if scheduler is None else dataclasses.replace(view, scheduler=scheduler)
    start_fork_server(view.spec)
    launcher = LocalLauncher(deal(["cpu"], workers), worker_logs(view.spec))
    return Supervisor(view, launcher, hear, **options).run(), heard


def results(view: OpenStudy) -> dict[int, dict[str, Any]]:
    """All that is known of each trial's training at its end."""
    found = {}
    for trial in view.study.get_trials():
        folders = [folder / "checkpoints" for folder in attempt_folders(view.spec, trial.number)]
        newest = newest_checkpoint(folders, "cpu")
        assert newest is not None
        found[trial.number] = {
            "params": trial.params,
            "values": trial.values,
            "reported": trial.intermediate_values,
            "outcome": outcome_of(trial),
            "history": newest[1]["state"]["history"],
            "model": newest[1]["model"],
            "optimizer": newest[1]["optimizer"]["state"],
            "scheduler": newest[1]["scheduler"],
        }
    return found


def equal(left: Any, right: Any) -> bool:
    """Whether all is the same, tensors bit by bit."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(equal(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(equal(*pair) for pair in zip(left, right, strict=True))
    return bool(left == right)


def resumed_in_order(view: OpenStudy) -> list[int]:
    """Trials by when each was first taken after it had been paused."""
    first: dict[int, float] = {}
    for trial in view.study.get_trials(deepcopy=False):
        history = view.storage.attempts_of_trial(trial._trial_id)
        pauses = [each.attempt for each in history if each.outcome == "paused"]
        first[trial.number] = next(each.started_at for each in history if each.attempt > pauses[0])
    return sorted(first, key=lambda number: first[number])


@pytest.fixture(scope="module")
def without_pauses(tmp_path_factory: pytest.TempPathFactory, ready_sqlite_file: Any) -> dict[int, dict[str, Any]]:
    """The same study's trials, trained through."""
    studies = Studies(tmp_path_factory.mktemp("whole"), ready_sqlite_file)
    with studies.open(*_OVERRIDES) as (view,):
        assert run(view, None, 1)[0] is Ending.DONE
        return results(view)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_paused_trial_comes_to_the_same_bits(
    workers: int, studies: Studies, without_pauses: dict[int, dict[str, Any]]
) -> None:
    with studies.open(*_OVERRIDES) as (view,):
        ending, heard = run(view, PauseAll(), workers)
        assert ending is Ending.DONE
        assert equal(results(view), without_pauses)
        assert resumed_in_order(view) == list(range(_TRIALS))[::-1] or workers > 1
        for trial in view.study.get_trials():
            attempts = view.storage.attempts_of_trial(trial._trial_id)
            assert [each.outcome for each in attempts] == ["paused", "complete"]
            # One worker has it resume in its own process, which was kept.
            assert len({each.pid for each in attempts}) == 1 or workers > 1
            assert PAUSE_AT_ATTR not in trial.user_attrs
    paused = [each for each in heard if isinstance(each, TrialReport) and each.paused]
    assert sorted((each.number, each.epochs) for each in paused) == [(number, 2) for number in range(_TRIALS)]


@pytest.mark.parametrize("callback", ["LeavesChild", "KillsKept"])
def test_a_trial_whose_process_is_gone_resumes_in_another(
    callback: str, studies: Studies, without_pauses: dict[int, dict[str, Any]]
) -> None:
    (studies.folder / "spoilers.py").write_text(SPOILERS)
    with studies.open(*_OVERRIDES, f"callbacks.spoiler._target_=spoilers.{callback}") as (view,):
        ending, heard = run(view, PauseAll(), 1)
        assert ending is Ending.DONE
        assert equal(results(view), without_pauses)
        attempts = [view.storage.attempts_of_trial(trial._trial_id) for trial in view.study.get_trials()]
    for both in attempts:
        assert [each.outcome for each in both] == ["paused", "complete"]
    moved = [number for number, both in enumerate(attempts) if len({each.pid for each in both}) == 2]
    assert moved == (list(range(_TRIALS)) if callback == "LeavesChild" else [0])
    assert not [each for each in heard if isinstance(each, Settled)]
    noted = [int(pid) for pid in (studies.folder / "pids").read_text().split()]
    assert not any(map(alive, noted))


@pytest.mark.full
@pytest.mark.parametrize(("workers", "background", "n_trials"), [(1, False, 2), (3, True, 3)])
def test_a_kill_at_any_instant_of_a_pause_changes_nothing(
    workers: int, background: bool, n_trials: int, studies: Studies, without_pauses: dict[int, dict[str, Any]]
) -> None:
    (studies.folder / "mines.py").write_text(MINES)
    late = f"run.background_reports={str(background).lower()}"
    deaths = 2 if background else 3  # mines in two threads may go off in one death
    with studies.open(*_OVERRIDES, *_MINED, late, f"study.n_trials={n_trials}") as (view,):
        ending, heard = run(view, PauseAll(), workers)
        assert ending is Ending.DONE
        assert equal(results(view), {number: without_pauses[number] for number in range(n_trials)})
        for trial in view.study.get_trials():
            outcomes = [each.outcome for each in view.storage.attempts_of_trial(trial._trial_id)]
            assert outcomes[-1] == "complete"
            # Beside the training, a death as the trial resumes has the scheduler asked about that epoch again.
            assert 1 <= outcomes.count("paused") <= (3 if background else 1), outcomes
            assert outcomes.count("lost") >= deaths, outcomes
    assert len([each for each in heard if isinstance(each, Settled)]) >= deaths * n_trials


def test_the_end_of_the_study_prunes_what_is_paused(studies: Studies) -> None:
    with studies.open(*_OVERRIDES) as (view,):
        ending, heard = run(view, PauseAll(resumed=2), 2)
        assert ending is Ending.DONE
        trials = view.study.get_trials()
        assert [trial.state for trial in trials] == [TrialState.PRUNED] * 2 + [TrialState.COMPLETE] * 2
        for trial in trials[:2]:
            assert (trial.last_step, trial.value) == (2, trial.intermediate_values[2])
        status = study_status(view)
        assert (status["finished"], status["paused"], status["running"]) == (_TRIALS, 0, 0)
    assert [each.number for each in heard if isinstance(each, Settled)] == [0, 1]


def test_an_interrupted_run_leaves_them_paused_and_the_next_resumes(
    studies: Studies, without_pauses: dict[int, dict[str, Any]]
) -> None:
    with studies.open(*_OVERRIDES) as (view,):
        ending, _ = run(view, PauseAll(), 1, until=TrialReport)
        assert ending is Ending.INTERRUPTED
        status = study_status(view)
        assert (status["paused"] >= 1, status["running"]) == (True, 0)
    with studies.open(*_OVERRIDES) as (view,):
        assert run(view, PauseAll(), 1)[0] is Ending.DONE
        assert equal(results(view), without_pauses)


def test_a_run_whose_time_is_over_leaves_them_paused(studies: Studies) -> None:
    with studies.open(*_OVERRIDES, "model.delay=0.05", "trainer.max_epochs=100") as (view,):
        assert run(view, PauseAll(), 1, timeout=1.5)[0] is Ending.TIMEOUT
        assert TrialState.PRUNED not in {trial.state for trial in view.study.get_trials()}


def test_a_goal_that_is_reached_leaves_them_paused(studies: Studies) -> None:
    with studies.open(*_OVERRIDES, "study.target_value=1e9") as (view,):
        ending, _ = run(view, PauseAll(), 1)
        assert ending is Ending.GOAL
        outcomes = [outcome_of(trial) for trial in view.study.get_trials()]
        assert "paused" in outcomes
        # A paused trial's best epoch counts; others may have been begun, or resumed, before the goal was seen.
        assert set(outcomes) <= {"complete", "paused", "waiting"}


def test_the_other_reasons_to_end_outrank_a_pause(studies: Studies) -> None:
    early = ("callbacks.early_stopping.patience=1", "callbacks.early_stopping.min_delta=0.99")
    with studies.open(*_OVERRIDES, *early) as (view,):
        assert run(view, PauseAll(), 1)[0] is Ending.DONE
        for trial in view.study.get_trials():
            assert (outcome_of(trial), trial.last_step) == ("complete", 2)
    with studies.open(*_OVERRIDES, "trainer.max_epochs=2", at="short") as (view,):
        assert run(view, PauseAll(), 1)[0] is Ending.DONE
        assert {outcome_of(trial) for trial in view.study.get_trials()} == {"complete"}
