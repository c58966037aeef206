"""Processes that a study's code forks: real ones."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from optuna.trial import TrialState

from hpo.errors import ForkedProcessError
from hpo.storage.ledger import Owner
from hpo.study.outcome import Outcome
from hpo.trial.process_forks import only_in
from hpo.trial.report import TrialReport
from tests.support.attempts import run, stored
from tests.support.commands import STUDY
from tests.support.owners import load, make_study, opened, study_id, trials
from tests.support.studies import Studies
from tests.unit.trial.test_objective import curve

pytestmark = pytest.mark.full


def in_fork(work: Callable[[], object], answer: Path) -> object:
    """What a function returns in a fork of this process."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            answer.write_text(json.dumps(work()))
            code = 0
        except BaseException:  # noqa: BLE001 - it must not come back into pytest
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return json.loads(answer.read_text())


def test_a_fork_writes_nothing_for_the_trial(ready_url: str, tmp_path: Path) -> None:
    make_study(ready_url, 3)
    with opened(ready_url, owner=Owner.current()) as storage:
        study = load(storage)
        trial = study.ask()
        trial.report(1.0, 1)
        trial_id = trial._trial_id
        writes: dict[str, Callable[[], object]] = {
            "ask": study.ask,
            "report": lambda: trial.report(2.0, 2),
            "suggest": lambda: trial.suggest_float("x", 0, 1),
            "attr": lambda: trial.set_user_attr("key", 1),
            "system attr": lambda: storage.set_trial_system_attr(trial_id, "key", 1),
            "study attr": lambda: storage.set_study_user_attr(study_id(storage), "key", 1),
            "tell": lambda: storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [1.0]),
            "requeue": lambda: storage.requeue(trial_id),
            "beat": storage.beat,
            "read": lambda: storage.get_trial(trial_id),
        }

        def refused() -> list[str]:
            found = []
            for name, write in writes.items():
                try:
                    write()
                except ForkedProcessError:
                    found.append(name)
            return found

        assert in_fork(refused, tmp_path / "refused") == list(writes)
        (found,) = trials(ready_url)
        assert (found.state, found.intermediate_values, found.user_attrs) == (TrialState.RUNNING, {1: 1.0}, {})
        trial.report(3.0, 3)  # on the connection that the fork had inherited
        study.tell(trial, 1.0)
        assert trials(ready_url)[0].state == TrialState.COMPLETE


def test_a_fork_reads_by_a_connection_of_its_own(ready_url: str, tmp_path: Path) -> None:
    make_study(ready_url, 3, enqueued=2)
    with opened(ready_url) as storage:
        number = study_id(storage)
        assert in_fork(lambda: storage.get_n_trials(number), tmp_path / "count") == 2
        assert storage.get_n_trials(number) == 2


@pytest.mark.parametrize(
    ("ending", "code"),
    [("return", 1), ("raise SystemExit(7)", 7), ("raise SystemExit", 0), ("raise ValueError('x')", 1)],
)
def test_a_fork_ends_where_it_would_leave(ending: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    process = os.getpid()
    scope: dict[str, Callable[[], None]] = {}
    exec(f"def end():\n    {ending}", scope)
    with only_in(process):
        pid = os.fork()
        if not pid:
            scope["end"]()
        else:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    said = capfd.readouterr().err
    assert ("a second time: it ends here" in said) == (ending == "return")
    assert ("ValueError: x" in said) == ("ValueError" in ending)


FORKING = """
import multiprocessing
import os

import torch
from torch import nn

from parts import load
from trainer import Callback

first = True


def data(at):
    fork(at == "data")
    return load()


def fork(now, end=lambda: None):
    global first
    if now and first:
        first = False
        pid = os.fork()
        if not pid:
            end()
        else:
            with open("/dev/fd/2", "a") as log:
                print("fork ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=log)


def leave():
    raise SystemExit(5)


def fail():
    raise ValueError("in the fork")


class Net(nn.Module):
    def __init__(self, hidden, at):
        super().__init__()
        fork(at == "model")
        self.at = at
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs):
        if self.training:
            fork(self.at == "training")
            fork(self.at == "leave", leave)
            fork(self.at == "fail", fail)
        else:
            fork(self.at == "validation")
        if self.at == "pool" and self.training:
            with multiprocessing.get_context("fork").Pool(2) as pool:
                assert pool.map(abs, [-1, 2]) == [1, 2]
        return self.layer(inputs)


class AtHook(Callback):
    def __init__(self, at, priority):
        self.at, self.priority = at, priority

    def on_train_batch_end(self, trainer):
        fork(self.at == "batch_end")

    def on_epoch_end(self, trainer):
        fork(self.at == "epoch_end")

    def on_fit_end(self, trainer):
        fork(self.at == "fit_end")
"""
FORKING_STUDY = STUDY.replace("parts.load", "forking.data, at: none").replace(
    "parts.Net, hidden: 4, delay: 0.0, dropout: 0.1", "forking.Net, hidden: 4, at: none"
)
HOOK = "callbacks={{hook: {{_target_: forking.AtHook, at: {}, priority: {}}}}}"


def trained(studies: Studies, place: str, *overrides: str) -> tuple[TrialReport, str, float | None, str]:
    """A trial's report, its log, its stored value and its curve."""
    folder = studies.folder / place
    folder.mkdir()
    (folder / "forking.py").write_text(FORKING)
    with studies.open(*overrides, text=FORKING_STUDY, at=place) as (view,):
        report = run(view)
        log = (view.spec.output_dir / "trials" / "0" / "attempt-1" / "log.txt").read_text()
        trial = stored(view)
        assert [each.outcome for each in view.storage.attempts_of_trial(trial._trial_id)] == ["complete"]
        return report, log, trial.value, curve(view)


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (("data.at=data",), 1),
        (("model.at=model",), 1),
        (("model.at=training",), 1),
        (("model.at=leave",), 5),
        (("model.at=fail",), 1),
        (("model.at=validation",), 1),
        ((HOOK.format("batch_end", 50),), 1),
        ((HOOK.format("epoch_end", 50),), 1),
        ((HOOK.format("epoch_end", 94),), 1),
        ((HOOK.format("fit_end", 94),), 1),
        (("model.at=pool",), None),
        (("loader.num_workers=2",), None),
    ],
    ids=lambda value: "-".join(value)[:60] if isinstance(value, tuple) else str(value),
)
def test_a_fork_neither_trains_on_nor_ends_the_trial(
    studies: Studies, overrides: tuple[str, ...], code: int | None
) -> None:
    expected = trained(studies, "alone")
    report, log, value, metrics = trained(studies, "forked", *overrides)
    assert (report.outcome, report.epochs, value, metrics) == (Outcome.COMPLETE, 3, *expected[2:])
    assert ("fork ended with" in log) == (code is not None)
    if code is not None:
        assert f"fork ended with {code}\n" in log
    if overrides == ("model.at=fail",):
        assert "ValueError: in the fork" in log
