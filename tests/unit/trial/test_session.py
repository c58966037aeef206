"""What a session offers a function that trains by itself, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import optuna
import pytest
import torch

from hpo.errors import LeaseLostError
from hpo.storage.attributes import PAUSE_AT_ATTR, PRUNED_ATTR
from hpo.storage.pausing import paused_at
from hpo.study.outcome import Outcome
from hpo.study.trial_entries import study_trials
from hpo.trial.session import Session, TrainingStoppedError
from hpo.trial.stopping import StopRequest
from tests.support.attempts import AskedAt, stored
from tests.support.attempts import run_function as run
from tests.support.pausing import PauseAll
from tests.support.studies import Studies, ask, session_of
from trainer.checkpoint.files import list_checkpoints
from trainer.recorded import MetricError

LOSSES = (3.0, 1.0, 2.0, 2.5, 2.6)


def report_all(session: Session) -> None:
    """Reports without a look at whether to stop."""
    for epoch, loss in enumerate(LOSSES, start=1):
        session.report(epoch, val_loss=loss)


def test_a_function_has_the_trials_parameters_config_folder_device_and_seed(studies: Studies) -> None:
    seen: list[Session] = []
    with studies.open() as (view,):
        run(view, lambda session: (seen.append(session), report_all(session)))
        (session,), trial = seen, stored(view)
        assert session.params == trial.params
        assert session.config["optimizer"]["lr"] == trial.params["optimizer.lr"]
        assert session.folder == view.spec.output_dir / "trials" / "0" / "attempt-1"
        assert "lr:" in (session.folder / "config.yaml").read_text()
        assert (session.device, session.seed) == (torch.device("cpu"), view.trial_seed(0, {}))
        assert (session.max_epochs, session.history) == (3, [{"val_loss": loss} for loss in LOSSES])


def test_a_searched_seed_is_the_trials(studies: Studies) -> None:
    drawn: list[tuple[int, float]] = []
    with studies.open("search_space={trainer.seed: {type: categorical, choices: [5]}}") as (view,):
        for _ in range(2):
            run(view, lambda session: (drawn.append((session.seed, float(torch.rand(())))), report_all(session)))
        assert [seed for seed, _ in drawn] == [5, 5]
        assert drawn[0] == drawn[1]
        assert [each["internals"]["seed"] for each in study_trials(view)] == [5, 5]


def test_a_kill_while_the_config_is_written_leaves_no_part_of_it(studies: Studies) -> None:
    """A forked process ends as soon as it has opened a file to write to."""
    with studies.open() as (view,):
        session = session_of(view, view.study.ask())
        child = os.fork()
        if not child:
            opened = io.open
            io.open = lambda *args, **options: (opened(*args, **options), os._exit(7))
            session.keep_config({"model": {"hidden": 8}})
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not (session.folder / "config.yaml").exists()


def test_global_generators_start_from_the_trials_seed(studies: Studies) -> None:
    drawn: list[tuple[float, float, float]] = []

    def draw(session: Session) -> None:
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        session.report(1, val_loss=1.0)

    for at in ("one", "two"):
        with studies.open(at=at) as (view,):
            run(view, draw)
            run(view, draw)
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("epoch", [0, 2, 7])
def test_epochs_are_reported_one_after_another(studies: Studies, epoch: int) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        with pytest.raises(ValueError, match=r"the epoch after 0 is 1: .*load_checkpoint"):
            session_of(view, trial).report(epoch, val_loss=1.0)


def test_an_epoch_that_is_a_text_is_shown_as_one(studies: Studies) -> None:
    with studies.open() as (view,):
        report = run(view, lambda session: session.report("1", val_loss=1.0))  # type: ignore[arg-type]
    assert "report('1', …): the epoch after 0 is 1: " in report.reason


def test_metrics_are_real_numbers_of_any_name(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        session = session_of(view, trial)
        session.report(1, val_loss=torch.tensor(2.0), epoch=np.float32(0.5), self=True)
        assert session.history == [{"val_loss": 2.0, "epoch": 0.5, "self": 1.0}]
        with pytest.raises(MetricError, match="'val_loss' is a str"):
            session.report(2, val_loss="1.0")  # type: ignore[arg-type]


def test_an_epoch_without_the_studys_metric_counts_and_is_not_stored(studies: Studies) -> None:
    def train(session: Session) -> None:
        session.report(1, train_loss=1.0)
        session.report(2, val_loss=2.0)

    with studies.open() as (view,):
        assert run(view, train).epochs == 2
        assert stored(view).intermediate_values == {2: 2.0}


def test_a_function_that_reports_other_metrics_only_is_in_error(studies: Studies) -> None:
    with studies.open() as (view,):
        report = run(view, lambda session: session.report(1, train_loss=1.0))
        assert report.outcome == Outcome.ERROR
        problem = "it ended before an epoch with a finite val_loss"
        assert report.reason == f"{problem}: what it has reported is train_loss"


# ---- one that does not look whether to stop


def save_each(session: Session) -> None:
    """Saves each epoch, without a look at whether to stop."""
    done = 0 if session.load_checkpoint() is None else session.epoch
    for epoch, loss in enumerate(LOSSES[done:], start=done + 1):
        session.report(epoch, val_loss=loss)
        session.save_checkpoint({"epoch": epoch})


@pytest.mark.parametrize(("background", "ends"), [("false", 2), ("true", 3)])
@pytest.mark.parametrize("function", [report_all, save_each])
def test_the_report_that_prunes_a_trial_ends_its_function(
    studies: Studies, function: Callable[[Session], None], background: str, ends: int
) -> None:
    trained: list[int] = []

    def train(session: Session) -> None:
        try:
            function(session)
        except optuna.TrialPruned:
            trained.append(session.epoch)
            raise

    with studies.open(f"run.background_reports={background}") as (view,):
        pruner = view.study.pruner = AskedAt(prune_at=2)
        assert run(view, train).outcome == Outcome.PRUNED
        assert (pruner.steps, trained) == ([1, 2], [ends])
        assert list(stored(view).intermediate_values) == list(range(1, ends + 1))


def test_the_report_of_a_value_that_is_not_finite_ends_its_function(studies: Studies) -> None:
    def train(session: Session) -> None:
        session.report(1, val_loss=3.0)
        session.report(2, val_loss=float("inf"))
        raise AssertionError("it was to end")

    with studies.open() as (view,):
        report = run(view, train)
        assert (report.outcome, report.epochs) == (Outcome.DIVERGED, 2)


def test_a_function_that_catches_what_ends_it_is_ended_by_its_next_report(studies: Studies) -> None:
    def train(session: Session) -> float:
        with contextlib.suppress(optuna.TrialPruned):
            report_all(session)
        with contextlib.suppress(optuna.TrialPruned):
            session.report(session.epoch + 1, val_loss=0.0)
        return 0.0

    with studies.open() as (view,):
        view.study.pruner = AskedAt(prune_at=2)
        report = run(view, train)
        assert (report.outcome, report.epochs) == (Outcome.PRUNED, 2)


@pytest.mark.parametrize("early", [True, False], ids=["asked before its report", "asked after its report"])
def test_a_function_that_is_to_leave_ends_where_its_epoch_is_saved(studies: Studies, early: bool) -> None:
    request = StopRequest()

    def train(session: Session) -> None:
        session.report(1, val_loss=3.0)
        session.save_checkpoint("after 1")
        if early:
            request.leave()
        session.report(2, val_loss=2.0)
        request.leave()
        session.save_checkpoint("after 2")
        raise AssertionError("it was to end")

    with studies.open(views=2) as (view, later):
        assert run(view, train, request).outcome is None

        def resume(session: Session) -> None:
            assert session.load_checkpoint() == "after 2"
            session.report(3, val_loss=1.0)

        report = run(later, resume)
        assert (report.value, report.epochs) == (1.0, 3)


def test_one_that_is_to_leave_ends_where_it_saves_inside_an_epoch(studies: Studies) -> None:
    request = StopRequest()

    def train(session: Session) -> None:
        session.report(1, val_loss=3.0)
        request.leave()
        session.save_checkpoint("inside 2", batch=3)
        raise AssertionError("it was to end")

    with studies.open(views=2) as (view, later):
        assert run(view, train, request).outcome is None

        def resume(session: Session) -> None:
            assert session.load_checkpoint() == "inside 2"
            session.report(2, val_loss=1.0)

        assert run(later, resume).value == 1.0


def test_a_function_that_is_to_leave_and_does_not_save_is_stopped_by_its_next_report(studies: Studies) -> None:
    request, ended = StopRequest(), []

    def train(session: Session) -> None:
        session.report(1, val_loss=3.0)
        request.leave()
        session.report(2, val_loss=2.0)
        try:
            session.report(3, val_loss=1.0)
        except TrainingStoppedError as error:
            ended.append(str(error))
            raise

    with studies.open() as (view,):
        assert run(view, train, request).outcome is None
        assert ended == ["interrupted after epoch 2"]
        assert list(stored(view).intermediate_values) == [1, 2]


def test_a_function_in_its_last_epoch_ends_by_itself(studies: Studies) -> None:
    request = StopRequest()

    def train(session: Session) -> float:
        for epoch in range(1, session.max_epochs + 1):
            session.report(epoch, val_loss=float(epoch))
            if epoch == session.max_epochs:
                request.leave()
            session.save_checkpoint(epoch)
        return 0.25

    with studies.open() as (view,):
        report = run(replace(view, scheduler=PauseAll(3)), train, request)
        assert (report.outcome, report.value, report.epochs) == (Outcome.COMPLETE, 0.25, 3)


def test_what_builds_on_a_session_is_not_ended_by_it(studies: Studies) -> None:
    with studies.open() as (view,):
        view.study.pruner = AskedAt(prune_at=1)
        trial, _ = ask(view)
        request = StopRequest()
        session = session_of(view, trial, request=request)
        request.leave()
        assert session.should_stop
        session.take_report(1, {"val_loss": 1.0})
        session.write_checkpoint("after 1")
        assert session.stop_reason == "pruned"


def test_a_function_that_has_trained_to_its_end_is_complete_whatever_was_asked_meanwhile(studies: Studies) -> None:
    request = StopRequest()

    def train(session: Session) -> None:
        report_all(session)
        request.leave()

    with studies.open() as (view,):
        assert run(view, train, request).outcome == Outcome.COMPLETE


def test_a_late_decision_about_the_last_epoch_prunes(studies: Studies) -> None:
    with studies.open("run.background_reports=true") as (view,):
        view.study.pruner = AskedAt(prune_at=len(LOSSES))
        assert run(view, report_all).outcome == Outcome.PRUNED


def test_diverged_outranks_pruned_and_pruned_a_request_to_leave(studies: Studies) -> None:
    with studies.open() as (view,):
        view.study.pruner = AskedAt(prune_at=1)
        trial, _ = ask(view)
        request = StopRequest()
        session = session_of(view, trial, request=request)
        request.leave()
        assert session.should_stop
        assert session.stop_reason == "interrupted"
        session.take_report(1, {"val_loss": 1.0})
        assert session.stop_reason == "pruned"
        assert session.should_stop
        session.diverge()
        assert session.should_stop
        assert session.stop_reason == "diverged"


# ---- checkpoints


def test_the_best_epochs_checkpoint_and_the_latest_two_stay(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        session = session_of(view, trial)
        for epoch, loss in enumerate(LOSSES, start=1):
            session.report(epoch, val_loss=loss)
            session.save_checkpoint({"epoch": epoch})
        path = session.save_checkpoint({"epoch": len(LOSSES), "half": torch.ones(2)}, batch=3)
        files = list_checkpoints([session.folder / "checkpoints"])
        assert [file.progress for file in files] == [(2, 0), (4, 0), (5, 0), (5, 3)]
        assert files[-1].path == path


def test_a_checkpoint_inside_an_epoch_is_resumed_from(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        session = session_of(view, trial)
        assert session.load_checkpoint() is None
        session.save_checkpoint([1, 2], batch=2)
        session.report(1, val_loss=1.0)
        session.save_checkpoint({"weights": torch.ones(2)})
        session.save_checkpoint((3, torch.zeros(1)), batch=1)
        random.seed(9)
        view.storage.requeue(trial._trial_id)
        trial, _ = ask(view)
        later = session_of(view, trial)
        assert later.folder != session.folder
        assert later.load_checkpoint() == (3, torch.zeros(1))
        assert later.history == [{"val_loss": 1.0}]


def test_an_epoch_that_is_saved_before_its_report_is_refused_at_the_first_one(studies: Studies) -> None:
    def train(session: Session) -> None:
        done = (session.load_checkpoint() or {"epoch": 0})["epoch"]
        for epoch, loss in enumerate(LOSSES[done:], start=done + 1):
            session.save_checkpoint({"epoch": epoch})
            session.report(epoch, val_loss=loss)

    with studies.open() as (view,):
        report = run(view, train)
        assert report.outcome == Outcome.ERROR
        assert "report(1, …) comes after a checkpoint that was saved before any report" in report.reason
        assert "report an epoch, then save it" in report.reason


def test_a_trial_that_resumes_one_epoch_off_says_why(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        session = session_of(view, trial)
        session.report(1, val_loss=1.0)
        session.save_checkpoint({"epoch": 2})  # of an epoch that is not reported, and now never will be
        view.storage.requeue(trial._trial_id)
        trial, _ = ask(view)
        later = session_of(view, trial)
        assert later.load_checkpoint() == {"epoch": 2}
        with pytest.raises(ValueError, match="resumed from a checkpoint that was saved before its report"):
            later.report(3, val_loss=0.5)
        later.report(2, val_loss=0.7)
        with pytest.raises(ValueError, match=r"say where a trial resumes$"):
            later.report(4, val_loss=0.5)


def test_global_generators_are_put_back_with_a_checkpoint(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        session = session_of(view, trial)
        session.save_checkpoint(None)
        drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
        session.load_checkpoint()
        assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == drawn


def test_a_trainers_checkpoint_is_not_taken_for_a_functions(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        session = session_of(view, trial)
        session.checkpoints.write({"version": 1, "model": {}, "state": {"history": []}}, 1, 0)
        with pytest.raises(ValueError, match="was not written by `save_checkpoint`"):
            session.load_checkpoint()


def test_the_checkpoints_history_is_the_truth(studies: Studies) -> None:
    """What an attempt reported after its last checkpoint is trained and reported again."""
    with studies.open() as (view,):
        trial, _ = ask(view)
        session = session_of(view, trial)
        session.report(1, val_loss=3.0)
        session.save_checkpoint(None)
        session.report(2, val_loss=9.0)
        trial.report(7.0, 3)
        view.storage.requeue(trial._trial_id)
        trial, _ = ask(view)
        pruner = view.study.pruner = AskedAt()
        session = session_of(view, trial)
        session.load_checkpoint()
        for epoch in (2, 3, 4):
            session.report(epoch, val_loss=float(epoch))
        assert stored(view).intermediate_values == {1: 3.0, 2: 2.0, 3: 3.0, 4: 4.0}
        assert pruner.steps == [3, 4]


def test_a_trial_that_was_pruned_before_it_was_lost_ends_where_it_resumes(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        session = session_of(view, trial)
        session.report(1, val_loss=3.0)
        session.save_checkpoint(None)
        trial.set_user_attr(PRUNED_ATTR, 1)
        view.storage.requeue(trial._trial_id)
        trial, _ = ask(view)
        with pytest.raises(optuna.TrialPruned, match="pruned after epoch 1"):
            session_of(view, trial).load_checkpoint()


def test_without_the_lease_nothing_is_written(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        request = StopRequest()
        session = session_of(view, trial, request=request)
        request.lose(session.lease)
        with pytest.raises(LeaseLostError):
            session.save_checkpoint(None)
        with pytest.raises(LeaseLostError):
            _ = session.should_stop
        assert list(view.spec.output_dir.rglob("*.pt")) == []


# ---- processes that the function forks


@pytest.mark.parametrize("in_fork", ["report", "save", "stop", "return", "raise"])
@pytest.mark.parametrize("background", ["false", "true"])
def test_a_fork_ends_where_it_comes_back_to_its_session(studies: Studies, in_fork: str, background: str) -> None:
    codes: list[int] = []

    def train(session: Session) -> None:
        session.report(1, val_loss=3.0)
        pid = os.fork()
        if pid:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            session.report(2, val_loss=2.0)
        elif in_fork == "report":
            session.report(2, val_loss=-1.0)
        elif in_fork == "save":
            session.save_checkpoint("by the fork")
        elif in_fork == "stop":
            assert session.should_stop
        elif in_fork == "raise":
            raise SystemExit(7)

    with studies.open(f"run.background_reports={background}") as (view,):
        assert run(view, train).outcome == Outcome.COMPLETE
        assert codes == [7 if in_fork == "raise" else 1]
        assert stored(view).intermediate_values == {1: 3.0, 2: 2.0}
        assert list(view.spec.output_dir.rglob("*.pt")) == []


def test_an_error_outranks_a_decision_to_prune_that_is_under_way(studies: Studies) -> None:
    def train(session: Session) -> None:
        session.report(1, val_loss=3.0)
        raise KeyError("mine")

    with studies.open("run.background_reports=true") as (view,):
        view.study.pruner = AskedAt(prune_at=1)
        report = run(view, train)
        assert (report.outcome, report.reason) == (Outcome.ERROR, "KeyError: 'mine'")
        assert stored(view).intermediate_values == {1: 3.0}


def test_a_function_may_prune_itself(studies: Studies) -> None:
    def train(session: Session) -> None:
        session.report(1, val_loss=3.0)
        raise optuna.TrialPruned("enough")

    with studies.open() as (view,):
        assert run(view, train).outcome == Outcome.PRUNED


def test_a_function_that_saves_nothing_is_not_paused(studies: Studies) -> None:
    """It could not resume: the trial's error says so, in place of a pause that loses its work."""
    with studies.open() as (view,):
        report = run(replace(view, scheduler=PauseAll()), report_all)
        assert (report.outcome, report.paused, report.epochs) == (Outcome.ERROR, False, 2)
        assert report.reason.startswith("it can't be paused: there is no checkpoint of epoch 2")


def test_a_function_is_paused_where_it_saves_and_one_that_was_lost_before_where_it_resumes(
    studies: Studies,
) -> None:
    with studies.open("trainer.max_epochs=5", views=2) as (view, later):
        trial, _ = ask(view)
        session = session_of(view, trial)
        for epoch in (1, 2):
            session.report(epoch, val_loss=1.0)
            session.save_checkpoint(epoch)
        trial.set_user_attr(PAUSE_AT_ATTR, 2)
        view.storage.requeue(trial._trial_id)
        for number, each in enumerate((later, replace(later, scheduler=PauseAll()))):
            report = run(each, save_each)
            assert (report.outcome, report.paused, report.epochs) == (None, True, 2)
            assert paused_at(later.study.trials[number]) == 2
