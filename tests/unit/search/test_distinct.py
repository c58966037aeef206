"""Parameters that were tried before: others are drawn, or the known result is taken over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution
from optuna.trial import create_trial

from hpo.execution.observer import Observer
from hpo.search.curve_sampler import CurveGPSampler
from hpo.search.distinct import point_key, twin
from hpo.storage.attributes import RUN_ATTR, SAME_AS_ATTR
from hpo.study.outcome import Outcome
from hpo.study.standing import standing_of
from hpo.study.status import study_status
from hpo.study.trial_entries import study_trials
from hpo.trial.report import TrialReport
from tests.support.attempts import run
from tests.support.commands import STUDY, hpo, hpo_json, make_study
from tests.support.studies import Studies, ask
from tests.unit.study.test_granting import run_all

pytestmark = pytest.mark.full

FINITE = (
    "search_space={optimizer.lr: {type: categorical, choices: [0.1, 0.2, 0.3]}, "
    "model.hidden: {type: int, low: 2, high: 5}}"
)
POINTS = 12
STEPS = 12
STEPPED = (
    "search_space={optimizer.lr: {type: float, low: 0.1, high: 1.2, step: 0.1}, "
    "model.hidden: {type: int, low: 2, high: 3}}"
)
HIDDEN = "{type: int, low: 2, high: 3}"
NAN = "{type: categorical, choices: [false, true]}"


def key(params: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(sorted(params.items()))


@pytest.mark.parametrize("name", ["random", "tpe", "nsgaii", "qmc", "cmaes, allow_pickle: true"])
def test_a_finite_space_is_walked_through_before_anything_is_tried_twice(studies: Studies, name: str) -> None:
    with studies.open(FINITE, f"study.sampler={{name: {name}, seed: 3}}", "study.n_trials=30") as (view,):
        drawn = []
        for _ in range(POINTS):
            trial, params = ask(view)
            view.study.tell(trial, params["optimizer.lr"] + params["model.hidden"])
            drawn.append(key(params))
        assert len(set(drawn)) == POINTS
        ask(view)  # nothing new is left: the last draw is taken


@pytest.mark.parametrize("where", ["[]", "[model.hidden >= optimizer.lr]"])
def test_a_first_parameter_of_one_value_is_no_point_of_a_persons(studies: Studies, where: str) -> None:
    space = FINITE.replace("[0.1, 0.2, 0.3]", "[0.1]").replace("high: 5", "high: 9")
    settings = f"where={where}", "study.sampler={name: random, seed: 3}", "study.n_trials=30"
    with studies.open(space, *settings) as (view,):
        assert len({ask(view)[1]["model.hidden"] for _ in range(8)}) == 8


def test_a_space_that_is_used_up_is_not_drawn_from_again_and_again(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, drawn = [], CurveGPSampler.sample_relative

    def counted(*given: Any) -> dict[str, Any]:
        calls.append(1)
        return drawn(*given)

    monkeypatch.setattr(CurveGPSampler, "sample_relative", counted)
    where = "where=[model.hidden == 2 and optimizer.lr < 0.15]"
    with studies.open(FINITE, where, "study.sampler={name: curve_gp, seed: 3}", "study.n_trials=30") as (view,):
        points = [ask(view)[1] for _ in range(6)]
        assert points == [{"optimizer.lr": 0.1, "model.hidden": 2}] * 6
    assert len(calls) <= 6 * 5


@pytest.mark.parametrize("name", ["random", "tpe", "curve_gp"])
def test_a_step_is_the_same_point_whether_it_is_written_or_computed(studies: Studies, name: str) -> None:
    settings = f"study.sampler={{name: {name}, seed: 3}}", "study.n_trials=30"
    with studies.open(STEPPED, *settings) as (view,):
        view.study.enqueue_trial({"optimizer.lr": 0.3, "model.hidden": 2})  # 0.1 + 2 · 0.1 is not equal to it
        drawn = []
        for _ in range(STEPS * 2):
            trial, params = ask(view)
            view.study.tell(trial, params["optimizer.lr"])
            drawn.append((round(params["optimizer.lr"] * 10), params["model.hidden"]))
        assert len(set(drawn)) == STEPS * 2
        known = view.study.trials[-1]
        written = {**known.params, "optimizer.lr": round(known.params["optimizer.lr"], 1)}
        assert twin(view.study, -1, written, view.space.distributions) is not None


def test_a_point_of_another_study_may_be_tried_here(studies: Studies) -> None:
    with studies.open(FINITE, "study.sampler={name: random, seed: 3}", "study.n_trials=30") as (view,):
        for point in view.space.grid():
            view.study.add_trial(create_trial(params=point, distributions=view.space.distributions, value=1.0))
        drawn = [ask(view) for _ in range(POINTS)]
        assert len({key(params) for _, params in drawn}) == POINTS
        assert twin(view.study, drawn[0][0].number, drawn[0][1], view.space.distributions) is None


def test_what_a_sampler_holds_fixed_stays_fixed(studies: Studies) -> None:
    fixed = "study.sampler={name: partial_fixed, fixed_params: {model.hidden: 3}, base_sampler: random}"
    with studies.open(FINITE, fixed, "study.n_trials=30") as (view,):
        drawn = [ask(view)[1] for _ in range(4)]  # one more than there are
        assert {params["model.hidden"] for params in drawn} == {3}


def test_running_trials_count_too(studies: Studies) -> None:
    with studies.open(FINITE, "study.sampler={name: random, seed: 3}", "study.n_trials=30", views=3) as views:
        drawn = [key(ask(views[index % 3])[1]) for index in range(9)]
        assert len(set(drawn)) == len(drawn)


def test_a_study_that_allows_duplicates_draws_some(studies: Studies) -> None:
    allowed = "study.duplicates=allow"
    with studies.open(FINITE, allowed, "study.sampler={name: random, seed: 3}", "study.n_trials=30") as (view,):
        drawn = [key(ask(view)[1]) for _ in range(POINTS)]
        assert len(set(drawn)) < len(drawn)


@pytest.mark.parametrize(("scheduler", "distinct"), [("asha", True), ("none", False)])
def test_under_a_scheduler_a_point_whose_trial_is_paused_is_not_drawn_for_its_result(
    scheduler: str, distinct: bool, studies: Studies
) -> None:
    reuse = ("study.duplicates=reuse", f"study.scheduler={scheduler}", "study.pruner=none")
    with studies.open(FINITE, *reuse, "study.sampler={name: random, seed: 3}", "study.n_trials=30") as (view,):
        drawn = []
        for _ in range(POINTS):
            trial, params = ask(view)
            trial.report(1.0, 1)
            view.storage.pause(trial._trial_id, 1)
            drawn.append(key(params))
        assert (len(set(drawn)) == POINTS) == distinct


def test_the_same_study_draws_the_same_points_again(studies: Studies) -> None:
    drawn = []
    for at in ("one", "two"):
        options = (FINITE, "study.sampler={name: random, seed: 3}", "study.n_trials=30")
        with studies.open(*options, at=at) as (view,):
            drawn.append([key(ask(view)[1]) for _ in range(8)])
    assert drawn[0] == drawn[1]


def test_a_condition_belongs_to_the_point(studies: Studies) -> None:
    text = STUDY.partition("  optimizer.lr")[0] + (
        "  optimizer._target_: {type: categorical, choices: [torch.optim.AdamW, torch.optim.SGD]}\n"
        "  optimizer.momentum: {type: int, low: 0, high: 1, when: {optimizer._target_: torch.optim.SGD}}\n"
    )
    sampler = "study.sampler={name: tpe, seed: 1, n_startup_trials: 1}"  # it draws by groups
    with studies.open(sampler, text=text) as (view,):
        drawn = []
        for _ in range(5):
            trial, params = ask(view)
            view.study.tell(trial, 1.0)
            drawn.append(key(params))
        assert len(set(drawn[:3])) == 3


def test_an_enqueued_trial_is_left_as_it_was_given(studies: Studies) -> None:
    with studies.open(FINITE, "study.n_trials=30") as (view,):
        for _ in range(2):
            view.study.enqueue_trial({"optimizer.lr": 0.2, "model.hidden": 3})
        assert [ask(view)[1] for _ in range(2)] == [{"optimizer.lr": 0.2, "model.hidden": 3}] * 2


@given(st.dictionaries(st.text(max_size=3), st.one_of(st.booleans(), st.integers(0, 2), st.text(max_size=2))))
def test_a_points_key_knows_no_order(params: dict[str, Any]) -> None:
    assert point_key(params, {}) == point_key(dict(reversed(params.items())), {})


def test_a_points_key_tells_true_from_one() -> None:
    assert point_key({"a": True}, {}) != point_key({"a": 1}, {})
    assert point_key({"a": 1}, {}) == point_key({"a": 1.0}, {})
    assert point_key({"a": 1}, {}) != point_key({"b": 1}, {})


def test_a_points_key_counts_steps() -> None:
    space = {"a": FloatDistribution(-0.3, 0.3, step=0.1), "b": FloatDistribution(-0.3, 0.3)}
    for at in range(7):
        written, computed = round(-0.3 + at * 0.1, 1), -0.3 + at * 0.1
        assert point_key({"a": written}, space) == point_key({"a": computed}, space)
    assert point_key({"a": 0.1}, space) != point_key({"a": 0.2}, space)
    assert point_key({"b": 0.3}, space) != point_key({"b": 0.1 + 0.2}, space)


@pytest.mark.usefixtures("in_process")
def test_a_known_result_is_taken_over(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    overrides = (
        f"search_space={{model.hidden: {HIDDEN}, loss.nan: {NAN}}}",
        "study.duplicates=reuse",
        "study.constraints={val_mae: '<= 100'}",
    )
    hpo("run", study, "--workers", 1, "--n-trials", 12, *overrides)
    trials = hpo_json("trials", study, *overrides)
    first: dict[Any, Any] = {}
    again = []
    for trial in trials:
        before = first.setdefault(key(trial["params"]), trial)
        if before is not trial:
            again.append(trial)
            kept = ("outcome", "value", "constraints")
            assert {name: trial[name] for name in kept} == {name: before[name] for name in kept}
            assert trial["epochs"] == 0
            assert trial["reason"] == f"the same parameters as trial {before['trial']}: its result was taken over"
            log = next((tmp_path / "runs/tiny/trials" / str(trial["trial"])).rglob("log.txt")).read_text()
            assert "epoch" not in log  # nothing was trained
    assert len(first) <= 4
    assert {trial["outcome"] for trial in again} == {"complete", "diverged"}


def test_a_result_that_is_taken_over_costs_no_epochs(studies: Studies) -> None:
    fixed = "search_space={model.hidden: {type: int, low: 3, high: 3}}"
    overrides = (fixed, "study.duplicates=reuse", "study.n_trials=3", "study.epochs=6", "trainer.max_epochs=2")
    with studies.open(*overrides, views=2) as (view, watching):
        observer = Observer(watching)
        run_all(view)
        said = [each for _, each in observer.look() if isinstance(each, TrialReport)]
        assert [(each.epochs, "as trial 0: its result" in each.reason) for each in said[1:]] == [(0, True)] * 2
        assert [entry["epochs"] for entry in study_trials(view)] == [2, 0, 0]
        assert [trial.last_step for trial in view.study.get_trials()] == [2, 2, 2]
        assert standing_of(view).epochs_left == 4
        assert study_status(view)["epochs"] == {"trained": 2, "limit": 6}


def test_a_diverged_result_that_is_taken_over_is_reported_without_a_value(studies: Studies) -> None:
    diverging = "search_space={loss.nan: {type: categorical, choices: [true]}}"
    with studies.open(diverging, "study.duplicates=reuse") as (view,):
        reports = [run(view) for _ in range(2)]
        assert [(report.outcome, report.value) for report in reports] == [(Outcome.DIVERGED, None)] * 2
        assert view.study.get_trials()[1].user_attrs[SAME_AS_ATTR] == 0


def test_a_result_that_was_taken_over_is_taken_from_the_trial_that_trained(studies: Studies) -> None:
    fixed = "search_space={model.hidden: {type: int, low: 3, high: 3}}"
    with studies.open(fixed, "study.duplicates=reuse", views=2) as (one, other):
        first, _ = ask(one)
        run(other)
        one.storage.requeue(first._trial_id)  # its worker left before it began to train
        run(other)
        run(other)
        assert [trial.user_attrs.get(SAME_AS_ATTR) for trial in other.study.get_trials()] == [1, None, 1]


def test_a_trial_that_has_begun_to_train_goes_on_as_itself(studies: Studies) -> None:
    fixed = "search_space={model.hidden: {type: int, low: 3, high: 3}}"
    with studies.open(fixed, "study.duplicates=reuse", views=2) as (one, other):
        begun, _ = ask(one)
        begun.set_user_attr(RUN_ATTR, {"seed": 1, "threads": 1})
        ended, _ = ask(other)
        one.storage.requeue(begun._trial_id)
        other.study.tell(ended, 5.0)
        assert run(other).number == 0
        trials = other.study.get_trials()
        assert SAME_AS_ATTR not in trials[0].user_attrs
        assert trials[0].value != 5.0
