"""Rungs and promotions, by hand."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from hpo.search.schedulers.asha import Asha
from hpo.search.schedulers.curves import as_granted, curves_of, horizon_of
from hpo.search.schedulers.freeze_thaw.scheduler import FreezeThaw
from hpo.search.schedulers.hyperband import Hyperband
from hpo.search.schedulers.rungs import climbers_of, ladder, promotion
from hpo.search.schedulers.scheduler import New, Resume, Scheduler, Wait, within_epochs
from tests.support.standings import after, seen, standing


@pytest.mark.parametrize(
    ("horizon", "factor", "first", "rungs"),
    [
        (27, 3, 1, [1, 3, 9, 27]),
        (50, 3, 1, [1, 3, 9, 27, 50]),
        (30, 3, 1, [1, 3, 9, 30]),  # 27 is near 30
        (50, 3, 3, [3, 9, 27, 50]),
        (50, 1.5, 3, [3, 5, 8, 12, 18, 27, 50]),
        (10, 3, 8, [8, 10]),
        (10, 3, 9, [10]),
        (2, 3, 3, [2]),
        (1, 3, 1, [1]),
    ],
)
def test_rungs(horizon: int, factor: float, first: int, rungs: list[int]) -> None:
    assert ladder(horizon, factor, first) == rungs


def test_a_trial_that_diverged_is_not_the_best_so_far() -> None:
    trials = [seen(0, [0.5]), seen(1, [0.1, math.nan], "ended"), seen(2, [0.7, 0.6])]
    assert standing(trials).incumbent == 0.5
    assert standing(trials, minimize=False).incumbent == 0.7
    assert standing(trials[1:2]).incumbent is None


def test_a_trial_that_diverged_within_an_epoch_is_not_the_best_so_far() -> None:
    trials = [seen(0, [0.5]), seen(1, [0.1], "ended", diverged=True)]
    assert standing(trials).incumbent == 0.5
    assert standing(trials[1:]).incumbent is None


@pytest.mark.parametrize("scheduler", [Asha(), Hyperband(), FreezeThaw()])
def test_who_diverged_within_an_epoch_stands_where_its_report_would_have_been(scheduler: Scheduler) -> None:
    """No matter how good it was before; without a report, too."""
    for at, sound, seed in itertools.product((1, 2, 3, 9, 10), (2, 8), range(3)):
        level = np.random.default_rng(seed).random(sound)
        before = [-1.0 / epoch for epoch in range(1, at)]
        trials = [seen(k + 1, [10 * level[k] + 1 / epoch for epoch in range(1, 4)]) for k in range(sound)]
        reported = [seen(0, [*before, math.nan], "ended", diverged=True), *trials]
        silent = [seen(0, before, "ended", diverged=True), *trials]
        for horizon in (27, None):
            answers = [scheduler.next(standing(each, horizon=horizon, seed=seed)) for each in (reported, silent)]
            assert repr(answers[0]) == repr(answers[1])


def test_a_trial_that_failed_is_not_the_best_so_far() -> None:
    trials = [seen(0, [0.5]), seen(1, [0.3, 0.1], "ended", failed=True)]
    assert standing(trials).incumbent == 0.5
    assert standing(trials[1:]).incumbent is None


def test_a_trial_that_was_not_measured_against_the_bounds_yet_is_not_the_best_so_far() -> None:
    trials = [seen(0, [0.5], measured=True), seen(1, [0.1], "running")]
    assert standing(trials, bounded=True).incumbent == 0.5
    assert standing(trials).incumbent == 0.1
    assert standing(trials[1:], bounded=True).incumbent is None


def test_the_best_third_of_a_rung_is_promoted_the_highest_rung_first() -> None:
    asha = Asha()
    trials = [seen(number, [value]) for number, value in enumerate([0.5, 0.4])]
    answer = asha.next(standing(trials))
    assert isinstance(answer, New)  # a third of two is none
    assert (answer.params, answer.until, answer.why.kind) == (None, 1, "breadth")
    trials.append(seen(2, [0.6]))
    answer = asha.next(standing(trials))
    assert isinstance(answer, Resume)
    assert (answer.number, answer.until, answer.why.kind) == (1, 3, "promotion")
    trials[1] = seen(1, [0.4], "running", until=3)
    assert isinstance(asha.next(standing(trials)), New)
    # Three at epoch 3: the best of them comes before those that wait below.
    trials += [seen(3, [0.1]), *(seen(4 + k, [0.4, 0.4, 0.3 - 0.1 * k]) for k in range(3))]
    answer = asha.next(standing(trials))
    assert isinstance(answer, Resume)
    assert (answer.number, answer.until) == (6, 9)


@pytest.mark.parametrize("scheduler", [Asha(), Hyperband(), FreezeThaw()], ids=lambda each: type(each).__name__)
def test_where_all_violate_a_bound_that_training_may_mend_as_few_are_promoted_as_without_it(
    scheduler: Asha | Hyperband | FreezeThaw,
) -> None:
    def after_all(bounded: bool) -> int:
        now = standing(n_trials=12)
        while not isinstance(answer := scheduler.next(now), Wait) and (now.new_left or isinstance(answer, Resume)):
            if isinstance(answer, New) and answer.params is None:
                answer = replace(answer, params=seen(len(now.trials)).params)
            grown = after(now, answer, lambda params, epoch: params.get("optimizer.lr", 1.0) + 1 / epoch)
            trials = [replace(each, feasible=not bounded, mends=bounded) for each in grown.trials]
            now = replace(grown, read=lambda trials=trials: trials)
        return sum(each.epochs for each in now.trials)

    # One that has ended outside of the bound has come to its rungs as well as the others.
    assert after_all(bounded=True) < 1.3 * after_all(bounded=False)


def test_who_stays_outside_of_a_bound_is_not_ahead_of_those_that_training_may_bring_within_it() -> None:
    stays, *may_mend = [seen(k, [0.1 * k], feasible=False, mends=k > 0) for k in range(3)]
    answer = Asha().next(standing([stays, *may_mend]))
    assert isinstance(answer, Resume)
    assert answer.number == 1
    promoted = Asha().next(standing([replace(stays, mends=True), *may_mend]))
    assert isinstance(promoted, Resume)
    assert promoted.number == 0


@pytest.mark.parametrize("asha", [Asha(), Asha(first_rung=3)])
def test_who_stays_outside_of_a_bound_is_not_resumed(asha: Asha) -> None:
    outside = [seen(k, [0.1 * k], feasible=False) for k in range(3)]
    assert isinstance(asha.next(standing(outside, n_trials=3)), Wait)
    answer = asha.next(standing([*outside, seen(3, [0.9])], n_trials=4))
    assert isinstance(answer, Resume)
    assert answer.number == 3


def test_a_trial_of_an_earlier_study_takes_no_place_on_a_rung() -> None:
    earlier = seen(0, [0.0], "ended", imported=True, source="other")
    own = [seen(k, [0.1 * k]) for k in range(1, 4)]
    answer = Asha().next(standing([earlier, *own]))
    assert isinstance(answer, Resume)
    assert answer.number == 1
    assert isinstance(Asha().next(standing([replace(earlier, source=None), *own])), New)


def test_the_last_promotion_is_to_the_end() -> None:
    answer = Asha().next(standing([seen(k, [0.1 * k] * 9) for k in range(3)]))
    assert answer == Resume(0, None, answer.why)  # type: ignore[union-attr]


def test_a_larger_value_is_better_where_the_metric_is_to_rise() -> None:
    answer = Asha().next(standing([seen(k, [0.1 * k]) for k in range(3)], minimize=False))
    assert isinstance(answer, Resume)
    assert answer.number == 2


def test_what_diverged_is_last_and_never_resumed() -> None:
    trials = [seen(0, [math.nan]), seen(1, [-math.inf]), seen(2, [0.5])]
    answer = Asha().next(standing(trials))
    assert isinstance(answer, Resume)
    assert answer.number == 2
    assert isinstance(Asha().next(standing([*trials[:2], seen(2, [math.inf])])), New)


def test_epochs_between_reports_have_the_value_before_them() -> None:
    trials = [seen(0, {2: 0.3, 5: 0.1}), seen(1, {1: 0.2, 4: 0.9}), seen(2, {4: 0.0})]
    # At epoch 3: .3, .2, and nothing at all.
    assert promotion(climbers_of(standing(trials)), [3, 9], 3) == (1, 9)


def test_budgets_bound_what_is_granted() -> None:
    trials = [seen(k, [0.1 * k]) for k in range(3)]
    assert Asha().next(standing(trials, n_epochs=3)) == Wait()
    answer = Asha().next(standing(trials, n_epochs=4))
    assert isinstance(answer, Resume)
    assert answer.until == 2  # one of the two epochs to the rung is left
    assert isinstance(Asha().next(standing(trials[:2], n_trials=2)), Wait)


def test_an_unknown_horizon_is_what_a_whole_trial_had_or_leaves_room() -> None:
    def of(*trials: object) -> int:
        study = standing(trials, horizon=None)  # type: ignore[arg-type]
        return horizon_of(study, curves_of(study))

    assert of() == 9
    assert of(seen(0, [1.0] * 4)) == 12
    assert of(seen(0, [1.0] * 4), seen(1, [1.0] * 7, "ended", whole=True)) == 7
    # The way to a guessed end is a goal; a certain end needs none.
    nine = [seen(k, [0.1 * k] * 9) for k in range(3)]
    answer = Asha().next(standing(nine, horizon=None))
    assert isinstance(answer, Resume)
    assert answer.until == 27
    answer = Asha().next(standing([*nine, seen(3, [1.0] * 10, "ended", whole=True)], horizon=None))
    assert isinstance(answer, Resume)
    assert answer.until is None


@pytest.mark.parametrize("scheduler", [Asha(), FreezeThaw(), Hyperband()])
def test_where_no_length_is_known_a_way_to_the_end_leaves_epochs_for_other_workers(scheduler: Scheduler) -> None:
    trials = [*(seen(k, [0.1 * k] * 9) for k in range(3)), seen(3, [1.0] * 10, "ended", whole=True)]
    goals = []
    for _ in range(3):
        study = standing(trials, horizon=None, n_epochs=100)
        answer = within_epochs(study, scheduler.next(study))
        assert isinstance(answer, New | Resume)
        goals.append(answer.until)
        if isinstance(answer, New):
            trials.append(seen(len(trials), [], "running", until=answer.until))
        else:
            trials[answer.number] = replace(trials[answer.number], state="running", until=answer.until)
    assert None not in goals


def test_a_way_to_an_end_that_others_came_to_is_one_epoch_longer_and_no_trial_pauses_at_it() -> None:
    study = standing(horizon=None, n_epochs=100)
    assert as_granted(study, 10, 10, seen=True) == 11
    assert as_granted(study, 10, 9, seen=True) == 9
    assert as_granted(study, 10, 15, seen=True) == 15
    assert as_granted(study, 10, 10, seen=False) == 10
    for certain in (replace(study, n_epochs=None), replace(study, longest=12), replace(study, horizon=10)):
        assert as_granted(certain, 10, 10, seen=True) is None


def test_a_trial_that_stops_early_does_not_end_those_that_have_paused_further_on() -> None:
    early = seen(0, [5.0] * 5, "ended", whole=True)
    paused = [seen(number, [1.0 + number] * 9) for number in (1, 2, 3)]
    study = standing([early, *paused], horizon=None, n_trials=4)
    assert horizon_of(study, curves_of(study)) == climbers_of(study).horizon(study) == 27
    for scheduler in (Asha(), FreezeThaw()):
        answer = scheduler.next(study)
        assert isinstance(answer, Resume)
        assert answer.number == 1


@pytest.mark.parametrize("factor", [2, 3])
def test_the_brackets_of_hyperband_train_about_the_same_epochs(factor: int) -> None:
    """One of ``factor`` is promoted: each rung of a bracket has as many epochs as its first one."""
    hyperband, study = Hyperband(factor), standing(horizon=factor**3)
    drawn = Counter(hyperband.bracket(study, number, 4) for number in range(3000))
    epochs = [drawn[bracket] * factor**bracket * (4 - bracket) for bracket in range(4)]
    assert max(epochs) < 1.2 * min(epochs)


def test_hyperband_promotes_inside_a_bracket() -> None:
    hyperband, study = Hyperband(), standing()
    brackets = [hyperband.bracket(study, number, 4) for number in range(30)]
    inside = [number for number in range(30) if brackets[number] == 1][:3]
    other = next(number for number in range(30) if brackets[number] == 0)
    trials = [seen(number, [0.1 * number] * 3) for number in inside] + [seen(other, [0.0] * 3)]
    answer = hyperband.next(standing(trials))
    assert isinstance(answer, Resume)
    assert (answer.number, answer.until) == (inside[0], 9)  # the other is alone in its bracket
    fresh = hyperband.next(standing())
    assert isinstance(fresh, New)
    assert (fresh.until or 27) == [1, 3, 9, 27][brackets[0]]
    assert hyperband.first(standing()) == fresh.until


@pytest.mark.parametrize("hyperband", [Hyperband(), Hyperband(factor=2), Hyperband(first_rung=10)])
def test_where_no_length_is_known_a_trial_stays_in_its_bracket(hyperband: Hyperband) -> None:
    """As trials come further, the guess at the length grows, and the ladder with it."""
    found = []
    for longest in (10, 30, 100):
        study = standing([seen(0, [0.1] * longest)], horizon=None)
        rungs = ladder(climbers_of(study).horizon(study), hyperband.factor, hyperband.first_rung)
        found.append([hyperband.bracket(study, number, len(rungs)) for number in range(200)])
    assert found == found[:1] * 3
    assert len(set(found[0])) > 1


def test_where_no_length_is_known_a_trial_is_not_short_of_the_first_rung_of_another_bracket() -> None:
    hyperband = Hyperband()
    last = next(number for number in range(60) if hyperband.bracket(standing(), number, 4) == 3)
    answer = hyperband.next(standing([seen(last, [0.9] * 9)], horizon=None))  # its first rung was 9
    assert isinstance(answer, New)


def test_where_no_length_is_known_the_first_rung_is_the_one_given() -> None:
    answer = Hyperband(first_rung=10).next(standing(horizon=None))
    assert isinstance(answer, New)
    assert answer.until in {10, 30}


def test_who_paused_short_of_its_first_rung_comes_to_it_first() -> None:
    """A budget of epochs had ended there, and is larger now; or a person had enqueued it."""
    trials = [seen(0, [0.1] * 3), *(seen(k, [0.9]) for k in (2, 1))]
    asha = Asha(first_rung=3)
    answer = asha.next(standing(trials, n_trials=3))
    assert isinstance(answer, Resume)
    assert (answer.number, answer.until, answer.why.kind) == (1, 3, "breadth")
    answer = asha.next(standing(trials, n_trials=3, n_epochs=6))
    assert isinstance(answer, Resume)
    assert (answer.number, answer.until) == (1, 2)  # one epoch is left
    assert isinstance(asha.next(standing([*trials[:1], seen(1, [math.nan])], n_trials=2)), Wait)
    hyperband = Hyperband()
    number = next(k for k in range(30) if hyperband.bracket(standing(), k, 4) == 1)
    answer = hyperband.next(standing([seen(number, [0.9])]))
    assert isinstance(answer, Resume)
    assert (answer.number, answer.until, answer.why.kind) == (number, 3, "breadth")
