"""What the freeze-thaw scheduler grants: any study at any moment, whole studies, and what it must never do."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from optuna.distributions import CategoricalDistribution, FloatDistribution

from hpo.search.schedulers.asha import Asha
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.freeze_thaw.scheduler import FreezeThaw
from hpo.search.schedulers.freeze_thaw.table import Warp
from hpo.search.schedulers.hyperband import Hyperband
from hpo.search.schedulers.scheduler import New, Resume, Scheduler, Standing, Wait
from hpo.search.schedulers.seen import Seen
from tests.support.standings import after, grown, seen, standing, standings

pytestmark = pytest.mark.full


def bowl(params: Mapping[str, Any], epoch: int) -> float:
    """A loss that falls with the epochs, least at a learning rate of .003 and four layers."""
    off = (math.log10(params["optimizer.lr"]) + 2.5) ** 2 + 0.2 * (params["model.layers"] - 4) ** 2
    return off + 0.5 * params.get("optimizer.momentum", 0.5) + 2.0 / epoch


@cache
def long_study() -> Standing:
    """A study of 600 epochs, which takes seconds; tests look at it and leave it as it is."""
    return grown(FreezeThaw(), standing(n_epochs=600), bowl)[0]


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(standings())
@pytest.mark.parametrize("scheduler", [FreezeThaw(), Asha(), Hyperband()], ids=lambda each: type(each).__name__)
def test_any_study_gets_an_answer_that_its_rules_allow(scheduler: Scheduler, study: Standing) -> None:
    answer = scheduler.next(study)
    if isinstance(answer, Wait):
        return
    assert study.epochs_left != 0
    done = 0
    if isinstance(answer, Resume):
        (trial,) = [each for each in study.trials if each.number == answer.number]
        done = trial.epochs
        assert trial.state == "paused"
        assert not trial.imported
        assert math.isfinite(trial.values[max(trial.values)])
    else:
        assert study.new_left != 0
        if answer.params is not None:
            check_params(study, answer.params)
    assert answer.until is None or answer.until > done
    assert answer.until is None or study.horizon is None or answer.until < study.horizon
    if study.epochs_left is not None and study.horizon is not None:
        assert (answer.until or study.horizon) - done <= study.epochs_left
    json.dumps(answer.state, allow_nan=False)


def check_params(study: Standing, params: Mapping[str, Any]) -> None:
    encoding = Encoding(study.space, study.conditions)
    for name, value in params.items():
        assert study.space[name]._contains(study.space[name].to_internal_repr(value))
        for other, values in study.conditions.get(name, {}).items():
            assert any(params[other] is each or params[other] == each for each in values)
    keys = {encoding.key(trial.params) for trial in study.own}
    left = [point for point in encoding.every_point() if encoding.key(encoding.params(point)) not in keys]
    finite = all(axis.count is not None for axis in encoding.axes)
    assert encoding.key(params) not in keys or (finite and not left)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(standings())
def test_a_decision_depends_on_the_study_alone(study: Standing) -> None:
    one, other = FreezeThaw(), pickle.loads(pickle.dumps(FreezeThaw()))
    assert one.next(study) == other.next(replace(study)) == one.next(study)


def test_a_study_within_a_budget_of_epochs_is_exact_and_the_same_twice() -> None:
    start = standing(n_epochs=200, seed=3)
    end, answers = grown(FreezeThaw(), start, bowl)
    assert sum(trial.epochs for trial in end.trials) == 200
    assert end.state["rows"] > 0
    again, _ = grown(FreezeThaw(), start, bowl)
    assert list(again.trials) == list(end.trials)
    other, _ = grown(FreezeThaw(), replace(start, seed=4), bowl)
    assert [trial.params for trial in other.trials] != [trial.params for trial in end.trials]
    encoding = Encoding(end.space, end.conditions)
    assert len({encoding.key(trial.params) for trial in end.trials}) == len(end.trials)
    kinds = {kind for trial in end.trials for kind in trial.kinds}
    assert kinds >= {"initial", "model"}
    predicted = [answer.why for answer in answers if not isinstance(answer, Wait) and answer.why.kind == "model"]
    for why in predicted:
        assert why.predicted is not None
        assert why.low is not None
        assert why.high is not None
        assert why.low <= why.predicted <= why.high
    assert min(bowl(trial.params, 27) for trial in end.trials) < 0.35


def test_a_study_of_so_many_trials_ends_and_leaves_most_of_them_paused() -> None:
    end, answers = grown(FreezeThaw(), standing(n_trials=20), bowl)
    assert len(end.trials) == 20
    assert isinstance(answers[-1], Wait)
    assert 1 <= sum(trial.whole for trial in end.trials) < 20
    # A larger budget resumes from there.
    more, _ = grown(FreezeThaw(), replace(end, n_trials=25), bowl)
    assert len(more.trials) == 25


@pytest.mark.parametrize(("n_trials", "used"), [(1, 27), (2, 54), (4, 100)])
def test_few_trials_use_the_epochs_that_are_given(n_trials: int, used: int) -> None:
    study, _ = grown(FreezeThaw(), standing(n_trials=n_trials, n_epochs=100), bowl)
    assert sum(trial.epochs for trial in study.trials) == used


@pytest.mark.parametrize("n_trials", [1, 3])
def test_a_study_of_few_trials_has_a_complete_one(n_trials: int) -> None:
    study, _ = grown(FreezeThaw(), standing(n_trials=n_trials), bowl)
    best = min(study.trials, key=lambda trial: min(trial.values.values()))
    assert [trial.number for trial in study.trials if trial.whole] == [best.number]
    assert best.kinds[-1] == "rest"


def test_a_metric_that_is_to_rise_makes_the_mirrored_study() -> None:
    down, _ = grown(FreezeThaw(), standing(n_epochs=120), bowl)
    up, answers = grown(FreezeThaw(), standing(n_epochs=120, minimize=False), lambda params, e: -bowl(params, e))
    assert [trial.params for trial in up.trials] == [trial.params for trial in down.trials]
    whys = [answer.why for answer in answers if not isinstance(answer, Wait) and answer.why.kind == "model"]
    best = max(max(trial.values.values()) for trial in up.trials)
    assert whys[-1].incumbent is not None
    assert whys[-1].incumbent <= best


@pytest.mark.parametrize("minimize", [True, False])
def test_where_no_loss_is_negative_none_is_said_to_come(minimize: bool) -> None:
    def towards_0(params: Mapping[str, Any], epoch: int) -> float:
        loss = math.exp(-epoch / 4) * (0.1 + (math.log10(params["optimizer.lr"]) + 2.5) ** 2)
        return loss if minimize else -loss

    def ends(level: float) -> list[float]:
        start = standing(n_epochs=120, seed=1, minimize=minimize)
        _, answers = grown(FreezeThaw(), start, lambda params, epoch: towards_0(params, epoch) + level)
        found = [each.why for each in answers if not isinstance(each, Wait) and each.why.kind == "model"]
        return [end if minimize else -end for why in found for end in (why.low, why.high) if end is not None]

    assert min(ends(0.0)) == 0.0
    assert min(ends(-1e-3 if minimize else 1e-3)) < -1e-3, "a loss below 0 has no such end"


@pytest.mark.parametrize("seed", [1, 3])
def test_losses_of_many_orders_of_magnitude_are_told_apart(seed: int) -> None:
    def wide(params: Mapping[str, Any], epoch: int) -> float:
        off = abs(math.log10(params["optimizer.lr"]) + 2.5) / 2.5 + 0.1 * abs(params["model.layers"] - 3)
        return float(10 ** (6 - 15 * max(0.0, 1 - off) * math.sqrt(epoch / 27)))

    end, _ = grown(FreezeThaw(), standing(n_epochs=200, seed=seed), wide)
    assert min(min(trial.values.values()) for trial in end.trials) < 1e-8  # of 1e-9 to 1e6
    assert sum(trial.whole for trial in end.trials) >= 3


def test_a_warped_loss_keeps_its_order_of_magnitude() -> None:
    losses = 10.0 ** np.arange(-9, 7)
    warp = Warp([seen(number, [loss]).falling for number, loss in enumerate(losses)])
    z = warp(losses)
    assert np.diff(z).min() > 0.03
    assert [warp.loss(each) for each in z] == pytest.approx(losses)


@pytest.mark.parametrize("silent", [False, True])
def test_what_diverges_is_left_alone_and_teaches_the_model(silent: bool) -> None:
    """Also within its second epoch, after a good first one and with no report of it."""

    def steep(params: Mapping[str, Any], epoch: int) -> float:
        return math.nan if params["optimizer.lr"] > 1e-2 and (epoch > 1 or not silent) else bowl(params, epoch)

    end = standing(n_epochs=200)
    while not isinstance(answer := FreezeThaw().next(end), Wait):
        grown_by_one = after(end, answer, steep)
        trials = [hushed(each) for each in grown_by_one.trials] if silent else grown_by_one.trials
        end = replace(grown_by_one, read=lambda trials=trials: trials)
    drawn = [trial.params["optimizer.lr"] > 1e-2 for trial in end.trials]
    late = drawn[len(drawn) // 2 :]
    assert np.mean(late) < 0.2  # a quarter of the range
    if not silent:
        assert all(len(trial.kinds) == 1 for trial, lost in zip(end.trials, drawn, strict=True) if lost)


def hushed(trial: Seen) -> Seen:
    """One that diverged within the epoch of its first report that is not finite, which it did not come to."""
    first = min((epoch for epoch, value in trial.values.items() if not math.isfinite(value)), default=None)
    if first is None:
        return trial
    values = {epoch: value for epoch, value in trial.values.items() if epoch < first}
    return replace(trial, values=values, state="ended", whole=False, diverged=True)


def test_a_metric_that_never_changes_is_no_trouble() -> None:
    end, _ = grown(FreezeThaw(), standing(n_epochs=100), lambda params, epoch: 1.0)
    assert sum(trial.epochs for trial in end.trials) == 100


@pytest.mark.parametrize("n_trials", [10, 27])
def test_a_study_of_trials_ends_after_a_few_whole_ones_where_its_metric_never_changes(n_trials: int) -> None:
    end, _ = grown(FreezeThaw(), standing(n_trials=n_trials), lambda params, epoch: 1.0)
    assert len(end.trials) == n_trials
    assert sum(trial.whole for trial in end.trials) == 4


def test_a_metric_that_begins_to_change_late_is_waited_for() -> None:
    """The first trial that trains to its end shows nothing, as one with bad parameters may."""

    def stuck(params: Mapping[str, Any], epoch: int) -> float:
        return 1.0 if epoch < 20 or params == first else bowl(params, epoch)

    first = grown(FreezeThaw(), standing(n_trials=10), lambda params, epoch: 1.0)[0].trials[0].params
    end, _ = grown(FreezeThaw(), standing(n_trials=10), stuck)
    assert end.incumbent is not None
    assert end.incumbent < 1.0


def test_a_finite_space_is_tried_whole_and_no_point_of_it_twice() -> None:
    space = {"a": CategoricalDistribution(["x", "y", "z"]), "b": CategoricalDistribution([1, 2])}
    study = standing(space=space, conditions={"b": {"a": ["x"]}}, n_trials=4, horizon=3)
    end, _ = grown(FreezeThaw(), study, lambda params, epoch: "xyz".index(params["a"]) + 1 / epoch)
    assert sorted(str(trial.params) for trial in end.trials) == sorted(
        map(str, [{"a": "x", "b": 1}, {"a": "x", "b": 2}, {"a": "y"}, {"a": "z"}])
    )
    # A budget of more trials than points: what is left is resumed, then points are tried again.
    more, _ = grown(FreezeThaw(), replace(end, n_trials=6), lambda params, epoch: 1 / epoch)
    assert len(more.trials) == 6
    assert all(trial.epochs == 3 for trial in more.trials[:4])


def test_a_space_of_one_point_and_one_epoch() -> None:
    study = standing(space={"a": FloatDistribution(1.0, 1.0)}, conditions={}, horizon=1, n_trials=3)
    end, _ = grown(FreezeThaw(), study, lambda params, epoch: 1.0)
    assert [trial.params for trial in end.trials] == [{"a": 1.0}] * 3


def test_running_trials_are_no_candidates_and_others_are_granted_beside_them() -> None:
    study = standing(n_epochs=10_000, planned=8)
    granted: list[int] = []
    for _ in range(40):  # eight workers: a grant is trained when seven others have been made
        answer = FreezeThaw().next(study)
        assert isinstance(answer, New | Resume)
        before, study = study, after(study, answer, bowl)
        number = answer.number if isinstance(answer, Resume) else len(study.trials) - 1
        trials = list(study.trials)
        finished, trials[number] = trials[number], replace(trials[number], state="running")
        old = before.trials[number].values if isinstance(answer, Resume) else {}
        trials[number] = replace(trials[number], values=old)
        assert number not in granted
        granted.append(number)
        done = {number: finished}
        if len(granted) > 8:
            ready = granted.pop(0)
            goal = trials[ready].until or 27
            values = {epoch: bowl(trials[ready].params, epoch) for epoch in range(1, goal + 1)}
            trials[ready] = replace(trials[ready], values=values, state="ended" if goal == 27 else "paused")
        study = replace(study, read=lambda found=tuple(trials): found)
        assert done[number].number == number


def test_trials_of_another_study_feed_the_model() -> None:
    lrs = np.geomspace(1e-5, 1e-1, 40)
    layers = 1 + np.arange(40) % 5
    pasts = [
        {"optimizer.lr": float(lr), "model.layers": int(n), "optimizer._target_": "AdamW"}
        for lr, n in zip(lrs, layers, strict=True)
    ]
    past = [
        seen(k, [bowl(params, epoch) for epoch in range(1, 28)], "ended", params=params, whole=True, imported=True)
        for k, params in enumerate(pasts)
    ]
    cold, _ = grown(FreezeThaw(), standing(n_epochs=40, seed=1), bowl)
    warm, _ = grown(FreezeThaw(), standing(past, n_epochs=40, seed=1), bowl)
    ends = [min(bowl(trial.params, 27) for trial in study.own) for study in (cold, warm)]
    assert ends[1] < ends[0]
    assert all(trial.number >= 40 for trial in warm.own)


def test_an_unknown_horizon_leaves_room_until_a_trial_is_whole() -> None:
    end, answers = grown(FreezeThaw(), standing(n_epochs=300, horizon=None), bowl, most=60)
    goals = [answer.until for answer in answers if not isinstance(answer, Wait)]
    assert None not in goals[:10]
    assert max(trial.epochs for trial in end.trials) > 9


def test_a_space_that_has_changed_does_not_use_the_stored_scales() -> None:
    end, _ = grown(FreezeThaw(), standing(n_epochs=100), bowl)
    other = replace(end, space={"optimizer.lr": end.space["optimizer.lr"]}, conditions={}, n_epochs=200)
    assert not isinstance(FreezeThaw().next(other), Wait)


def hidden(params: Mapping[str, Any], epoch: int) -> float:
    """A loss that the parameters say nothing about."""
    return float(np.random.default_rng(int(1e9 * params["optimizer.lr"])).random()) + 1 / epoch


def late(params: Mapping[str, Any], epoch: int) -> float:
    """A loss whose order at epoch 1 is the other way round from epoch 3 on."""
    return -0.1 * bowl(params, epoch) if epoch < 3 else bowl(params, epoch)


def shares(study: Standing) -> dict[str, float]:
    kinds = [kind for trial in study.trials for kind in trial.kinds]
    return {kind: kinds.count(kind) / len(kinds) for kind in set(kinds)}


@pytest.mark.full
def test_new_trials_pause_early_where_early_ranks_agree_and_not_where_they_mislead() -> None:
    for loss, firsts in ((bowl, {1, 3}), (late, {3})):
        end, answers = grown(FreezeThaw(), standing(n_epochs=400), loss)
        starts = [answer.until for answer in answers if isinstance(answer, New)]
        assert set(starts[:-1]) == firsts  # the last one may have what the budget leaves
        assert sum(trial.epochs for trial in end.trials) == 400


@pytest.mark.full
def test_halving_decides_more_where_the_models_trials_do_not_win() -> None:
    known = long_study()
    unknown, _ = grown(FreezeThaw(), standing(n_epochs=600), hidden)
    halving = [shares(study)["breadth"] + shares(study)["promotion"] for study in (known, unknown)]
    assert halving[1] > halving[0] + 0.1


def ranked(k: int, epochs: int, *kinds: str, crossing: bool = False) -> Seen:
    """An even trial, the k-th best from epoch 2 on, or the other way round from 4 on; epoch 1 says nothing."""
    late = [float(-k if crossing else k)] * (epochs - 3)
    whole = epochs == 27
    values = [float(11 * k % 32), float(k), float(k), *late]
    return seen(k, values, "ended" if whole else "paused", kinds=("breadth", *kinds), whole=whole)


@pytest.mark.full
@pytest.mark.parametrize("crossing", [False, True])
def test_halving_promotes_fewer_where_those_that_it_promoted_kept_their_ranks(crossing: bool) -> None:
    """The best ten of 45 have come further: enough where they kept their ranks, and then new ones are drawn."""
    trials = [ranked(k, 27 if k < 4 else 9, "promotion", crossing=crossing) for k in range(10)]
    trials += [ranked(k, 3) for k in range(10, 42)]
    trials += [ranked(42, 27, "whole"), ranked(43, 9, "whole"), ranked(44, 9, "whole")]
    # The model's trials lose, so halving decides often.
    trials += [seen(k, [100.0 + k] * 3, kinds=("model",)) for k in range(45, 53)]
    # Without conditions no new trial is at an even point but for halving.
    answers = [FreezeThaw().next(standing(trials, conditions={}, seed=seed)) for seed in range(30)]
    kinds = {answer.why.kind for answer in answers if not isinstance(answer, Wait)}
    assert kinds == {"promotion" if crossing else "breadth", "model"}


@pytest.mark.parametrize("begun", [9, 18, 26])
def test_the_first_trials_all_begin_before_one_is_promoted(begun: int) -> None:
    """Epoch 1 ranks as epoch 3 does, so 27 trials are to begin there; three of nine could be promoted."""
    first = [seen(k, [k, k, k], kinds=("initial",)) for k in range(9)]
    answer = FreezeThaw().next(standing([*first, *(seen(k, [k]) for k in range(9, begun))]))
    assert isinstance(answer, New)
    assert (answer.until, answer.why.kind) == (1, "breadth")


def test_a_first_rung_that_proved_good_is_looked_at_again() -> None:
    """The first nine trials agree from epoch 1 to 3; of those that paused at 1 some go on to 3 unjudged."""
    first = [seen(k, [k, k, k], kinds=("initial",)) for k in range(9)]
    answer = FreezeThaw().next(standing([*first, *(seen(k, [k]) for k in range(9, 29))]))
    assert isinstance(answer, Resume)
    assert (answer.why.kind, answer.until) == ("whole", 3)


@pytest.mark.full
def test_some_even_trials_run_on_whatever_their_values() -> None:
    end = long_study()
    ran = [trial for trial in end.trials if "whole" in trial.kinds]
    assert ran
    assert all(trial.kinds[0] in ("initial", "breadth") for trial in ran)
    worst_first = sorted(end.trials[:9], key=lambda trial: -trial.values[3])
    assert any("whole" in trial.kinds for trial in worst_first[:6])
    further = sum(max(0, trial.epochs - 3) for trial in ran)
    assert further < 0.3 * 600


@pytest.mark.parametrize("count", [12, 80])
def test_a_way_that_is_run_unjudged_is_saved_up_for(count: int) -> None:
    """From epoch 3 to 9 takes 6 epochs: much of the first trials' 36, and little of 240."""
    trials = [seen(k, [float(11 * k % 32), k, k], kinds=("initial",)) for k in range(count)]
    kinds = {FreezeThaw().next(standing(trials, seed=seed)).why.kind for seed in range(5)}
    assert ("whole" in kinds) == (count == 80)


def test_a_long_trial_has_its_first_rung_later() -> None:
    assert FreezeThaw().first(standing(horizon=1000)) in (9, 27)
    answer = FreezeThaw().next(standing(horizon=1000))
    assert isinstance(answer, New)
    assert (answer.until, answer.why.kind) == (27, "initial")


def switching(epochs: float) -> Standing:
    """Eight first trials; a switch of trials takes so many epochs."""
    return standing([seen(k, [k, k, k], kinds=("initial",), switch=epochs) for k in range(8)])


def test_the_opening_promotes_where_that_takes_little_beside_a_new_trial() -> None:
    """To go on from epoch 3 to 9 takes 6 + switch, a new trial 3 + switch."""
    cheap, dear = FreezeThaw().next(switching(4.0)), FreezeThaw().next(switching(0.0))
    assert isinstance(cheap, Resume)
    assert (cheap.number, cheap.until, cheap.why.kind) == (0, 9, "promotion")
    assert isinstance(dear, New)


def test_where_a_switch_takes_long_new_trials_train_longer_before_they_pause() -> None:
    answer = FreezeThaw(switch=10.0).next(standing([]))
    assert (answer.until, answer.why.kind) == (9, "initial")
    assert [FreezeThaw().first(switching(epochs)) for epochs in (0.0, 10.0)] == [1, 9]


def test_the_model_resumes_for_half_as_long_as_a_switch_takes_at_least() -> None:
    def goals(switch: float) -> set[int | None]:
        trials = [seen(k, [k, k - 0.2, k - 0.4], kinds=("model",)) for k in range(10)]
        asked = (standing(trials, seed=seed, n_trials=10, here=None) for seed in range(20))
        answers = [FreezeThaw(switch=switch).next(each) for each in asked]
        return {answer.until for answer in answers if isinstance(answer, Resume)}

    assert goals(0.0) == {5}
    assert goals(16.0) == {12}


@pytest.mark.full
def test_halving_and_the_model_share_time_and_not_decisions() -> None:
    """A quarter of the time is halving's where the model has not proposed anything yet; its grants are longer."""
    trials = [ranked(k, 27 if k < 4 else 9, "promotion", crossing=True) for k in range(10)]
    trials += [ranked(k, 3) for k in range(10, 42)]
    trials += [ranked(42, 27, "whole"), ranked(43, 9, "whole"), ranked(44, 9, "whole")]
    epochs, grants = {"promotion": 0, "model": 0}, {"promotion": 0, "model": 0}
    for seed in range(80):
        answer = FreezeThaw().next(standing(trials, seed=seed))
        assert isinstance(answer, New | Resume)
        done = trials[answer.number].epochs if isinstance(answer, Resume) else 0
        epochs[answer.why.kind] += (answer.until or 27) - done
        grants[answer.why.kind] += 1
    assert epochs["promotion"] / sum(epochs.values()) == pytest.approx(0.25, abs=0.15)
    assert grants["promotion"] / sum(grants.values()) < 0.15


def test_a_small_budget_has_a_short_opening() -> None:
    end, _ = grown(FreezeThaw(), standing(n_trials=12), bowl)
    assert sum(trial.kinds[0] == "initial" for trial in end.trials) == 4


@pytest.mark.full
def test_the_model_proposes_no_point_that_is_the_same_to_it() -> None:
    now, found = standing(n_epochs=400), 0
    encoding = Encoding(now.space, now.conditions)
    while not isinstance(answer := FreezeThaw().next(now), Wait):
        if isinstance(answer, New) and answer.why.kind == "model" and answer.params is not None:
            state = now.state if answer.state is None else answer.state
            lengths = np.exp(state["scales"][8:])[encoding.groups]
            known = encoding.features(encoding.points([trial.params for trial in now.trials])) / lengths
            new = encoding.features(encoding.points([answer.params])) / lengths
            assert np.linalg.norm(known - new, axis=1).min() > 0.1 - 1e-6
            found += 1
        now = after(now, answer, bowl)
    assert found > 10


@pytest.mark.full
def test_the_model_stays_on_a_trial_the_more_the_longer_a_switch_takes() -> None:
    """Without new trials, and with each of the paused ones at hand in turn."""
    end, _ = grown(FreezeThaw(), standing(n_epochs=120, seed=3), bowl)
    end = replace(end, n_epochs=10_000, n_trials=len(end.trials))

    def stays(switch: float) -> int:
        found = 0
        for trial in end.paused:
            for seed in range(4):
                answer = FreezeThaw(switch=switch).next(replace(end, here=trial.number, seed=seed))
                found += isinstance(answer, Resume) and answer.number == trial.number
        return found

    assert stays(0.0) < stays(16.0)


def test_a_switch_of_less_than_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="switch=-1 must be 0 or more epochs"):
        FreezeThaw(switch=-1)


@pytest.mark.parametrize(
    "lost",
    [
        seen(0, {1: -50.0, 2: math.nan}, "ended"),
        seen(0, {1: -50.0}, "ended", diverged=True),
        seen(0, {1: -50.0, 2: -50.0}, "running", until=27, feasible=False, mends=True),
    ],
    ids=["diverged", "diverged within an epoch", "violates a bound"],
)
def test_a_trial_that_can_not_be_the_best_is_nothing_to_beat(lost: Seen) -> None:
    """It stood far ahead, and is not the incumbent of what the model grants."""
    _, answers = grown(FreezeThaw(), standing([lost], n_epochs=150, seed=2), bowl)
    model = [each.why for each in answers if not isinstance(each, Wait) and each.why.kind == "model"]
    assert model
    assert all(why.incumbent is not None and why.incumbent > 0 for why in model), "the bowl's losses are above 0"


def test_a_trial_that_was_not_measured_against_the_bounds_yet_is_nothing_to_beat() -> None:
    now, model = standing([seen(0, {1: -50.0}, "running", until=27)], n_epochs=150, seed=2, bounded=True), []
    while not isinstance(answer := FreezeThaw().next(now), Wait):
        grown_by_one = after(now, answer, bowl)
        trials = [replace(each, measured=each.number > 0) for each in grown_by_one.trials]
        now = replace(grown_by_one, read=lambda trials=trials: trials)
        if answer.why.kind == "model":
            model.append(answer.why.incumbent)
    assert model
    assert all(incumbent > 0 for incumbent in model), "the bowl's losses are above 0"


def test_a_trial_with_its_final_value_alone_has_not_failed() -> None:
    params = {"optimizer.lr": 0.1}
    for more in ({"whole": True}, {"imported": True}):
        assert not Seen(0, params, {}, "ended", **more).falling.steps
    assert Seen(0, params, {}, "ended").falling.losses == [math.inf]


@pytest.mark.parametrize("reports", [0, 1])
def test_what_fails_teaches_the_model(reports: int) -> None:
    """It proposed the same corner for ever: the larger the better, until memory ends, is the usual case."""
    trials: list[Seen] = []
    space = {f"p{k}": FloatDistribution(0.0, 1.0) for k in range(2)}
    while len(trials) < 40:
        now = standing(trials=tuple(trials), space=space, conditions={}, n_epochs=300)
        answer = FreezeThaw().next(now)
        number = answer.number if isinstance(answer, Resume) else len(trials)
        old = trials[number] if isinstance(answer, Resume) else Seen(number, answer.params or {}, {}, "ended")
        until, params, kinds = answer.until or 27, old.params, (*old.kinds, answer.why.kind)
        values = {epoch: 2 - params["p0"] - params["p1"] + 1 / epoch for epoch in range(1, until + 1)}
        state = "ended" if until == 27 else "paused"
        whole = replace(old, values=values, state=state, until=answer.until, whole=until == 27, kinds=kinds)
        begun = {epoch: value for epoch, value in values.items() if epoch <= reports}
        failed = replace(old, values=begun, failed=True, kinds=kinds)
        trials[number:] = [failed if params["p0"] > 0.5 else whole, *trials[number + 1 :]]
    assert sum(trial.failed for trial in trials) < 20, "half of the space is bad"


@pytest.mark.parametrize("conditional", [True, False])
def test_where_parameters_depend_on_others_one_in_four_new_trials_is_even(conditional: bool) -> None:
    study = standing(n_epochs=250, **({} if conditional else {"conditions": {}}))
    kinds = [trial.kinds[0] for trial in grown(FreezeThaw(), study, bowl)[0].own]
    begun = kinds[kinds.index("model") :]
    assert len(begun) > 12
    share = sum(kind != "model" for kind in begun) / len(begun)
    assert share > 0.2 if conditional else share < 0.15
