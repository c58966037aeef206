"""The best trials: by one metric, on the Pareto front of several, and only within the bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import FrozenTrial, TrialState

from hpo.config.schema_study import FARTHEST, Bound, Direction, StudySection
from hpo.storage.attributes import BEST_ATTR
from hpo.study.ranking import best_of, is_feasible, is_ranked, pareto_front, ranked
from tests.support.attempts import run
from tests.support.studies import Studies

BOTH: dict[str, Direction] = {"val_loss": "minimize", "accuracy": "maximize"}

values = st.lists(
    st.tuples(st.integers(0, 5).map(float), st.integers(0, 5).map(float)), min_size=1, max_size=12, unique=False
)


def complete(number: int, *of: float, violation: float | None = None) -> FrozenTrial:
    trial = optuna.trial.create_trial(state=TrialState.COMPLETE, values=list(of))
    trial.number = number
    if violation is not None:
        trial.system_attrs["constraints:parameters"] = violation
    return trial


def beats(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether a point is at least as good in both, and better in one: the first low, the second high."""
    return one[0] <= other[0] and one[1] >= other[1] and tuple(one) != tuple(other)


@given(values)
def test_the_front_is_what_nothing_beats(points: list[tuple[float, float]]) -> None:
    trials = [complete(number, *point) for number, point in enumerate(points)]
    front = pareto_front(trials, BOTH)
    assert front == {
        number for number, point in enumerate(points) if not any(beats(other, point) for other in points)
    }


@given(values)
def test_the_front_comes_first_and_the_leading_metric_decides(points: list[tuple[float, float]]) -> None:
    trials = [complete(number, *point) for number, point in enumerate(points)]
    order, front = ranked(trials, BOTH), best_of(trials, BOTH)
    assert order[: len(front)] == front
    assert sorted(trial.number for trial in order) == list(range(len(points)))
    assert [trial.values[0] for trial in front] == sorted(trial.values[0] for trial in front)


def test_one_metric_ranks_by_value_and_then_by_number() -> None:
    trials = [complete(0, 2.0), complete(1, 1.0), complete(2, 1.0)]
    assert [trial.number for trial in ranked(trials, {"val_loss": "minimize"})] == [1, 2, 0]
    assert [trial.number for trial in ranked(trials, {"accuracy": "maximize"})] == [0, 1, 2]
    assert [trial.number for trial in best_of(trials, {"val_loss": "minimize"})] == [1]


@pytest.mark.parametrize("trial", [complete(0, math.inf), complete(0, 1.0, violation=0.5)])
def test_what_diverged_or_broke_a_bound_is_never_among_them(trial: FrozenTrial) -> None:
    assert not is_ranked(trial)
    assert best_of([trial], {"val_loss": "minimize"}) == []
    assert best_of([trial, complete(1, 9.0)], {"val_loss": "minimize"})[0].number == 1


def test_a_bound_that_is_just_kept_is_kept() -> None:
    assert is_feasible(complete(0, 1.0, violation=0.0))
    assert is_feasible(complete(0, 1.0, violation=-3.0))
    assert is_feasible(complete(0, 1.0))


@pytest.mark.parametrize(
    ("text", "value", "violation"),
    [("<= 1e6", 2e6, 1e6), ("<=1_000", 400.0, -600.0), (">= 0.9", 0.5, 0.4), (" >=  -2 ", -1.0, -1.0)],
)
def test_a_bound_says_how_far_a_value_violates_it(text: str, value: float, violation: float) -> None:
    section = StudySection.model_validate({"name": "tiny", "constraints": {"parameters": text}})
    (bound,) = section.bounds
    assert isinstance(bound, Bound)
    assert bound.violation(value) == pytest.approx(violation)


@pytest.mark.parametrize(
    ("text", "value", "violation"),
    [
        ("<= 1", math.nan, FARTHEST),
        (">= 1", math.nan, FARTHEST),
        ("<= 1", math.inf, FARTHEST),
        (">= 1", math.inf, -FARTHEST),
    ],
)
def test_a_violation_is_always_finite(text: str, value: float, violation: float) -> None:
    (bound,) = StudySection.model_validate({"name": "tiny", "constraints": {"lr": text}}).bounds
    assert bound.violation(value) == violation
    assert math.isnan(bound.value(violation))


@given(st.floats(-1e6, 1e6), st.sampled_from(["<= 3", ">= 3"]))
def test_a_value_is_known_from_its_violation(value: float, text: str) -> None:
    (bound,) = StudySection.model_validate({"name": "tiny", "constraints": {"lr": text}}).bounds
    assert bound.value(bound.violation(value)) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("relation", "values", "nearer"),
    [
        (">=", [0.2, 0.5, 0.1], True),
        (">=", [0.95, 0.97], True),
        (">=", [0.5, 0.2], False),
        ("<=", [900, 900, 900], False),
        ("<=", [0.5, 0.2], True),
        ("<=", [math.nan, 0.2], True),
        ("<=", [0.2, math.nan], False),
    ],
)
def test_whether_training_comes_nearer_to_a_bound(relation: str, values: list[float], nearer: bool) -> None:
    assert Bound("each", relation, 0.9).comes_nearer(values) == nearer


@pytest.mark.parametrize("within", [True, False])
def test_a_trial_that_trains_on_is_judged_by_the_bounds_where_it_last_paused(within: bool) -> None:
    best = {"epoch": 1, "metrics": {"loss": 0.2}, "checkpoint": None, "within": within}
    trial = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs={BEST_ATTR: best})
    # Measured again where its grant was extended.
    trial.system_attrs["constraints:acc"] = 0.3 if within else -0.3
    assert bool(best_of([trial], {"loss": "minimize"})) == within


@pytest.mark.parametrize("metrics", [{"val_loss": 0.2}, {"val_loss": 0.2, "accuracy": None}])
def test_a_paused_trial_without_all_of_the_values_has_no_rank(metrics: dict[str, float]) -> None:
    """A function may return one of them at its end alone."""
    best = {"epoch": 1, "metrics": metrics, "checkpoint": None}
    trial = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs={BEST_ATTR: best})
    assert best_of([trial], BOTH) == []


def test_an_attempt_that_was_killed_before_it_ended_leaves_no_constraint_behind(studies: Studies) -> None:
    options = ('study.constraints={lr: "<= 1"}', "trainer.max_epochs=1")
    with studies.open(*options) as (view,):
        trial = view.study.ask()
        trial.set_constraint("lr", 7.0)  # an earlier attempt's, which is not true any more
        run(view, trial=trial)
        (stored,) = view.study.get_trials()
        assert stored.constraints["lr"] < 0
        assert is_ranked(stored)
