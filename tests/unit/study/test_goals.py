"""Goals that end a study before its trials are used up."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from hpo.config.schema_study import StudySection
from hpo.config.spec import load_spec
from hpo.storage.attributes import BEST_ATTR, PAUSED_ATTR
from hpo.study.goals import goal_reached
from tests.support.commands import hpo, hpo_json, make_study

START = datetime(2026, 1, 1)


def section(**fields: object) -> StudySection:
    return StudySection.model_validate({"name": "tiny", **fields})


def ended(*values: float | None) -> list[FrozenTrial]:
    """Complete trials with these values, in the order of their ends; None for a failed one."""
    trials = []
    for number, value in enumerate(values):
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        trial = optuna.trial.create_trial(state=state, value=value)
        trial.number, trial.datetime_complete = number, START + timedelta(seconds=number)
        trials.append(trial)
    return trials


def test_without_goals_nothing_is_reached() -> None:
    assert goal_reached(section(), ended(0.0, 1.0, 2.0)) is None


@pytest.mark.parametrize(
    ("direction", "target", "reached"),
    [("minimize", 0.5, True), ("minimize", 0.49, False), ("maximize", 0.9, True), ("maximize", 0.91, False)],
)
def test_a_target_is_reached_by_a_value_as_good(direction: str, target: float, reached: bool) -> None:
    why = goal_reached(section(direction=direction, target_value=target), ended(0.9, 0.5, None))
    assert (why is not None) == reached
    if why:
        assert "target_value" in why


def test_trials_without_an_improvement_are_counted_from_the_best_on() -> None:
    goal = section(stop_after_no_improvement=2)
    assert goal_reached(goal, []) is None
    assert goal_reached(goal, ended(None, None, None)) is None
    assert goal_reached(goal, ended(1.0, 2.0)) is None
    assert goal_reached(goal, ended(1.0, 2.0, 0.5, None)) is None
    assert goal_reached(goal, ended(1.0, 2.0, 0.5, None, 0.6)) is not None


def test_one_that_runs_has_not_ended_without_an_improvement() -> None:
    running = optuna.trial.create_trial(state=TrialState.RUNNING)
    assert goal_reached(section(stop_after_no_improvement=1), [*ended(1.0), running]) is None


def test_nothing_ends_after_a_best_trial_that_may_still_improve() -> None:
    """A scheduler has paused it; what ended before it came to its best epoch says nothing."""
    goal, trials = section(stop_after_no_improvement=2), ended(1.0, 2.0, 3.0)
    assert goal_reached(goal, trials) is not None
    best = {"epoch": 3, "metrics": {"val_loss": 0.5}, "checkpoint": None}
    attrs = {BEST_ATTR: best, PAUSED_ATTR: 3}
    paused = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attrs)
    paused.number = 3
    assert goal_reached(goal, [*trials, paused]) is None


def test_one_as_good_as_the_best_is_no_improvement() -> None:
    goal = section(
        objectives={"val_loss": "minimize", "size": "minimize"}, pruner="none", stop_after_no_improvement=2
    )
    trials = [optuna.trial.create_trial(values=values) for values in ([1, 2], [2, 1], [1, 2], [2, 1])]
    for number, trial in enumerate(trials):
        trial.number, trial.datetime_complete = number, START + timedelta(seconds=number)
    assert goal_reached(goal, trials[:3]) is None
    assert goal_reached(goal, trials) is not None


def test_a_trial_outside_the_bounds_reaches_no_target() -> None:
    trials = ended(0.1)
    trials[0].system_attrs["constraints:parameters"] = 1.0
    assert goal_reached(section(target_value=0.5), trials) is None


@pytest.mark.usefixtures("in_process")
def test_a_study_stops_at_its_target_and_goes_on_with_another(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    out = hpo("run", study, "--workers", 2, "--n-trials", 30, "study.target_value=1e6")
    assert "has reached target_value" in out.stdout + out.stderr
    status = hpo_json("status", study, "study.target_value=1e6")
    assert 1 <= status["finished"] < 30
    assert status["running"] == 0
    assert "target_value" in status["goal"]
    assert status["goal"] in hpo("status", study, "study.target_value=1e6").stdout
    again = hpo("run", study, "--n-trials", 30, "study.target_value=1e6")
    assert "has reached target_value" in again.stdout + again.stderr
    assert hpo_json("status", study)["finished"] == status["finished"]
    hpo("run", study, "--workers", 2, "--n-trials", 5, "study.stop_after_no_improvement=50")
    assert load_spec(study).study.target_value is None
    assert hpo_json("status", study)["finished"] >= 5
