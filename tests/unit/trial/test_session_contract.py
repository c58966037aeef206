"""What holds for whatever trains a trial on a session: the Trainer with its bridge, and a function."""

from __future__ import annotations

import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import FrozenTrial, TrialState

from hpo.config.spec import load_spec
from hpo.storage.attributes import BEST_ATTR, PAUSE_AT_ATTR, PRUNED_ATTR, REASON_ATTR
from hpo.storage.ledger import Lease, Owner
from hpo.storage.outage import DatabaseGoneError
from hpo.storage.pausing import paused_at
from hpo.storage.settling import LOST, STOPPED, Verdict
from hpo.study.open_study import OpenStudy, load_study
from hpo.study.outcome import Outcome, outcome_of
from hpo.trial.report import TrialReport
from hpo.trial.stopping import StopRequest
from hpo.trial.training_code import FunctionCode, TrainingCode
from tests.support.attempts import AskedAt, From, InThirdEpoch, dying, killing, run, stored, trainer_code
from tests.support.owners import forked
from tests.support.pausing import PauseAll
from tests.support.plain_training import train
from tests.support.studies import Studies
from tests.unit.trainer.support import assert_same
from trainer.checkpoint.files import list_checkpoints
from trainer.checkpoint.manager import load_checkpoint, newest_checkpoint

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_thread")]

MakeCode = Callable[[OpenStudy], TrainingCode]
EPOCHS = 4
#: The Trainer, too, saves each epoch, whatever that costs.
OVERRIDES = (f"trainer.max_epochs={EPOCHS}", "callbacks={checkpoint: {max_overhead: 1}}")
ODD = """
from trainer import Callback


class Odd(Callback):
    def state_dict(self):
        return {"odd": object()}
"""


def function_code(view: OpenStudy) -> TrainingCode:
    return FunctionCode(train)


def die(study: Path, make: MakeCode, pulse: int) -> None:
    """Run a trial in this process, which a SIGKILL ends at the n-th pulse."""
    torch.set_num_threads(1)
    view = load_study(load_spec(study, OVERRIDES), Owner.current(worker="killed"))
    run(view, make(view), pulse=killing(pulse))


class SessionContract(ABC):
    """Inherited by a test class for each kind of training code."""

    make: MakeCode
    #: Epochs at the end of a pruned trial that have no checkpoint: a function is ended by its report.
    unsaved = 0

    @staticmethod
    @abstractmethod
    def weights(checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The model and the optimizer in a checkpoint."""

    def run(self, view: OpenStudy, request: StopRequest | None = None, **options: Any) -> TrialReport:
        return run(view, type(self).make(view), request=request, **options)

    def open(self, studies: Studies, *overrides: str, **options: Any) -> Any:
        return studies.open(*OVERRIDES, *overrides, **options)

    @staticmethod
    def folders(view: OpenStudy) -> list[Path]:
        return sorted((view.spec.output_dir / "trials" / "0").glob("attempt-*/checkpoints"))

    def result(self, view: OpenStudy) -> tuple[Any, ...]:
        """All that a finished trial came to, to the last bit."""
        trial = stored(view)
        assert trial.state == TrialState.COMPLETE
        found = newest_checkpoint(self.folders(view))
        assert found is not None
        best = load_checkpoint(view.spec.output_dir / trial.user_attrs[BEST_ATTR]["checkpoint"])
        weights = [self.weights(checkpoint) for checkpoint in (found[1], best)]
        return trial.value, trial.intermediate_values, trial.user_attrs[BEST_ATTR]["epoch"], weights

    def undisturbed(self, studies: Studies) -> tuple[Any, ...]:
        with self.open(studies, at="undisturbed") as (view,):
            assert self.run(view).outcome == Outcome.COMPLETE
            return self.result(view)

    # ---- reports

    def test_each_epoch_is_reported_and_the_value_is_the_best_of_them(self, studies: Studies) -> None:
        with self.open(studies) as (view,):
            report = self.run(view)
            trial = stored(view)
        assert (report.outcome, report.epochs) == (Outcome.COMPLETE, EPOCHS)
        assert list(trial.intermediate_values) == list(range(1, EPOCHS + 1))
        assert trial.value == report.value == min(trial.intermediate_values.values())
        best = trial.user_attrs[BEST_ATTR]
        assert trial.intermediate_values[best["epoch"]] == best["metrics"]["val_loss"] == trial.value
        checkpoint = load_checkpoint(view.spec.output_dir / best["checkpoint"])
        assert checkpoint["state"]["epoch"] == best["epoch"]
        assert checkpoint["state"]["history"][-1] == best["metrics"]

    def test_reports_beside_the_training_come_to_the_same(self, studies: Studies) -> None:
        expected = self.undisturbed(studies)
        with self.open(studies, "run.background_reports=true", at="beside") as (view,):
            assert self.run(view).outcome == Outcome.COMPLETE
            assert_same(self.result(view), expected)

    def test_training_shows_life_from_its_start_and_each_epoch(self, studies: Studies) -> None:
        seen: list[int] = []
        with self.open(studies) as (view,):
            self.run(view, pulse=lambda session: seen.append(session.epoch))
        assert seen == sorted(seen)
        assert set(seen) == set(range(EPOCHS + 1))
        assert all(seen.count(epoch) > 4 for epoch in range(EPOCHS)), "once a batch at least"

    # ---- pruning

    @pytest.mark.parametrize(("background", "ends"), [("false", 2), ("true", 3)])
    def test_a_pruned_trial_ends_with_its_epoch_reported_and_up_to_that_checkpointed(
        self, studies: Studies, background: str, ends: int
    ) -> None:
        with self.open(studies, f"run.background_reports={background}") as (view,):
            pruner = view.study.pruner = AskedAt(prune_at=2)
            report = self.run(view)
            trial = stored(view)
            assert (report.outcome, trial.state) == (Outcome.PRUNED, TrialState.PRUNED)
            assert pruner.steps == [1, 2]
            assert list(trial.intermediate_values) == list(range(1, ends + 1))
            assert trial.user_attrs[PRUNED_ATTR] == 2
            found = newest_checkpoint(self.folders(view))
            assert found is not None
            saved = ends - type(self).unsaved
            assert found[0].progress == (saved, 0)
            history = [item["val_loss"] for item in found[1]["state"]["history"]]
            assert history == [trial.intermediate_values[epoch] for epoch in range(1, saved + 1)]

    def test_a_decision_to_prune_holds_for_a_trial_that_was_stopped_before_its_end(self, studies: Studies) -> None:
        with self.open(studies, views=2) as (view, later):
            trial, request = view.study.ask(), StopRequest()

            def decide() -> None:
                trial.set_user_attr(PRUNED_ATTR, 2)
                request.leave()

            assert self.run(view, request, trial=trial, pulse=InThirdEpoch(decide)).outcome is None
            pruner = later.study.pruner = AskedAt()
            report = self.run(later)
            assert (report.outcome, report.epochs, pruner.steps) == (Outcome.PRUNED, 2, [])
            assert list(stored(later).intermediate_values) == [1, 2]

    # ---- pausing

    @pytest.mark.parametrize(("background", "ends"), [("false", 2), ("true", 3)])
    def test_a_paused_trial_waits_with_its_checkpoint_and_resumes_to_equal_bits(
        self, studies: Studies, background: str, ends: int
    ) -> None:
        expected = self.undisturbed(studies)
        late = f"run.background_reports={background}"
        with self.open(studies, late, at="paused", views=2) as (view, later):
            report = self.run(replace(view, scheduler=PauseAll()))
            assert (report.outcome, report.paused, report.epochs) == (None, True, ends)
            trial = stored(view)
            assert (outcome_of(trial), paused_at(trial), trial.last_step) == ("paused", ends, ends)
            assert trial.user_attrs[PAUSE_AT_ATTR] == 2
            found = newest_checkpoint(self.folders(view))
            assert found is not None
            assert found[0].progress == (ends, 0)
            assert later.storage.resume(trial._trial_id)
            resumed = optuna.Trial(later.study, trial._trial_id)
            later = replace(later, scheduler=PauseAll())
            report = self.run(later, trial=resumed)
            assert (report.outcome, report.paused) == (Outcome.COMPLETE, False)
            assert_same(self.result(later), expected)

    def test_a_decision_to_pause_holds_for_a_trial_that_was_stopped_before_it_paused(
        self, studies: Studies
    ) -> None:
        with self.open(studies, views=2) as (view, later):
            trial, request = view.study.ask(), StopRequest()

            def decide() -> None:
                trial.set_user_attr(PAUSE_AT_ATTR, 2)
                request.leave()

            assert self.run(view, request, trial=trial, pulse=InThirdEpoch(decide)).paused is False
            assert outcome_of(stored(view)) == "waiting"
            report = self.run(later)
            assert (report.outcome, report.paused) == (None, True)
            assert paused_at(stored(later)) == report.epochs
            found = newest_checkpoint(self.folders(later))
            assert found is not None
            assert found[0].progress == (report.epochs, 0), "an epoch that was begun is ended first"

    def test_a_trial_that_has_had_its_last_epoch_is_not_paused(self, studies: Studies) -> None:
        with self.open(studies) as (view,):
            report = self.run(replace(view, scheduler=PauseAll(EPOCHS)))
            assert (report.outcome, report.paused) == (Outcome.COMPLETE, False)

    # ---- the end is asked for, or comes

    @pytest.mark.parametrize("look", [1, 4, 7, 13])
    def test_a_request_to_leave_requeues_the_trial_which_resumes_to_equal_bits(
        self, studies: Studies, look: int
    ) -> None:
        expected = self.undisturbed(studies)
        with self.open(studies, at="stopped", views=2) as (view, later):
            assert self.run(view, From(look)).outcome is None
            assert outcome_of(stored(view)) == "waiting"
            pruner = later.study.pruner = AskedAt()
            assert self.run(later).outcome == Outcome.COMPLETE
            assert_same(self.result(later), expected)
            assert pruner.steps == sorted(set(pruner.steps)), "no step is asked about twice"

    def test_a_verdict_ends_the_trial(self, studies: Studies) -> None:
        with self.open(studies) as (view,):
            trial, request = view.study.ask(), StopRequest()
            request.end(Lease(trial._trial_id, 1), Verdict("timed_out", "too long", final=True))
            report = self.run(view, request, trial=trial)
            assert (report.outcome, report.reason) == (Outcome.TIMED_OUT, "too long")
            assert stored(view).user_attrs[REASON_ATTR] == "too long"

    @pytest.mark.parametrize("pulse", [3, 9, 16])
    def test_a_killed_trial_resumes_to_equal_bits(self, studies: Studies, pulse: int) -> None:
        """A real process, killed by SIGKILL: in its first epoch, and after one or two."""
        expected = self.undisturbed(studies)
        with self.open(studies, at="killed") as (view,):
            process = forked.Process(target=die, args=(view.spec.path, type(self).make, pulse))
            process.start()
            process.join(120)
            assert process.exitcode == -signal.SIGKILL
            assert [(each.outcome, each.state) for each in view.requeue_dead()] == [(LOST, TrialState.WAITING)]
            before = newest_checkpoint(self.folders(view))
            assert (before is not None) == (pulse > 6)
            report = self.run(view)
            assert (report.number, report.outcome) == (0, Outcome.COMPLETE)
            assert_same(self.result(view), expected)

    def test_a_damaged_checkpoint_is_passed_over(self, studies: Studies) -> None:
        expected = self.undisturbed(studies)
        with self.open(studies, at="damaged", views=2) as (view, later):
            assert self.run(view, From(13)).outcome is None
            (folder,) = self.folders(view)
            newest = list_checkpoints([folder])[-1].path
            newest.write_bytes(newest.read_bytes()[:-200])
            assert self.run(later).outcome == Outcome.COMPLETE
            assert_same(self.result(later), expected)

    @pytest.mark.parametrize("look", [1, 6])
    def test_a_trial_whose_lease_is_lost_ends_and_stores_nothing_more(self, studies: Studies, look: int) -> None:
        with self.open(studies) as (other,):
            late = dying(other)
            before: list[FrozenTrial] = []

            def take() -> None:
                assert [each.number for each in other.requeue_dead()] == [0]
                before.append(stored(other))

            report = self.run(late, From(look, take))
            assert (report.outcome, report.value) == (None, None)
            assert stored(other) == before[0]
            late.storage.close()
            assert self.run(other).outcome == Outcome.COMPLETE

    def test_a_lease_that_the_heartbeat_misses_ends_the_trial_with_the_next_look(self, studies: Studies) -> None:
        with self.open(studies) as (view,):
            trial, request = view.study.ask(), StopRequest()
            request.lose(Lease(trial._trial_id, 1))
            report = self.run(view, request, trial=trial)
            assert (report.outcome, report.epochs) == (None, 0)
            assert stored(view).intermediate_values == {}

    def test_a_database_that_fails_for_good_ends_the_trial_with_a_checkpoint(self, studies: Studies) -> None:
        with self.open(studies) as (other,):
            late, request = dying(other), StopRequest()
            file = late.spec.output_dir / "study.db"
            gone = InThirdEpoch(lambda: file.rename(file.with_name("kept.db")))
            with pytest.raises(DatabaseGoneError):
                self.run(late, request, pulse=gone)
            late.storage.close()
            file.with_name("kept.db").rename(file)
            assert request.leaving
            assert list_checkpoints(self.folders(other))[-1].epoch >= 3
            assert [each.outcome for each in other.requeue_dead()] == [STOPPED]
            assert self.run(other).outcome == Outcome.COMPLETE

    # ---- what is wrong with the training

    def test_a_value_that_is_no_number_means_diverged_and_is_not_asked_about(self, studies: Studies) -> None:
        with self.open(studies, "loss.nan=true") as (view,):
            pruner = view.study.pruner = AskedAt(prune_at=1)
            report = self.run(view)
            trial = stored(view)
            assert report.outcome == outcome_of(trial) == Outcome.DIVERGED
            assert (trial.state, trial.value, report.value) == (TrialState.COMPLETE, math.inf, None)
            assert list(trial.intermediate_values) == [1]
            assert pruner.steps == []

    def test_an_error_is_the_trials_end_and_keeps_its_text(self, studies: Studies) -> None:
        with self.open(studies, "loss.fail=true") as (view,):
            report = self.run(view)
            assert (report.outcome, report.reason) == (Outcome.ERROR, "ValueError: this loss fails")
            assert stored(view).state == TrialState.FAIL

    def test_a_checkpoint_that_could_not_be_read_back_is_refused(self, studies: Studies) -> None:
        studies.spec()
        (studies.folder / "odd.py").write_text(ODD)
        with self.open(studies, "callbacks={odd: {_target_: odd.Odd}, checkpoint: {max_overhead: 1}}") as (view,):
            report = self.run(view)
            assert report.outcome == Outcome.ERROR
            assert report.reason.startswith("UnreadableError: ")
            assert "odd is a object, which can't be read back" in report.reason
            assert list(view.spec.output_dir.rglob("*.pt")) == []


class TestTrainerBridge(SessionContract):
    make = staticmethod(trainer_code)

    @staticmethod
    def weights(checkpoint: dict[str, Any]) -> dict[str, Any]:
        return {"model": checkpoint["model"], "optimizer": checkpoint["optimizer"]}


class TestFunction(SessionContract):
    make = staticmethod(function_code)
    unsaved = 1

    @staticmethod
    def weights(checkpoint: dict[str, Any]) -> dict[str, Any]:
        saved = checkpoint["saved"]
        return {"model": saved["model"], "optimizer": saved["optimizer"]}
