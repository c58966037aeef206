"""An Optuna objective as it is, on a session: parameters, steps, decisions, values, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import yaml
from optuna.exceptions import StorageInternalError
from optuna.trial import FixedTrial

from hpo.console.lines import Reporter
from hpo.errors import StudyError
from hpo.execution.observer import Observer
from hpo.search.schedulers.pruner import PrunerScheduler
from hpo.storage.attributes import BEST_ATTR, REASON_ATTR
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome
from hpo.study.trial_entries import study_trials
from hpo.trial.report import TrialReport
from hpo.trial.script_trial import ScriptTrial, session_of
from hpo.trial.session import MAX_STEP
from hpo.trial.stopping import StopRequest
from hpo.trial.training_code import FunctionCode
from tests.support import attempts
from tests.support.attempts import AskedAt, stored
from tests.support.databases import server_of
from tests.support.pausing import PauseAll
from tests.support.studies import Studies, take

STUDY = """
study: {name: script, direction: minimize, n_trials: 6, sampler: {name: random, seed: 3}, pruner: none}
objective: {_target_: parts.objective}
"""
CODE = "def objective(trial):\n    return trial.suggest_float('x', 0, 1)\n"
SEVERAL = "study: {name: several, n_trials: 6, objectives: {loss: minimize, size: minimize}}\n"
Objective = Callable[[ScriptTrial], Any]


def opened(studies: Studies, text: str = STUDY, at: str = "") -> Any:
    return studies.open(text=text, code=CODE, at=at)


def run(view: OpenStudy, objective: Objective, request: StopRequest | None = None) -> TrialReport:
    trial = take(view)
    assert isinstance(trial, optuna.Trial)
    goals = tuple(view.spec.study.goals)
    code = FunctionCode(lambda session: objective(ScriptTrial(session, trial)), goals)
    return attempts.run(view, code, trial, request=request)


def steps(*numbers: int, prune: bool = False) -> Objective:
    """Reports the square of each step's number, and returns the last one."""

    def objective(trial: ScriptTrial) -> float:
        for step in numbers:
            trial.report(float(step * step), step)
            if prune and trial.should_prune():
                raise optuna.TrialPruned
        return float(numbers[-1] ** 2)

    return objective


def test_a_name_in_the_queue_that_it_never_asks_for_is_said_once_it_has_ended(
    studies: Studies, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "it was queued with `xx`, `y`, which its function never asked for"
    with studies.open(text=STUDY, code=CODE, views=2) as (view, watching):
        observer = Observer(watching)
        view.study.enqueue_trial({"xx": 0.5, "x": 0.25, "y": 1})
        view.study.enqueue_trial({"x": 0.75})
        reports = [run(view, lambda trial: trial.suggest_float("x", 0, 1)) for _ in range(2)]
        assert [(each.value, each.reason) for each in reports] == [(0.25, said), (0.75, "")]
        seen = [each.reason for _, each in observer.look() if isinstance(each, TrialReport)]
        assert seen == [said, ""]
        assert [entry["reason"] for entry in study_trials(view)] == [said, None]
    assert capsys.readouterr().out.count(said) == 1


def test_it_is_a_trial_of_optuna_with_what_a_session_has(studies: Studies) -> None:
    seen: list[Any] = []

    def objective(trial: ScriptTrial) -> float:
        x = trial.suggest_float("x", 0.0, 1.0, step=0.25)
        n = trial.suggest_int("n", 2, 64, log=True)
        kind = trial.suggest_categorical("kind", ["a", "b"])
        assert trial.suggest_float("x", 0.0, 1.0, step=0.25) == x
        trial.set_user_attr("size", n)
        seen.append((trial, {"x": x, "n": n, "kind": kind}))
        return x

    with opened(studies) as (view,):
        report = run(view, objective)
        ((trial, params),) = seen
        assert isinstance(trial, optuna.trial.BaseTrial)
        assert params == trial.params == report.params == stored(view).params
        assert trial.distributions == stored(view).distributions
        assert stored(view).user_attrs["size"] == params["n"]
        assert (trial.number, trial.study.study_name) == (0, "script")
        assert trial.folder == view.spec.output_dir / "trials" / "0" / "attempt-1"
        assert (trial.device, trial.seed) == (torch.device("cpu"), view.trial_seed(0, {}))
        config = yaml.safe_load((trial.folder / "config.yaml").read_text())
        assert config["params"] == params
        assert (report.outcome, report.value) == (Outcome.COMPLETE, params["x"])


def test_a_trial_outside_of_its_own_constraints_is_not_shown_as_the_best_so_far(
    studies: Studies, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that is within them later is, also to who watches the run of another machine."""

    def objective(trial: ScriptTrial) -> float:
        trial.set_constraint("size", 1.0 - trial.number)
        return float(trial.number)

    with studies.open(text=STUDY, code=CODE, views=2) as (view, watching):
        observer, reporter = Observer(watching), Reporter(view)
        for _ in range(2):
            reporter.heard("worker-1", run(view, objective))
        lines = capsys.readouterr().out.splitlines()
        assert [line.endswith("best") for line in lines] == [False, True]
        assert [each.bounded for _, each in observer.look() if isinstance(each, TrialReport)] == [True, True]


def test_a_truth_value_beside_a_number_that_counts_as_equal_is_refused(studies: Studies) -> None:
    """The database would have 1 of a trial that had True."""
    with opened(studies) as (view,):
        assert run(view, lambda trial: trial.suggest_categorical("c", [2, 1, 1, 1.0])).outcome == Outcome.COMPLETE
        report = run(view, lambda trial: trial.suggest_categorical("d", [False, "a", 0]))
        assert report.outcome == Outcome.ERROR
        assert "the choices of `d` hold False and 0, which count as equal" in report.reason


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
@pytest.mark.parametrize(
    "write",
    [
        lambda trial: trial.suggest_float("x" * 600, 0, 1),
        lambda trial: trial.set_user_attr("x" * 600, 1),
        lambda trial: trial.set_constraint("x" * 600, 1.0),
    ],
    ids=["a parameter", "an attribute", "a constraint"],
)
def test_a_name_that_the_database_refuses_fails_its_trial_alone(
    studies: Studies, kind: str, write: Objective, request: pytest.FixtureRequest
) -> None:
    url = server_of(kind, request).new_database(ready=True)
    with studies.open(f"run.storage={url}", text=STUDY, code=CODE) as (view,):
        failed = run(view, lambda trial: trial.suggest_float("y", 0, 1) + write(trial))
        assert failed.outcome == Outcome.ERROR
        assert "the database refuses a value: " in failed.reason
        assert "the database refuses a value: " in stored(view).user_attrs[REASON_ATTR]
        assert stored(view).params == {"y": failed.params["y"]}
        assert run(view, lambda trial: trial.suggest_float("y", 0, 1)).outcome == Outcome.COMPLETE


def test_a_trial_that_starts_again_gets_the_parameters_that_it_has_drawn(studies: Studies) -> None:
    drawn: list[dict[str, Any]] = []
    leaving = StopRequest()

    def objective(trial: ScriptTrial) -> float:
        x, y = trial.suggest_float("x", 0, 1), trial.suggest_int("y", 1, 10**6)
        if not drawn:
            leaving.leave()
        drawn.append({"x": x, "y": y})
        z = 0.0 if trial.should_prune() else trial.suggest_float("z", 0, 1)
        return x + z

    with opened(studies) as (view,):
        assert run(view, objective, leaving).outcome is None
        assert run(view, objective).outcome == Outcome.COMPLETE
        assert drawn[0] == drawn[1]
        assert {"x", "y", "z"} == stored(view).params.keys()


def test_a_call_that_would_stop_the_study_says_what_does_so(studies: Studies) -> None:
    with opened(studies) as (view,):
        report = run(view, lambda trial: trial.study.stop())
    assert report.outcome == Outcome.ERROR
    assert "write `study.target_value` or `study.stop_after_no_improvement`" in report.reason


@pytest.mark.parametrize("name", [3, None, ("a", "b")])
def test_a_parameters_name_that_is_no_text_is_said(studies: Studies, name: Any) -> None:
    with studies.open() as (view,):
        report = run(view, lambda trial: trial.suggest_float(name, 0, 1))
    assert report.outcome == Outcome.ERROR
    assert f"the name of a parameter is {name!r}, and no text" in report.reason
    assert str(name) in report.reason.partition("fix: ")[2]


def test_choices_may_be_lists_tuples_and_mappings(studies: Studies) -> None:
    choices: list[Any] = [(3, 3), [4], {"a": 1}, "text", None]
    drawn: list[Any] = []

    def objective(trial: ScriptTrial) -> float:
        drawn.append(trial.suggest_categorical("x", choices))
        assert trial.params["x"] is drawn[-1]
        return 1.0

    with opened(studies) as (view,):
        for _ in range(6):
            assert run(view, objective).outcome == Outcome.COMPLETE
        stored_as = [trial.params["x"] for trial in view.study.trials]
        assert {type(each) for each in stored_as} <= {str, type(None)}
        assert len(set(stored_as)) > 2
        for kept, value in zip(stored_as, list(drawn), strict=True):  # as of `hpo train`
            session: Any = SimpleNamespace(params={"x": kept})
            objective(ScriptTrial(session, FixedTrial({"x": kept})))
            assert drawn[-1] == value


@pytest.mark.parametrize("choice", [torch.nn.ReLU, np.int64(3), (np.float32(0.5),)])
def test_a_choice_that_no_storage_keeps_is_said_with_what_to_write(studies: Studies, choice: Any) -> None:
    with opened(studies) as (view,):
        report = run(view, lambda trial: trial.suggest_categorical("act", [choice, "tanh"]))
    assert report.outcome == Outcome.ERROR
    assert "the choices of `act` are stored as JSON" in report.reason
    assert f"value: {choice!r}" in report.reason
    assert "fix: " in report.reason


@pytest.mark.parametrize(
    ("numbers", "epochs"),
    [((0, 1, 2), (1, 2, 3)), ((1, 2, 3), (1, 2, 3)), ((0, 10, 20), (1, 11, 21)), ((5, 10), (5, 10))],
)
def test_steps_count_from_0_or_1_and_may_leave_some_out(
    studies: Studies, numbers: tuple[int, ...], epochs: tuple[int, ...]
) -> None:
    with opened(studies) as (view,):
        report = run(view, steps(*numbers))
        assert report.epochs == epochs[-1]
        assert stored(view).intermediate_values == {
            epoch: float(step**2) for epoch, step in zip(epochs, numbers, strict=True)
        }


def test_a_step_that_comes_again_keeps_its_first_value(
    studies: Studies, capsys: pytest.CaptureFixture[str]
) -> None:
    def folds(trial: ScriptTrial) -> float:
        for fold in range(2):
            for step in range(3):
                trial.report(float(fold), step)
        return 0.5

    with opened(studies) as (view,):
        report = run(view, folds)
        assert (report.outcome, report.value) == (Outcome.COMPLETE, 0.5)
        assert stored(view).intermediate_values == {1: 0.0, 2: 0.0, 3: 0.0}
    assert capsys.readouterr().out.count("is reported again: its first value stays") == 1


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ((0, 4, 2), "step 2 is reported after step 4: count upwards"),
        ((-1,), "step -1 is not from 0 to"),
        ((MAX_STEP + 1,), "is not from 0 to 100,000: count epochs, or reports"),
    ],
)
def test_a_step_that_can_not_be_is_the_trials_error(
    studies: Studies, numbers: tuple[int, ...], problem: str
) -> None:
    with opened(studies) as (view,):
        report = run(view, steps(*numbers))
        assert report.outcome == Outcome.ERROR
        assert problem in report.reason


def test_what_it_returns_is_its_value_and_not_the_best_step(studies: Studies) -> None:
    with opened(studies) as (view,):
        assert run(view, steps(3, 1 + 4, 4 + 2)).value == 36.0
        best = stored(view).user_attrs[BEST_ATTR]
        assert (best["epoch"], best["metrics"]) == (6, {"value": 36.0})

        def best_of_all(trial: ScriptTrial) -> float:
            steps(0, 1, 2)(trial)
            return 1.0

        assert run(view, best_of_all).value == 1.0
        assert view.study.trials[1].user_attrs[BEST_ATTR]["epoch"] == 2

        def nothing(trial: ScriptTrial) -> None:
            steps(0, 1, 2)(trial)

        assert run(view, nothing).value == 0.0


def test_a_returned_nan_has_diverged_and_so_has_a_reported_one(studies: Studies) -> None:
    def reported(trial: ScriptTrial) -> float:
        trial.report(float("nan"), 0)
        if trial.should_prune():
            raise optuna.TrialPruned
        return 1.0

    with opened(studies) as (view,):
        assert run(view, reported).outcome == Outcome.DIVERGED
        assert run(view, lambda trial: (steps(0, 1)(trial), float("nan"))[1]).outcome == Outcome.DIVERGED


def test_several_objectives_are_returned_in_their_order(studies: Studies) -> None:
    with opened(studies, SEVERAL + "objective: {_target_: parts.objective}\n") as (view,):
        assert run(view, lambda _: (0.5, 20)).outcome == Outcome.COMPLETE
        assert stored(view).values == [0.5, 20.0]
        report = run(view, lambda _: 0.5)
        assert report.outcome == Outcome.ERROR
        assert "has returned 1 value, and the study optimises loss, size" in report.reason


@pytest.mark.parametrize("value", [None, "much", [1.0, 2.0]])
def test_what_is_no_value_is_the_trials_error(studies: Studies, value: Any) -> None:
    with opened(studies) as (view,):
        report = run(view, lambda _: value)
        assert report.outcome == Outcome.ERROR
        assert "return" in report.reason


def test_a_storage_of_its_own_that_fails_is_the_trials_error(studies: Studies) -> None:
    def objective(trial: ScriptTrial) -> float:
        raise StorageInternalError("its server is away")

    with opened(studies) as (view,):
        report = run(view, objective)
        assert report.outcome == Outcome.ERROR
        assert "a storage of the function's own failed: its server is away" in report.reason


def test_the_studys_storage_that_fails_is_not_the_trials_error(studies: Studies) -> None:
    def objective(trial: ScriptTrial) -> float:
        with view.storage.engine.begin() as conn:
            conn.exec_driver_sql("ALTER TABLE trial_params RENAME TO gone")
        return trial.suggest_float("x", 0, 1)

    with opened(studies) as (view,), pytest.raises(StorageInternalError):
        run(view, objective)


def test_should_prune_answers_what_the_session_has_decided(studies: Studies) -> None:
    with opened(studies) as (view,):
        view.study.pruner = AskedAt(prune_at=2)
        report = run(view, steps(0, 1, 2, prune=True))
        assert (report.outcome, report.epochs) == (Outcome.PRUNED, 2)
        # One that does not ask is ended by its next report, and one that prunes itself is pruned.
        report = run(view, steps(0, 1, 2))
        assert (report.outcome, report.epochs) == (Outcome.PRUNED, 2)

        def itself(trial: ScriptTrial) -> float:
            raise optuna.TrialPruned

        assert run(view, itself).outcome == Outcome.PRUNED


def test_a_run_that_ends_stops_it_where_it_asks(studies: Studies) -> None:
    request = StopRequest()

    def objective(trial: ScriptTrial) -> float:
        trial.report(1.0, 0)
        request.leave()
        assert not trial.should_prune()
        raise AssertionError("it was to end")

    with opened(studies) as (view,):
        assert run(view, objective, request).outcome is None
        assert stored(view).state == optuna.trial.TrialState.WAITING


@pytest.mark.parametrize("early", [True, False], ids=["saves before it asks", "saves after it has asked"])
def test_one_that_saves_pauses_and_resumes_from_its_checkpoint(studies: Studies, early: bool) -> None:
    began: list[int] = []

    def objective(trial: ScriptTrial) -> float:
        done = trial.load_checkpoint() or {"step": -1}
        began.append(done["step"] + 1)
        for step in range(done["step"] + 1, 4):
            trial.report(float(step), step)
            if early:
                trial.save_checkpoint({"step": step})
            if trial.should_prune():
                raise optuna.TrialPruned
            trial.save_checkpoint({"step": step})
        return 9.0

    with opened(studies) as (view,):
        paused = replace(view, scheduler=PauseAll(2))
        assert run(paused, objective).paused
        view.storage.resume(stored(view)._trial_id)
        trial_id = stored(view)._trial_id
        trial = optuna.Trial(view.study, trial_id)
        code = FunctionCode(lambda session: objective(ScriptTrial(session, trial)))
        again = replace(view, scheduler=PrunerScheduler())
        report = attempts.run(again, code, trial)
        assert (report.outcome, report.value) == (Outcome.COMPLETE, 9.0)
        assert began == [0, 2]
        assert stored(view).intermediate_values == {epoch: float(epoch - 1) for epoch in range(1, 5)}


def test_an_attribute_of_hpos_own_is_refused(studies: Studies) -> None:
    with opened(studies) as (view,):
        report = run(view, lambda trial: trial.set_user_attr("hpo:best", 1))
        assert "begins with 'hpo:', as those of hpo do" in report.reason


def test_callbacks_of_other_libraries_take_it_as_they_take_a_session(studies: Studies) -> None:
    def objective(trial: ScriptTrial) -> float:
        assert session_of(trial) is trial.session is session_of(trial.session)
        session_of(trial).report(1, value=0.5)
        return 0.25

    with opened(studies) as (view,):
        assert run(view, objective).value == 0.25


def test_a_fixed_trial_says_which_parameter_is_new() -> None:
    session: Any = SimpleNamespace(params={"x": 0.5})
    trial = ScriptTrial(session, FixedTrial({"x": 0.5}))
    assert trial.suggest_float("x", 0, 1) == 0.5
    with pytest.raises(StudyError, match="asks for a parameter `y`, which the trial does not have; it has x"):
        trial.suggest_int("y", 0, 1)
