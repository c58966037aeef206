"""Workers that end otherwise than they should, in real processes."""

from __future__ import annotations

import sys

import pytest

from hpo.devices import deal
from hpo.errors import StudyError
from hpo.forkserver import start_fork_server
from hpo.objective import TrialReport
from hpo.outcome import Outcome
from hpo.progress import study_status
from hpo.supervisor import Ending, Supervisor
from hpo.worker import Message, Started, _check_preload
from tests.hpo.support import Studies

FAULTS = """
import os
from pathlib import Path

from parts import load


def vanish(code, times):
    marks = Path(__file__).parent / "marks"
    marks.mkdir(exist_ok=True)
    if len(list(marks.iterdir())) < times:
        (marks / str(len(list(marks.iterdir())))).touch()
        os._exit(code)
    return load()
"""


def supervise(
    studies: Studies, *overrides: str, workers: int = 1, timeout: float | None = None
) -> tuple[Ending, list[Message]]:
    heard: list[Message] = []
    with studies.open("trainer.max_epochs=1", "study.n_trials=3", *overrides) as (view,):
        slots = deal(["cpu"], workers)
        supervisor = Supervisor(
            view, slots, start_fork_server(view.spec), lambda _, message: heard.append(message), timeout=timeout
        )
        return supervisor.run(), heard


def status(studies: Studies, *overrides: str) -> dict[str, object]:
    with studies.open("trainer.max_epochs=1", "study.n_trials=3", *overrides) as (view,):
        return study_status(view)


def test_every_trial_is_announced_and_reported(studies: Studies) -> None:
    ending, heard = supervise(studies)
    assert ending is Ending.DONE
    assert [type(message) for message in heard] == [Started, TrialReport] * 3
    assert [message.number for message in heard if isinstance(message, Started)] == [0, 1, 2]
    assert all(message.outcome == Outcome.COMPLETE for message in heard if isinstance(message, TrialReport))


def test_a_worker_that_leaves_inside_a_trial_is_replaced_even_if_it_leaves_in_order(studies: Studies) -> None:
    (studies.folder / "faults.py").write_text(FAULTS)
    override = "data={_target_: faults.vanish, code: 0, times: 2}"
    ending, heard = supervise(studies, override)
    assert ending is Ending.DONE
    assert [message.number for message in heard if isinstance(message, Started)] == [0, 0, 0, 1, 2]
    shown = status(studies, override)
    assert (shown["finished"], shown["running"]) == (3, 0)


def test_workers_that_die_again_and_again_stop_the_study(studies: Studies) -> None:
    (studies.folder / "runs" / "tiny").mkdir(parents=True)
    (studies.folder / "runs" / "tiny" / "logs").write_text("in the way of the workers' logs")
    with pytest.raises(StudyError, match="6 workers died without a trial finished"):
        supervise(studies, "study.storage=sqlite:///other.db", workers=2)


def test_a_study_whose_first_trials_fail_alike_stops_with_the_error(studies: Studies) -> None:
    with pytest.raises(StudyError, match="the first 3 trials failed alike:\n  RuntimeError: the data is broken"):
        supervise(studies, "data.broken=true")


def test_trials_that_fail_after_one_has_succeeded_stop_nothing(studies: Studies) -> None:
    space = "search_space={loss.fail: {type: categorical, choices: [false, true]}}"
    ending, heard = supervise(studies, space, "study.sampler=grid", "study.sampler.seed=3")
    assert ending is Ending.DONE
    assert len(heard) == 4


def test_a_timeout_puts_running_trials_down(studies: Studies) -> None:
    overrides = ("model.delay=0.3",)
    ending, _ = supervise(studies, *overrides, timeout=0.5)
    assert ending is Ending.TIMEOUT
    shown = status(studies, *overrides)
    assert (shown["running"], shown["finished"]) == (0, 0)


def test_a_worker_without_the_preload_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hpo.preload", raising=False)
    with pytest.raises(RuntimeError, match="could not import hpo"):
        _check_preload()
