"""Population-based training: who is replaced, by whose fork, with which parameters, and that no worker waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from hpo.errors import InputError
from hpo.search.axes import axis_of
from hpo.search.schedulers.by_name import make_scheduler
from hpo.search.schedulers.pbt.perturbation import moved, perturbed
from hpo.search.schedulers.pbt.scheduler import Pbt
from hpo.search.schedulers.scheduler import Fork, New, Resume, Standing, Wait, Why
from hpo.search.schedulers.seen import Seen
from tests.support.commands import STUDY
from tests.support.standings import seen, spaces, standing
from tests.support.studies import Studies

RATE = "optimizer.lr"


def pbt(**arguments: Any) -> Pbt:
    return Pbt(**{"population": 4, "every": 3, "perturb": (RATE,), **arguments})


def at_three(*values: float, state: str = "paused") -> list[Seen]:
    """Members that have trained three epochs, with these values at the third."""
    return [seen(number, [1.0, 1.0, value], state, until=3) for number, value in enumerate(values)]


# ---- who resumes, and who is replaced


def test_the_first_population_is_drawn_by_the_sampler() -> None:
    for count in range(4):
        now = standing(at_three(*[1.0] * count))
        assert pbt().next(now) == New(until=3, why=Why("initial"))
    assert pbt().first(standing()) == 3


def test_the_member_with_the_fewest_epochs_is_looked_at_first() -> None:
    trials = at_three(0.5, 0.4, 0.3, 0.2)
    trials[0] = seen(0, [1.0] * 6, until=6)
    assert pbt().next(standing(trials)) == Resume(1, 6, Why("survivor"))


@pytest.mark.parametrize("minimize", [True, False])
def test_one_of_the_worst_is_replaced_by_a_fork_of_one_of_the_best(minimize: bool) -> None:
    sign = 1 if minimize else -1
    trials = at_three(*(sign * value for value in (0.9, 0.2, 0.4, 0.3)))
    fork = pbt().next(standing(trials, minimize=minimize))
    assert isinstance(fork, Fork)
    assert (fork.parent, fork.epoch, fork.replaces, fork.until, fork.why.kind) == (1, 3, 0, 6, "fork")
    rate = trials[1].params[RATE]
    assert fork.params.keys() == trials[1].params.keys()
    assert fork.params[RATE] != rate


def test_only_members_at_the_same_epoch_are_compared() -> None:
    """A member far ahead is better by its epochs; what counts is where it was."""
    trials = [*at_three(0.5, 0.6, 0.7), seen(3, [1.0, 1.0, 0.8, 0.1, 0.05, 0.01], until=6)]
    assert pbt().next(standing(trials)) == Resume(0, 6, Why("survivor"))
    trials[2] = replace(trials[2], values={**trials[2].values, 3: 0.9})
    trials[0], trials[1] = (replace(each, state="running", until=6) for each in trials[:2])
    fork = pbt().next(standing(trials))
    assert isinstance(fork, Fork)
    assert (fork.replaces, fork.parent) == (2, 0)


def test_who_comes_first_is_compared_with_no_other_and_trains_on() -> None:
    trials = [*at_three(9.0), *(seen(number, [1.0], "running", until=3) for number in range(1, 4))]
    assert pbt().next(standing(trials)) == Resume(0, 6, Why("survivor"))


@pytest.mark.parametrize(("population", "replaced"), [(4, False), (5, True)])
def test_with_two_workers_the_first_look_takes_three_more_members_than_workers(
    population: int, replaced: bool
) -> None:
    """As docs/scheduling.md has it: the other worker still trains, and a quarter of three holds no member."""
    trials = [*at_three(9.0, *[1.0] * (population - 2)), seen(population - 1, [1.0], "running", until=3)]
    assert isinstance(pbt(population=population).next(standing(trials)), Fork if replaced else Resume)


def test_a_leader_is_forked_only_when_its_checkpoint_is_there() -> None:
    """Its last value is reported before the checkpoint of that epoch is written, and it has paused."""
    trials = at_three(0.9, 0.2, 0.4, 0.3)
    parents = []
    for until in (3, 6):
        trials[1] = replace(trials[1], state="running", until=until)
        fork = pbt().next(standing(trials))
        parents.append(fork.parent if isinstance(fork, Fork) else None)
    assert parents == [3, 1]
    ended = [replace(each, state="ended", whole=True) if each.number == 1 else each for each in trials]
    fork = pbt().next(standing(ended))
    assert isinstance(fork, Fork)
    assert fork.parent == 1


def test_among_equals_none_is_replaced() -> None:
    assert isinstance(pbt().next(standing(at_three(0.5, 0.5, 0.5, 0.5))), Resume)


def test_a_fork_is_compared_from_its_own_epochs_on() -> None:
    """At its parent's epochs it has no value of its own; a member that it has replaced counts there still."""
    fork = seen(4, {4: 0.3, 5: 0.2, 6: 0.9}, until=6, kinds=("fork",), inherited=3, replaces=0)
    others = [seen(number, [1.0] * 5 + [0.5], until=6) for number in (1, 2, 3)]
    trials = [replace(at_three(0.9)[0], state="ended"), *others, fork]
    resumed = pbt().next(standing(trials))
    assert isinstance(resumed, Resume)
    assert resumed.number == 1
    for at in (1, 2, 3):
        trials[at] = replace(trials[at], state="running", until=9)
    replaced = pbt().next(standing(trials))
    assert isinstance(replaced, Fork)
    assert (replaced.replaces, replaced.epoch) == (4, 6)


@pytest.mark.parametrize("values", [[1.0, 0.5, 0.4, math.nan], [1.0, 0.5, 0.4, math.inf]])
def test_a_member_that_has_diverged_is_replaced_at_the_last_look_that_it_came_to(values: list[float]) -> None:
    trials = [seen(0, values, "ended", until=6), *at_three(0.0, 0.5, 0.6, 0.7)[1:]]
    fork = pbt().next(standing(trials))
    assert isinstance(fork, Fork)
    assert (fork.replaces, fork.parent, fork.epoch) == (0, 1, 3)


@pytest.mark.parametrize("end", ["diverged", "failed"])
def test_a_member_that_diverged_within_an_epoch_or_failed_is_never_forked(end: str) -> None:
    """It was the best at the last look that it came to."""
    trials = [seen(0, [1.0, 0.5, 0.1], "ended", until=6, **{end: True}), *at_three(0.0, 0.5, 0.6, 0.7)[1:]]
    fork = pbt().next(standing(trials))
    assert isinstance(fork, Fork)
    assert (fork.replaces, fork.parent, fork.epoch) == (0, 1, 3)


def test_a_fork_that_diverged_within_its_first_epoch_is_replaced_each_time() -> None:
    """It was not lost, and it fitted the machine."""
    lost = [
        seen(number, {}, "ended", until=6, inherited=3, replaces=replaces, diverged=True)
        for number, replaces in ((4, 0), (5, 4))
    ]
    trials = [*at_three(0.9, state="ended"), *at_three(0.0, 0.5, 0.6, 0.7)[1:], *lost]
    fork = pbt().next(standing(trials))
    assert isinstance(fork, Fork)
    assert (fork.replaces, fork.parent) == (5, 1)


def test_one_that_ended_before_the_first_look_is_replaced_by_a_new_member() -> None:
    trials = [seen(0, [math.nan], "ended", until=3), *at_three(0.0, 0.5, 0.6, 0.7)[1:]]
    assert pbt().next(standing(trials)) == New(until=3, why=Why("initial"))


def test_of_two_lost_members_the_one_that_came_further_is_replaced() -> None:
    early = seen(3, [1.0, 1.0, math.nan], "ended", until=3)
    late = seen(0, [0.5] * 8 + [math.nan], "ended", until=9)
    others = [seen(number, [0.5] * 9, "paused", until=9) for number in (1, 2, 4)]
    fork = pbt(population=5).next(standing([late, *others[:2], early, others[2]]))
    assert isinstance(fork, Fork)
    assert (fork.replaces, fork.epoch) == (0, 9)


def test_a_member_that_violates_a_bound_is_replaced_and_never_forked() -> None:
    trials = at_three(0.1, 0.5, 0.6, 0.7)
    trials[0] = replace(trials[0], feasible=False)
    fork = pbt().next(standing(trials))
    assert isinstance(fork, Fork)
    assert (fork.replaces, fork.parent) == (0, 1)


def test_a_member_that_violates_a_bound_which_training_may_mend_stays_behind_the_others() -> None:
    trials = at_three(0.1, 0.5, 0.6, 0.7)
    trials[0] = replace(trials[0], feasible=False, mends=True)
    fork = pbt().next(standing(trials))
    assert isinstance(fork, Fork)
    assert (fork.replaces, fork.parent) == (0, 1), "the best loss, but the worst rank"
    trials[1] = replace(trials[1], feasible=False, mends=True)
    resumed = pbt().next(standing(trials))
    assert isinstance(resumed, Resume)
    assert resumed.number == 0, "the better of the two that violate a bound is not the worst"


def test_a_result_that_was_taken_over_is_never_forked() -> None:
    """It has no checkpoint."""
    trials = at_three(0.9, 0.5, 0.6, 0.1)
    trials[3] = replace(trials[3], state="ended", whole=True, taken_over=True)
    fork = pbt().next(standing(trials))
    assert isinstance(fork, Fork)
    assert (fork.replaces, fork.parent) == (0, 1)


def test_a_fork_that_ends_before_its_first_epoch_is_replaced_by_another_one() -> None:
    """It may have been lost with its worker."""
    ended = seen(4, {}, "ended", until=6, inherited=3, replaces=0)
    trials = [replace(at_three(0.9)[0], state="ended"), *at_three(0.9, 0.2, 0.4, 0.3)[1:], ended]
    fork = pbt().next(standing(trials))
    assert isinstance(fork, Fork)
    assert (fork.replaces, fork.parent, fork.epoch) == (4, 1, 3)


def retried(value: float, state: str = "paused") -> list[Seen]:
    """Member 0 of four was replaced by a fork, and a person has let it train again."""
    trials = at_three(value, 0.2, 0.4, 0.3)
    trials[0] = replace(trials[0], state=state)  # type: ignore[arg-type]
    return [*trials, seen(4, {4: 0.2, 5: 0.2, 6: 0.2}, until=6, kinds=("fork",), inherited=3, replaces=0)]


def test_one_that_is_retried_after_a_fork_has_replaced_it_fills_no_other_place() -> None:
    trials = retried(0.9, "running")
    assert pbt().next(standing(trials)) == Resume(1, 6, Why("survivor"))
    trials[3] = replace(trials[3], state="ended", failed=True)
    fork = pbt().next(standing(trials))
    assert isinstance(fork, Fork)
    assert fork.replaces == 3


def test_one_that_is_retried_after_a_fork_has_replaced_it_is_not_replaced_again() -> None:
    assert pbt().next(standing(retried(0.9))) == Resume(1, 6, Why("survivor"))
    assert pbt().next(standing(retried(0.35))) == Resume(0, 6, Why("survivor"))
    only = [replace(each, state="running", until=9) if each.number else each for each in retried(0.9)]
    assert pbt().next(standing(only)) == Wait()


def test_where_each_fork_fails_at_once_each_place_is_given_up_after_the_second() -> None:
    trials = [replace(each, state="ended") for each in at_three(0.9, 0.8, 0.7, 0.6)]
    while isinstance(fork := pbt().next(standing(trials)), Fork):
        assert len(trials) < 100, "it ends"
        failed = seen(len(trials), {}, "ended", until=6, inherited=fork.epoch, replaces=fork.replaces)
        trials.append(failed)
    assert fork == Wait()
    assert len(trials) == 4 + 2 * 4


def test_where_no_trial_is_left_the_worst_train_on_too() -> None:
    trials = at_three(0.9, 0.2, 0.4, 0.3)
    assert pbt().next(standing(trials, n_trials=4)) == Resume(0, 6, Why("survivor"))


def test_a_grant_ends_with_the_budget_or_the_trial() -> None:
    trials = at_three(0.9, 0.2, 0.4, 0.3)
    fork = pbt().next(standing(trials, n_epochs=14))
    assert (fork.until if isinstance(fork, Fork) else 0) == 5  # it begins at 3, and 2 epochs are left
    assert pbt().next(standing(trials, n_epochs=12)) == Wait()
    late = [seen(number, [1.0] * 24 + [float(number)], until=25) for number in range(4)]
    assert pbt(every=25).next(standing(late, horizon=27)) == Resume(0, None, Why("survivor"))


def test_a_member_cut_by_the_budget_comes_to_the_next_look() -> None:
    trials = at_three(0.9, 0.2, 0.4, 0.3)
    trials = [replace(each, values={**each.values, 4: 1.0}, until=4) for each in trials]
    assert pbt().next(standing(trials)) == Resume(0, 6, Why("survivor"))


def test_a_trial_whose_grant_ends_pauses() -> None:
    trials = at_three(0.1, 0.2, 0.4, 0.3)
    assert pbt().next(standing(trials, here=0)) == Wait()


def test_every_is_a_tenth_of_a_trial_unless_it_is_given() -> None:
    assert pbt(every=None).first(standing(horizon=50)) == 5
    assert pbt(every=None).first(standing(horizon=None)) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"population": 3}, "at least 4"),
        ({"quantile": 0.0}, "above 0"),
        ({"quantile": 0.6}, "at most 0.5"),
        ({"every": 0}, "at least 1 epoch"),
        ({"resample": 1.5}, "probability"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        pbt(**arguments)


# ---- whole studies, with any number of workers that end their grants in any order


class Simulation:
    """A study as workers do it who ask the scheduler, and train what it grants."""

    def __init__(self, scheduler: Pbt, loss: Callable[[Mapping[str, Any], int], float], **more: Any) -> None:
        self.scheduler, self.loss, self.more = scheduler, loss, more
        self.trials: list[Seen] = []
        self.answers: list[Any] = []

    @property
    def now(self) -> Standing:
        trials = list(self.trials)
        return standing(trials, **self.more)

    def ask(self) -> bool:
        """One free worker asks; whether it got a trial."""
        now = self.now
        answer = self.scheduler.next(now)
        self.answers.append(answer)
        if isinstance(answer, Wait):
            return False
        if isinstance(answer, Resume):
            old = self.trials[answer.number]
            assert old.state == "paused"
            kinds = (*old.kinds, answer.why.kind)
            self.trials[answer.number] = replace(old, state="running", until=answer.until, kinds=kinds)
            return True
        assert now.new_left != 0
        if isinstance(answer, Fork):
            parent = self.trials[answer.parent]
            assert parent.epochs >= answer.epoch > parent.inherited
            assert not (parent.state == "running" and parent.until == answer.epoch)
            if answer.replaces is not None and self.trials[answer.replaces].state == "paused":
                self.trials[answer.replaces] = replace(self.trials[answer.replaces], state="ended")
            more = {"inherited": answer.epoch, "replaces": answer.replaces, "params": answer.params}
        else:
            more = {}
        made = seen(len(self.trials), {}, "running", until=answer.until, kinds=(answer.why.kind,), **more)
        self.trials.append(made)
        return True

    def train(self, number: int) -> None:
        """A worker trains a running trial to the end of its grant, or until it diverges."""
        old = self.trials[number]
        values = dict(old.values)
        for epoch in range(old.epochs + 1, (old.until or 27) + 1):
            values[epoch] = self.loss(old.params, epoch)
            if not math.isfinite(values[epoch]):
                break
        whole = max(values) == 27 and math.isfinite(values[27])
        state = "ended" if whole or not math.isfinite(values[max(values)]) else "paused"
        self.trials[number] = replace(old, values=values, state=state, whole=whole)  # type: ignore[arg-type]

    def run(self, workers: int, pick: Callable[[Sequence[int]], int]) -> None:
        for _ in range(5_000):
            running = [each.number for each in self.trials if each.state == "running"]
            if len(running) < workers and self.ask():
                continue
            running = [each.number for each in self.trials if each.state == "running"]
            if not running:
                return
            self.train(pick(running))
        raise AssertionError("the study does not come to its end")


def quadratic(params: Mapping[str, Any], epoch: int) -> float:
    return abs(math.log10(params[RATE]) + 3) + 1.0 / epoch


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), workers=st.sampled_from([1, 3, 8, 64]), population=st.sampled_from([4, 8, 9]))
def test_each_place_in_the_population_trains_to_its_end(data: Any, workers: int, population: int) -> None:
    study = Simulation(pbt(population=population), quadratic, planned=workers, n_trials=None)
    study.run(workers, lambda running: data.draw(st.sampled_from(running)))
    trials = study.trials
    assert sum(each.whole for each in trials) == population
    assert sum(each.epochs - each.inherited for each in trials) == 27 * population
    for each in trials:
        low, high = 1e-5, 1e-1
        assert low <= each.params[RATE] <= high


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    data=st.data(),
    workers=st.sampled_from([1, 4, 16]),
    n_epochs=st.sampled_from([None, 5, 40, 75, 500]),
    n_trials=st.sampled_from([4, 6, 20]),
)
def test_a_worker_waits_only_for_others_and_budgets_hold(
    data: Any, workers: int, n_epochs: int | None, n_trials: int
) -> None:
    """Some parameters diverge at some epochs; no order of ends makes a paused member wait for ever."""
    unlucky = data.draw(st.sets(st.integers(1, 27), max_size=3))

    def loss(params: Mapping[str, Any], epoch: int) -> float:
        return math.nan if epoch in unlucky and params[RATE] > 2e-5 else quadratic(params, epoch)

    study = Simulation(pbt(), loss, planned=workers, n_trials=n_trials, n_epochs=n_epochs)
    study.run(workers, lambda running: data.draw(st.sampled_from(running)))
    spent = sum(each.epochs - each.inherited for each in study.trials)
    assert len(study.trials) <= n_trials
    assert n_epochs is None or spent <= n_epochs
    left = [each for each in study.trials if each.state == "paused" and math.isfinite(each.values[each.epochs])]
    assert not left or spent == n_epochs


def test_one_worker_and_one_seed_give_the_same_answers() -> None:
    def answers(seed: int) -> list[Any]:
        study = Simulation(pbt(), quadratic, seed=seed, n_trials=40)
        study.run(1, min)
        return study.answers

    assert answers(1) == answers(1)
    forks = [[answer for answer in answers(seed) if isinstance(answer, Fork)] for seed in (1, 2)]
    assert forks[0] != forks[1]


# ---- perturbation


def test_a_number_is_multiplied_in_its_own_scale() -> None:
    rate = FloatDistribution(1e-5, 1e-1, log=True)
    assert (moved(rate, 0.01, up=True), moved(rate, 0.01, up=False)) == pytest.approx((0.012, 0.008))
    assert (moved(rate, 0.1, up=True), moved(rate, 1e-5, up=False)) == pytest.approx((0.08, 1.2e-5))
    momentum = FloatDistribution(0.0, 1.0)
    assert (moved(momentum, 0.5, up=True), moved(momentum, 0.5, up=False)) == pytest.approx((0.6, 0.4))
    assert (moved(momentum, 0.0, up=False), moved(momentum, 0.9, up=True)) == pytest.approx((0.05, 1.0))


def test_a_whole_number_or_a_step_moves_by_one_step_at_least() -> None:
    assert moved(IntDistribution(1, 64, log=True), 2, up=True) == 3
    assert moved(IntDistribution(0, 100, step=10), 50, up=True) == 60
    assert moved(IntDistribution(0, 3), 3, up=True) == 2
    assert moved(FloatDistribution(0.0, 1.0, step=0.25), 0.25, up=True) == 0.5


def test_the_last_step_is_the_end_of_the_range() -> None:
    for low, high, step in ((0.0, 0.6, 0.1), (-1.0, 0.6, 0.1), (0.05, 0.059, 0.001), (-0.3, -0.05, 0.01)):
        space = FloatDistribution(low, high, step=step)
        assert moved(space, high - step, up=True) == high
        assert moved(space, high, up=False) < high


def test_a_choice_becomes_its_neighbour() -> None:
    sizes = CategoricalDistribution([64, 16, 32])
    assert (moved(sizes, 16, up=True), moved(sizes, 64, up=True), moved(sizes, 32, up=False)) == (32, 32, 16)
    words = CategoricalDistribution(["a", "b", "c"])
    assert (moved(words, "b", up=True), moved(words, "a", up=False)) == ("c", "b")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(space=spaces(), seed=st.integers(0, 10_000), resample=st.sampled_from([0.0, 0.5, 1.0]))
def test_what_is_perturbed_stays_in_the_space(space: Any, seed: int, resample: float) -> None:
    distributions: dict[str, BaseDistribution] = space[0]
    rng = np.random.default_rng(seed)
    params = perturbed({}, distributions, (), rng, resample=1.0)
    assert params == {}
    params = {path: _any_value(distribution, rng) for path, distribution in distributions.items()}
    chosen = tuple(path for path in params if rng.random() < 0.7)
    new = perturbed(params, distributions, chosen, rng, resample=resample)
    assert new.keys() == params.keys()
    for path, distribution in distributions.items():
        assert distribution._contains(distribution.to_internal_repr(new[path]))
        if path not in chosen or distribution.single():
            assert new[path] is params[path]
        elif resample == 0.0:
            assert not (new[path] == params[path] and type(new[path]) is type(params[path]))


def _any_value(distribution: BaseDistribution, rng: np.random.Generator) -> Any:
    axis = axis_of(distribution)
    return axis.value(float(axis.snap(rng.random(1))[0]))


# ---- which parameters may be perturbed

SPACE = """search_space:
  optimizer.lr: {type: float, low: 1e-3, high: 1e-1, log: true}
  optimizer.amsgrad: {type: categorical, choices: [true, false]}
  optimizer.eps: {type: categorical, choices: [1e-8, 1e-6]}
  optimizer._target_: {type: categorical, choices: [torch.optim.AdamW, torch.optim.Adam]}
  loader.batch_size: {type: categorical, choices: [8, 16]}
  model.hidden: {type: int, low: 2, high: 8}
  model.dropout: {type: float, low: 0.0, high: 0.5}
  lr_scheduler.eta_min: {type: float, low: 0.0, high: 1e-4}
"""


def perturb_of(studies: Studies, *overrides: str, space: str = SPACE) -> tuple[str, ...]:
    text = STUDY.partition("search_space:")[0] + space
    scheduler = make_scheduler(studies.spec("study.scheduler=pbt", *overrides, text=text))
    assert isinstance(scheduler, Pbt)
    return tuple(scheduler.perturb)


def test_left_out_it_is_what_a_checkpoint_can_be_trained_on_with(studies: Studies) -> None:
    assert perturb_of(studies) == ("optimizer.lr", "optimizer.eps", "loader.batch_size")
    by_step = ("lr_scheduler.interval=step",)
    assert perturb_of(studies, *by_step) == ("optimizer.lr", "optimizer.eps")
    assert perturb_of(studies, "trainer.validate_every=0.5") == ("optimizer.lr", "optimizer.eps")


def test_named_it_is_those(studies: Studies) -> None:
    named = "study.scheduler={name: pbt, perturb: [model.dropout, optimizer.lr]}"
    assert perturb_of(studies, named) == ("optimizer.lr", "model.dropout")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("optimizer.momentum", "is not searched"),
        ("optimizer.amsgrad", "a switch of the optimizer changes what it keeps"),
        ("optimizer._target_", "what one class has saved another can't load"),
        ("lr_scheduler.eta_min", "the place in the schedule is the parent's"),
    ],
)
def test_what_can_not_be_perturbed_is_refused_by_name(path: str, problem: str, studies: Studies) -> None:
    with pytest.raises(InputError, match=problem) as refused:
        perturb_of(studies, f"study.scheduler={{name: pbt, perturb: [{path}]}}")
    assert refused.value.path == "study.scheduler.perturb"
    assert refused.value.value == path


def test_the_length_of_what_lbfgs_remembers_stays_its_parents(studies: Studies) -> None:
    lbfgs = "optimizer={_target_: torch.optim.LBFGS, lr: 0.5}"
    both = (
        "search_space:\n  optimizer.lr: {type: float, low: 0.1, high: 1.0}\n"
        "  optimizer.history_size: {type: int, low: 3, high: 30}\n"
    )
    assert perturb_of(studies, lbfgs, space=both) == ("optimizer.lr",)


def test_the_batch_size_of_a_schedule_by_steps_is_refused(studies: Studies) -> None:
    named = "study.scheduler={name: pbt, perturb: [loader.batch_size]}"
    with pytest.raises(InputError, match="the learning rate is scheduled by steps"):
        perturb_of(studies, "lr_scheduler.interval=step", named)


def test_a_space_with_nothing_to_perturb_is_refused(studies: Studies) -> None:
    only = "search_space:\n  model.hidden: {type: int, low: 2, high: 8}\n"
    with pytest.raises(InputError, match="a fork would be a copy") as refused:
        perturb_of(studies, space=only)
    assert refused.value.path == "study.scheduler"
    assert "perturb: [model.dropout]" in str(refused.value)
