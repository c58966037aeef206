"""What a function's return value is worth, what it is called with, and when it has ended by itself."""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import optuna
import pytest
import torch

from hpo.execution.news import News
from hpo.storage.attributes import BEST_ATTR, REASON_ATTR, STARTED_AGAIN_ATTR
from hpo.storage.ledger import Lease
from hpo.storage.pausing import paused_at
from hpo.storage.settling import Verdict
from hpo.study.outcome import Outcome
from hpo.trial.session import Session
from hpo.trial.stopping import StopRequest
from hpo.trial.training_code import FunctionCode, takes_session
from tests.support import attempts
from tests.support.attempts import AskedAt, stored
from tests.support.attempts import run_function as run
from tests.support.pausing import PauseAll
from tests.support.studies import Studies

LOSSES = (3.0, 1.0, 2.0)


@pytest.mark.parametrize("value", [0.25, torch.tensor(0.25), {"val_loss": 0.25, "accuracy": 0.5}])
def test_what_a_function_returns_is_the_value_where_it_has_reported_nothing(studies: Studies, value: Any) -> None:
    with studies.open() as (view,):
        report = run(view, lambda _: value)
        trial = stored(view)
    assert (report.outcome, report.value, report.epochs) == (Outcome.COMPLETE, 0.25, 1)
    assert (trial.value, trial.intermediate_values) == (0.25, {1: 0.25})


def reporting(returned: Any) -> Callable[[Session], Any]:
    """A function that reports `LOSSES`, and then returns something."""

    def train(session: Session) -> Any:
        for epoch, loss in enumerate(LOSSES, start=1):
            session.report(epoch, val_loss=loss)
        return returned

    return train


@pytest.mark.parametrize("returned", [0.1, {"val_loss": 0.1, "f1": 0.5}])
def test_what_is_returned_counts_before_the_best_reported_epoch(studies: Studies, returned: Any) -> None:
    with studies.open() as (view,):
        assert run(view, reporting(returned)).value == 0.1
        assert stored(view).value == 0.1
        assert stored(view).intermediate_values == dict(enumerate(LOSSES, start=1))


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, ""),
        ({"f1": 0.5}, "the best reported epoch counts: what the function returned has no val_loss"),
        (True, "the best reported epoch counts, and not what the function returned: "),
        (torch.nn.Linear(1, 1), "the best reported epoch counts, and not what the function returned: "),
        ((torch.zeros(2), [1.0]), "the best reported epoch counts, and not what the function returned: "),
    ],
)
def test_what_is_returned_and_is_no_value_does_not_count(
    studies: Studies, returned: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with studies.open() as (view,):
        assert run(view, reporting(returned)).value == min(LOSSES)
    printed = capsys.readouterr().out
    assert said in printed
    assert ("best reported epoch" in printed) == bool(said)


class _WriteOnly:
    def write(self, text: str) -> int:
        return len(text)


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [_WriteOnly, _closed, lambda: None], ids=["without flush", "closed", "None"])
def test_a_stream_that_the_function_has_replaced_costs_no_trial(
    studies: Studies, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(session: Session) -> dict[str, float]:
        monkeypatch.setattr(sys, "stdout", make())
        session.report(1, val_loss=0.5)
        return {"f1": 0.5}  # no value, which is said

    with studies.open() as (view,):
        view.study.enqueue_trial({"model.unknown": 1})  # which is said, too
        report = run(view, train)
    assert (report.outcome, report.value) == (Outcome.COMPLETE, 0.5)


@pytest.mark.parametrize(
    ("metric", "outcome"), [("val_loss", Outcome.COMPLETE), ("loss", Outcome.ERROR)], ids=["with", "without"]
)
def test_metrics_that_are_returned_under_names_of_other_kinds_are_named_as_text(
    studies: Studies, metric: str, outcome: Outcome
) -> None:
    with studies.open() as (view,):
        report = run(view, lambda _: {metric: 0.25, 3: 0.5, ("f1", "a"): 0.75})
        best = stored(view).user_attrs.get(BEST_ATTR)
    assert report.outcome == outcome
    if outcome == Outcome.COMPLETE:
        assert best["metrics"] == {"val_loss": 0.25, "3": 0.5, "('f1', 'a')": 0.75}
    else:
        assert report.reason.endswith("what it has reported is ('f1', 'a'), 3, loss")


def test_a_trial_whose_folder_is_deleted_while_it_trains_has_its_value(studies: Studies) -> None:
    def train(session: Session) -> None:
        session.report(1, val_loss=0.25)
        shutil.rmtree(session.folder.parent)

    with studies.open() as (view,):
        report = run(view, train)
        best = stored(view).user_attrs[BEST_ATTR]
    assert (report.outcome, report.value) == (Outcome.COMPLETE, 0.25)
    assert best["checkpoint"] is None


def test_no_pruner_is_asked_about_a_returned_value(studies: Studies) -> None:
    pruner = AskedAt(1)
    with studies.open() as (view,):
        view.study.pruner = pruner
        assert run(view, lambda _: 0.5).outcome == Outcome.COMPLETE


def test_no_scheduler_pauses_what_has_returned_its_value(studies: Studies) -> None:
    with studies.open() as (view,):
        view = replace(view, scheduler=PauseAll(1))
        assert run(view, lambda _: 0.5).outcome == Outcome.COMPLETE
        assert paused_at(stored(view)) is None


def test_what_has_returned_without_a_look_whether_to_stop_has_ended(studies: Studies) -> None:
    def train(session: Session) -> None:
        session.max_epochs = 0
        session.report(1, val_loss=1.0)

    with studies.open() as (view,):
        view = replace(view, scheduler=PauseAll(1))
        assert run(view, train).outcome == Outcome.COMPLETE


def test_a_value_that_is_not_finite_has_diverged(studies: Studies) -> None:
    with studies.open() as (view,):
        assert run(view, lambda _: float("nan")).outcome == Outcome.DIVERGED
        assert stored(view).user_attrs[REASON_ATTR] == "epoch 1: val_loss not finite"


def test_of_a_value_returned_beside_epochs_that_is_not_finite_the_reason_says_so(studies: Studies) -> None:
    def train(session: Session) -> float:
        session.report(1, val_loss=1.0)
        return math.inf

    with studies.open() as (view,):
        assert run(view, train).outcome == Outcome.DIVERGED
        assert stored(view).user_attrs[REASON_ATTR] == "returned: val_loss not finite"


def test_what_is_returned_after_a_request_to_stop_is_no_value(studies: Studies) -> None:
    request = StopRequest()

    def train(session: Session) -> float:
        request.leave()
        assert session.should_stop
        return 0.5

    with studies.open() as (view,):
        report = run(view, train, request)
        assert (report.outcome, report.epochs) == (None, 0)
        assert stored(view).state == optuna.trial.TrialState.WAITING


def test_an_error_after_a_request_to_leave_requeues_the_trial(studies: Studies) -> None:
    request = StopRequest()

    def train(session: Session) -> float:
        session.report(1, val_loss=1.0)
        request.leave()  # the same signal has ended a process that loads data
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")

    with studies.open("run.max_retries=0") as (view,):
        report = run(view, train, request)
        assert (report.outcome, report.reason) == (None, "")
        assert stored(view).state == optuna.trial.TrialState.WAITING
        (attempt,) = view.storage.attempts_of_trial(stored(view)._trial_id)
        assert (attempt.outcome, attempt.reason) == ("requeued", "interrupted")
        request = StopRequest()
        request.end(Lease(stored(view)._trial_id, 2), Verdict(Outcome.TIMED_OUT, "it broke a limit", final=True))
        assert run(view, train, request).outcome == Outcome.ERROR


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda _: None,
            "the function has neither reported an epoch nor returned a value\n  fix: return val_loss, or call",
        ),
        (lambda _: {"accuracy": 0.5, "f1": 0.5}, "a finite val_loss: what it has reported is accuracy, f1"),
        (lambda session: session.report(1, mae=1.0), "a finite val_loss: what it has reported is mae"),
        (lambda _: "0.5", "what the function returned: metric 'val_loss' is a str ('0.5'): record a real number"),
        (lambda _: True, "the function has returned True, and no number\n  fix: return val_loss"),
        (
            lambda _: (0.5, 0.4),
            "has returned 2 values, and the study optimises val_loss\n  fix: return val_loss",
        ),
        (lambda session: session.report(0.5, 1), "name: `trial.report(epoch, val_loss=…)`"),
        (lambda session: session.report(1, {"val_loss": 0.5}), "`trial.report(epoch, **metrics)`"),
        (lambda session: session.should_prune(), "`trial.should_prune` is of Optuna's trials"),
        (lambda session: session.set_user_attr("a", 1), "`trial.set_user_attr` is of Optuna's trials"),
        (lambda session: session.sould_stop, "AttributeError: 'Session' object has no attribute 'sould_stop'"),
    ],
)
def test_without_a_value_the_trial_is_in_error(studies: Studies, function: Any, reason: str) -> None:
    with studies.open() as (view,):
        report = run(view, function)
    assert report.outcome == Outcome.ERROR
    assert reason in report.reason
    assert "in this order" not in report.reason


def test_that_an_attempt_starts_again_is_stored_and_in_its_log(
    studies: Studies, capsys: pytest.CaptureFixture[str]
) -> None:
    request = StopRequest()

    def train(session: Session) -> None:
        session.report(1, val_loss=1.0)
        if session.lease.attempt == 1:
            request.leave()
        if not session.should_stop:
            session.report(2, val_loss=0.5)

    with studies.open() as (view,):
        assert run(view, train, request).outcome is None
        assert STARTED_AGAIN_ATTR not in stored(view).user_attrs
        assert run(view, train).outcome == Outcome.COMPLETE
        trial = stored(view)
        assert trial.user_attrs[STARTED_AGAIN_ATTR] == 2
        assert trial.intermediate_values == {1: 1.0, 2: 0.5}
    assert "attempt 2 starts again with the first epoch: no checkpoint was loaded" in capsys.readouterr().out


@pytest.mark.parametrize(("last", "curve"), [(2, {1: 2.0, 2: 2.0}), (3, {1: 2.0, 2: 2.0, 3: 2.0})])
def test_a_shorter_attempt_that_starts_again_leaves_no_epoch_of_the_one_before(
    studies: Studies, last: int, curve: dict[int, float]
) -> None:
    """Its value is that of its own epochs, and so is the curve that pruners and models see."""
    request = StopRequest()

    def train(session: Session) -> None:
        first = session.lease.attempt == 1
        for epoch in range(1, 6 if first else last + 1):
            session.report(epoch, val_loss=1.0 if first else 2.0)
        if first:
            request.leave()
            assert session.should_stop

    with studies.open(views=2) as (view, other):
        assert run(view, train, request).outcome is None
        assert len(stored(view).intermediate_values) == 5
        other.study.get_trials()
        assert run(view, train).value == 2.0
        assert stored(view).intermediate_values == curve
        assert other.study.get_trials()[0].intermediate_values == curve


def test_a_session_goes_to_a_parameter_named_trial() -> None:
    def train(lr: float, *, trial: Session) -> None: ...

    def other(trial: Session, /) -> None: ...

    assert takes_session(train)
    assert not takes_session(other)
    assert not takes_session(min)


def test_a_look_whether_to_stop_before_the_checkpoint_reports_no_epoch_again(studies: Studies) -> None:
    request = StopRequest()

    def train(session: Session) -> None:
        assert not session.should_stop
        state = session.load_checkpoint() or {"epoch": 0}
        for epoch in range(state["epoch"] + 1, 4):
            session.report(epoch, val_loss=1.0)
            if (epoch, session.lease.attempt) == (2, 1):
                request.leave()
            session.save_checkpoint({"epoch": epoch})

    with studies.open() as (view,):
        assert run(view, train, request).outcome is None
        ours, theirs = Pipe()
        news = News(theirs, 0, "val_loss")
        attempts.run(view, FunctionCode(train), pulse=lambda session: news.follow(session, math.inf))
    news.finish()
    theirs.close()
    heard = []
    with contextlib.suppress(EOFError):
        while True:
            heard.append(ours.recv())
    assert [(message.first, len(message.values), message.resumed) for message in heard] == [
        (1, 2, True),
        (3, 1, False),
    ]


def test_a_function_that_runs_out_of_memory_has_no_batches_to_cut(studies: Studies) -> None:
    def train(session: Session) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with studies.open("run.on_oom=retry_with_accumulation") as (view,):
        report = run(view, train)
    assert report.outcome == Outcome.OUT_OF_MEMORY
    assert report.reason == "OutOfMemoryError: CUDA out of memory"


class _Broken(optuna.samplers.RandomSampler):
    def sample_independent(self, *_: Any) -> Any:
        raise ValueError("no value comes to mind")


@pytest.mark.parametrize("duplicates", ["allow", "reuse"])
def test_a_sampler_that_fails_ends_its_trial_and_not_the_worker(studies: Studies, duplicates: str) -> None:
    with studies.open(f"study.duplicates={duplicates}") as (view,):
        view.study.sampler = _Broken()
        report = run(view, lambda _: 0.5)
        assert stored(view).state == optuna.trial.TrialState.FAIL
    assert (report.outcome, report.reason) == (Outcome.ERROR, "ValueError: no value comes to mind")
