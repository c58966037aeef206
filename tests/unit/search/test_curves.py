"""The arrays that a pruner looks at: what ended trials say about a step."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.search.predicted_loss.curves import USUAL_AGREEMENT, EndedCurves, Population, fall, settling

VALUES = st.floats(-5, 5).map(lambda value: round(value, 3))


def of(*curves: tuple[list[float], float | None], sign: int = 1) -> EndedCurves:
    ended = EndedCurves(sign)
    for values, final in curves:
        ended.add(dict(enumerate(values, 1)), final)
    return ended


def test_a_population_is_what_was_reported_at_that_step() -> None:
    ended = of(([9, 5, 3, 2], 2.0), ([8, 7], None), ([8, 3, 2, 1], 1.0), ([7], None))
    at = ended.at(2, 1)
    assert at.ended == 4
    assert sorted(at.values) == [3, 5, 7]
    assert sorted(at.falls) == [1, 4, 5]
    assert ended.at(1, 1).falls.tolist() == [0, 0, 0, 0]
    assert (at.best_fall, at.best_drop, at.to_beat) == (5, 2, 1)
    assert sorted(at.drops) == [2, 3]
    assert (at.agreement, at.compared) == (1.0, 1)
    assert ended.at(2, 2).to_beat == 2
    assert ended.at(2, 9).to_beat == 2
    assert (ended.complete, ended.longest, len(ended)) == (2, 4, 4)


def test_falls_are_since_half_the_step() -> None:
    assert of(([16, 8, 4, 2], 2.0)).at(4, 1).falls.tolist() == [6]
    assert of(([16, 8, 4, 2], 2.0)).at(3, 1).falls.tolist() == [12]
    late = of(([16, 8, 4, 2], 2.0))
    late.add({3: 5.0}, None)
    assert late.at(3, 1).falls.tolist() == [12]
    assert of(([16, 8, 4, 2], 2.0)).at(1, 1).falls.tolist() == [0]


def test_what_was_not_reported_stays_as_it_was() -> None:
    ended = EndedCurves(1)
    ended.add({2: 8.0, 6: 4.0, 10: 2.0}, 2.0)
    ended.add({3: 7.0}, None)
    assert ended.at(1, 1).values.tolist() == []
    assert ended.at(2, 1).values.tolist() == [8]
    assert ended.at(5, 1).values.tolist() == [8]
    assert sorted(ended.at(3, 1).values) == [7, 8]
    assert ended.at(9, 1).values.tolist() == [4]
    assert ended.longest == 10


def test_a_complete_trial_holds_its_final_value_to_the_end() -> None:
    ended = of(([9, 3], 2.5), ([9, 8, 7, 6], 6.0))
    assert sorted(ended.at(4, 1).values) == [2.5, 6]


def test_diverged_values_rank_last_and_say_nothing_of_falls() -> None:
    ended = of(([9, math.nan], math.inf), ([9, math.inf, 3], 3.0), ([8, 4, 2], 2.0))
    at = ended.at(2, 1)
    assert sorted(at.values) == [4, math.inf, math.inf]
    assert sorted(at.falls) == [-math.inf, -math.inf, 4]
    assert at.drops.tolist() == [2]
    assert ended.complete == 2


def test_agreement_is_usual_before_two_can_be_compared() -> None:
    at = of(([9, 5], 5.0), ([9, 8], None)).at(2, 1)
    assert (at.agreement, at.compared) == (USUAL_AGREEMENT, 0)


def test_agreement_tells_steps_that_predict_the_end_from_those_that_do_not() -> None:
    # Early, the order is the reverse of the final one; late, it is the final one.
    curves = [([level] * 4 + [9 - level] * 60, 9.0 - level) for level in (1.0, 2.0, 3.0, 4.0)]
    ended = of(*curves)
    assert ended.at(1, 1).agreement < 0.1
    assert ended.at(60, 1).agreement > 0.9


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_order_in_which_trials_end_says_nothing(data: st.DataObject) -> None:
    curves = data.draw(
        st.lists(
            st.dictionaries(st.integers(1, 12), VALUES, min_size=1).flatmap(
                lambda reports: st.tuples(st.just(reports), st.none() | VALUES)
            ),
            min_size=2,
            max_size=7,
        ).filter(lambda drawn: any(final is not None for _, final in drawn))
    )
    step = data.draw(st.integers(1, 13))
    one, other = EndedCurves(1), EndedCurves(1)
    for reports, final in curves:
        one.add(reports, final)
    for reports, final in data.draw(st.permutations(curves)):
        other.add(reports, final)
    left, right = one.at(step, 1), other.at(step, 1)
    for name in ("values", "falls", "drops"):
        assert sorted(getattr(left, name)) == pytest.approx(sorted(getattr(right, name)))
    assert left.agreement == pytest.approx(right.agreement)
    assert (left.ended, left.to_beat, left.compared) == (right.ended, right.to_beat, right.compared)


@given(st.lists(st.tuples(st.lists(VALUES, min_size=3, max_size=3), st.booleans()), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_maximising_is_minimising_the_negative(curves: list[tuple[list[float], bool]]) -> None:
    up, down = EndedCurves(-1), EndedCurves(1)
    for values, whole in [*curves, ([1.0, 1.0, 1.0], True)]:
        up.add(dict(enumerate(values, 1)), values[-1] if whole else None)
        down.add({step: -value for step, value in enumerate(values, 1)}, -values[-1] if whole else None)
    assert_equal(up.at(2, 1), down.at(2, 1))
    assert_equal(up.copy().at(2, 1), up.at(2, 1))


def assert_equal(left: Population, right: Population) -> None:
    for name in Population.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)


def trial(number: int, state: TrialState = TrialState.COMPLETE) -> FrozenTrial:
    found = create_trial(
        state=state, value=1.0 if state == TrialState.COMPLETE else None, intermediate_values={1: 2.0, 2: 1.0}
    )
    found.number = number
    return found


def test_trials_are_taken_in_once_and_gone_ones_are_noticed() -> None:
    ended = EndedCurves(1)
    assert ended.update([trial(0)])
    assert ended.update([trial(0), trial(2, TrialState.PRUNED)])
    assert (len(ended), ended.complete) == (2, 1)
    assert ended.update([trial(0), trial(1), trial(2, TrialState.PRUNED)])
    assert (len(ended), ended.complete) == (3, 2)
    assert not ended.update([trial(0)])


def test_a_trial_without_reports_has_no_curve() -> None:
    imported = create_trial(value=1.0)
    ended = EndedCurves(1)
    assert ended.update([imported])
    assert (len(ended), ended.complete) == (0, 0)


def test_many_curves_of_many_lengths() -> None:
    ended = EndedCurves(1)
    for number in range(300):
        ended.add(dict.fromkeys(range(1, 2 + number % 40), float(number)), float(number) if number % 3 else None)
    assert len(ended.at(1, 1).values) == 300
    assert ended.at(1, 1).to_beat == 1
    assert len(ended.at(30, 1).drops) == 24


def test_a_fall_from_infinity_is_the_whole_value() -> None:
    assert fall([math.inf, 3.0, 3.0], [2.0, math.inf, 1.0]).tolist() == [2, -math.inf, 2]


def test_settling_tells_a_decayed_learning_rate_from_a_constant_one() -> None:
    rng = np.random.default_rng(0)
    trend, decay = np.exp(-np.arange(60) / 15), np.linspace(1, 0, 60) ** 2
    noises = [0.05 * rng.normal(size=60) for _ in range(30)]
    assert abs(np.median([settling(trend + noise) for noise in noises])) < 0.5
    assert np.median([settling(trend + noise * decay) for noise in noises]) > 2
    noisy = trend + noises[0]
    assert settling(noisy * 1e-9) == pytest.approx(settling(noisy), abs=1e-3)


@pytest.mark.parametrize("curve", [[1.0] * 40, [1.0, 0.5], [math.inf] * 40, [0.0] * 12])
def test_settling_of_curves_that_tell_nothing_is_none(curve: list[float]) -> None:
    assert settling(np.array(curve)) == 0
