"""Parameters that were tried before: others are drawn, or the known result is taken over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpo.distinct import point_key
from tests.acceptance.support import STUDY, hpo, hpo_json, make_study
from tests.hpo.support import Studies, ask

FINITE = (
    "search_space={optimizer.lr: {type: categorical, choices: [0.1, 0.2, 0.3]}, "
    "model.hidden: {type: int, low: 2, high: 5}}"
)
POINTS = 12
HIDDEN = "{type: int, low: 2, high: 3}"
NAN = "{type: categorical, choices: [false, true]}"


def key(params: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(sorted(params.items()))


@pytest.mark.parametrize("name", ["random", "tpe", "nsgaii", "qmc"])
def test_a_finite_space_is_walked_through_before_anything_is_tried_twice(studies: Studies, name: str) -> None:
    with studies.open(FINITE, f"study.sampler={{name: {name}, seed: 3}}", "study.n_trials=30") as (view,):
        drawn = []
        for _ in range(POINTS):
            trial, params = ask(view)
            view.study.tell(trial, params["optimizer.lr"] + params["model.hidden"])
            drawn.append(key(params))
        # A sampler that returns to what was best may give up before the last corner; one twice is the exception.
        assert len(set(drawn)) >= (POINTS if name == "random" else POINTS - 3)
        ask(view)  # nothing new is left: the last draw is taken


def test_running_trials_count_too(studies: Studies) -> None:
    with studies.open(FINITE, "study.sampler={name: random, seed: 3}", "study.n_trials=30", views=3) as views:
        drawn = [key(ask(views[index % 3])[1]) for index in range(9)]
        assert len(set(drawn)) == len(drawn)


def test_a_study_that_allows_duplicates_draws_some(studies: Studies) -> None:
    allowed = "study.duplicates=allow"
    with studies.open(FINITE, allowed, "study.sampler={name: random, seed: 3}", "study.n_trials=30") as (view,):
        drawn = [key(ask(view)[1]) for _ in range(POINTS)]
        assert len(set(drawn)) < len(drawn)


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
    with studies.open("study.sampler={name: random, seed: 1}", text=text) as (view,):
        drawn = [key(ask(view)[1]) for _ in range(3)]
        assert len(set(drawn)) == 3


def test_an_enqueued_trial_is_left_as_it_was_given(studies: Studies) -> None:
    with studies.open(FINITE, "study.n_trials=30") as (view,):
        for _ in range(2):
            view.study.enqueue_trial({"optimizer.lr": 0.2, "model.hidden": 3})
        assert [ask(view)[1] for _ in range(2)] == [{"optimizer.lr": 0.2, "model.hidden": 3}] * 2


@given(st.dictionaries(st.text(max_size=3), st.one_of(st.booleans(), st.integers(0, 2), st.text(max_size=2))))
def test_a_points_key_knows_no_order(params: dict[str, Any]) -> None:
    assert point_key(params) == point_key(dict(reversed(params.items())))


def test_a_points_key_tells_true_from_one() -> None:
    assert point_key({"a": True}) != point_key({"a": 1})
    assert point_key({"a": 1}) == point_key({"a": 1.0})
    assert point_key({"a": 1}) != point_key({"b": 1})


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
            kept = ("outcome", "value", "epochs", "constraints")
            assert {name: trial[name] for name in kept} == {name: before[name] for name in kept}
            log = next((tmp_path / "runs/tiny/trials" / str(trial["trial"])).rglob("log.txt")).read_text()
            assert "epoch" not in log  # nothing was trained
    assert len(first) <= 4
    assert {trial["outcome"] for trial in again} == {"complete", "diverged"}
