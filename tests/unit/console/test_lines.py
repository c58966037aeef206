"""The lines that a run prints of its trials."""

from __future__ import annotations

import optuna
import pytest

from hpo.console.lines import Reporter, print_summary
from hpo.study.outcome import Outcome
from hpo.trial.report import TrialReport
from hpo.trial.resources import Slot
from tests.support.studies import Studies, ask, take

SMALL_GRID = "search_space={model.hidden: {type: int, low: 3, high: 4}}"


def test_a_result_fits_a_terminal_of_80_columns_and_the_best_so_far_is_marked(
    studies: Studies, capsys: pytest.CaptureFixture[str]
) -> None:
    with studies.open("study.n_trials=40", "study.metric=val_mae", "study.direction=minimize") as (view,):
        reporter = Reporter(view)
        for number, value in ((8, -1.23456e-05), (9, 0.5), (10, -2.0)):
            reporter.heard("worker-1", TrialReport(number, Outcome.COMPLETE, value, 100, 86400.0))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.partition(" s")[2].strip() for line in lines] == ["best", "", "best"]
    assert lines[1].startswith("[ 2/40] trial 9    complete  val_mae 0.5")


def test_a_single_epoch_of_a_result_is_counted_in_the_singular_and_takes_no_less_room(
    studies: Studies, capsys: pytest.CaptureFixture[str]
) -> None:
    with studies.open() as (view,):
        reporter = Reporter(view)
        for epochs in (1, 2):
            reporter.heard("worker-1", TrialReport(0, Outcome.COMPLETE, 0.5, epochs, 1.0))
    one, two = capsys.readouterr().out.splitlines()
    assert "  1 epoch  " in one
    assert "  2 epochs " in two
    assert one.index(" s") == two.index(" s")


def test_a_study_that_another_run_has_set_to_fewer_trials_is_no_exhausted_grid(
    studies: Studies, capsys: pytest.CaptureFixture[str]
) -> None:
    with studies.open("study.n_trials=7") as (view,):
        view.storage.set_budget(view.study_id, 6)
        print_summary(view, "study.yaml", "done")
    printed = capsys.readouterr().out
    assert "another run has set the study to 6 trials since this one began" in printed
    assert "the same command continues it up to 7" in printed
    assert "grid" not in printed


def test_an_exhausted_grid_has_its_points_and_the_baseline_is_one_of_them(
    studies: Studies, capsys: pytest.CaptureFixture[str]
) -> None:
    with studies.open(SMALL_GRID, "study.sampler=grid", "study.baseline=true", "study.n_trials=9") as (view,):
        assert view.budget() == 2
        print_summary(view, "study.yaml", "done")
    assert "the grid is exhausted: it has 2 points" in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["interrupted", "stopped", "goal"])
def test_a_grid_whose_run_has_ended_early_is_not_exhausted(
    studies: Studies, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    with studies.open("study.sampler=grid", SMALL_GRID, "study.n_trials=9") as (view,):
        print_summary(view, "study.yaml", ending)
    printed = capsys.readouterr().out
    assert "0 of 2 trials finished" in printed
    assert "exhausted" not in printed
    assert "another run" not in printed


def test_null_is_a_value_of_the_best_trial(studies: Studies, capsys: pytest.CaptureFixture[str]) -> None:
    space = "search_space={lr_scheduler: {type: categorical, choices: [null]}}"
    with studies.open(space) as (view,):
        trial, _ = ask(view)
        view.study.tell(trial, 1.5)
        print_summary(view, "study.yaml", "done")
    assert "    lr_scheduler = None\n" in capsys.readouterr().out


def test_epochs_that_no_trial_is_left_for_are_not_laid_to_a_scheduler(
    studies: Studies, capsys: pytest.CaptureFixture[str]
) -> None:
    with studies.open("study.n_trials=1", "study.epochs=9") as (view,):
        trial, _ = ask(view)
        trial.report(1.5, 1)
        view.study.tell(trial, 1.5)
        print_summary(view, "study.yaml", "done")
    printed = capsys.readouterr().out
    assert "all of the study's trials have ended; 8 epochs of the budget not used" in printed
    assert "scheduler" not in printed


def test_a_study_that_stops_with_paused_trials_counts_them(
    studies: Studies, capsys: pytest.CaptureFixture[str]
) -> None:
    with studies.open("study.epochs=9", "study.scheduler=asha", "study.pruner=none") as (view,):
        trial = take(view)
        assert isinstance(trial, optuna.Trial)
        trial.report(1.5, 1)
        view.storage.pause(trial._trial_id, 1)
        print_summary(view, "study.yaml", "asked to stop")
    assert capsys.readouterr().out.splitlines()[1] == "1 of 9 epochs, 0 trials finished, 1 paused"


def test_a_study_of_one_trial_is_announced_in_the_singular(
    studies: Studies, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, said in ((("study.n_trials=1",), "1 trial, "), (("study.n_trials=2",), "2 trials, ")):
        with studies.open(*more, at=said.strip(", ")) as (view,):
            Reporter(view).begin({"worker-1": Slot("cpu", "cpu", None, 1)})
        assert f"study tiny: {said}1 worker on cpu" in capsys.readouterr().out
