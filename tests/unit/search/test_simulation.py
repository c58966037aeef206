"""Schedulers on known curves, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from optuna.distributions import FloatDistribution

from hpo.search.schedulers.asha import Asha
from hpo.search.schedulers.by_name import SCHEDULERS
from hpo.search.schedulers.granting import GrantScheduler
from hpo.search.schedulers.scheduler import Fork, New, Next, Resume, Standing, Wait, Why
from hpo.search.schedulers.seen import Seen
from hpo.search.schedulers.simulation import Known, Simulation

LEVELS = [(7 * k % 20) / 20 for k in range(20)]
SPACE = {"x": FloatDistribution(0.0, 1.0)}


def known(level: float, epochs: int = 9, *, whole: bool = True, pace: float = 1.0) -> Known:
    values = {epoch: level + 1 / epoch for epoch in range(1, epochs + 1)}
    return Known({"x": level}, values, whole, pace=pace)


def standing(n_trials: int, n_epochs: int | None = None, imported: Sequence[Seen] = ()) -> Standing:
    return Standing(read=lambda: imported, space=SPACE, horizon=9, n_trials=n_trials, n_epochs=n_epochs)


@dataclass
class InTurn:
    """Draws these, one after the other."""

    left: list[Known]
    asked: list[Mapping[str, Any] | None] = field(default_factory=list)

    def __call__(self, params: Mapping[str, Any] | None) -> Known:
        self.asked.append(params)
        return self.left.pop(0)


def simulated(
    scheduler: Any, curves: Sequence[Known], workers: int = 1, n_epochs: int | None = None
) -> Simulation:
    simulation = Simulation(scheduler, standing(len(curves), n_epochs), InTurn(list(curves)), workers)
    simulation.run()
    return simulation


def test_asha_promotes_as_its_paper_has_it() -> None:
    """Of 9 trials at rung 1 three come to 3 and one to the end."""
    curves = [known(level / 10) for level in range(9)]
    for workers in (1, 9):
        assert [trial.done for trial in simulated(Asha(), curves, workers).trials] == [9, 3, 3] + [1] * 6


@pytest.mark.parametrize("name", sorted(set(SCHEDULERS) - {"pbt"}))
@pytest.mark.parametrize("workers", [1, 4])
def test_epochs_are_spent_exactly(name: str, workers: int) -> None:
    curves = [known((7 * k % 20) / 20, pace=1 + k % 3) for k in range(20)]
    simulation = simulated(SCHEDULERS[name](), curves, workers, n_epochs=30)
    assert sum(trial.done for trial in simulation.trials) == 30
    assert all(
        trial.values == {e: trial.known.values[e] for e in range(1, trial.done + 1)} for trial in simulation.trials
    )
    assert not any(trial.at_edge for trial in simulation.trials)
    assert not any(trial.state == "running" for trial in simulation.trials)


@dataclass
class Advancing:
    """A scheduler that is to resume each trial beyond the epoch where it has paused."""

    inner: Any

    def next(self, standing: Standing) -> Next:
        step: Next = self.inner.next(standing)
        if isinstance(step, Resume) and step.until is not None:
            assert step.until > (standing.trials[step.number].until or 0)
        return step


@pytest.mark.parametrize("name", sorted(set(SCHEDULERS) - {"pbt"}))
@pytest.mark.parametrize("n_epochs", [None, 30])
def test_a_trial_that_reports_every_other_epoch_is_resumed_beyond_its_pause(
    name: str, n_epochs: int | None
) -> None:
    whole = [known(level, 27) for level in LEVELS]
    curves = [Known(each.params, {e: each.values[e] for e in range(1, 28, 2)}) for each in whole]
    at = replace(standing(len(curves), n_epochs), horizon=27)
    simulation = Simulation(Advancing(SCHEDULERS[name]()), at, InTurn(curves), 1)
    simulation.run()
    assert not any(trial.state == "running" for trial in simulation.trials)


def test_a_trial_that_was_cut_short_ends_at_the_edge() -> None:
    curves = [
        known(0.9),
        known(0.8),
        known(0.1, 1, whole=False),
        known(0.5),
        known(0.4),
        known(0.3, 2, whole=False),
    ]
    trials = simulated(Asha(), curves).trials
    assert [trial.at_edge for trial in trials] == [False, False, True, False, False, True]
    assert (trials[2].done, trials[2].state) == (1, "ended"), "it was promoted, and nothing more is known"
    assert (trials[5].done, trials[5].state) == (2, "ended")
    assert trials[0].state == "paused"


def test_one_that_is_paused_where_it_was_cut_short_is_no_edge() -> None:
    trials = simulated(Asha(), [known(0.9, 1, whole=False), known(0.8)]).trials
    assert [(trial.state, trial.at_edge) for trial in trials] == [("paused", False)] * 2


def test_that_a_trial_violates_a_bound_is_seen_at_its_end_only() -> None:
    trials = simulated(Asha(), [replace(known(0.1), feasible=False), known(0.5), known(0.6)]).trials
    assert [(trial.done, trial.state) for trial in trials] == [(3, "paused"), (1, "paused"), (1, "paused")]
    assert trials[0].seen().feasible
    trials[0].end()
    assert not trials[0].seen().feasible


@dataclass
class Alone(GrantScheduler):
    """One trial, three epochs at a time; keeps what it was shown."""

    shown: list[tuple[int | None, int, Any]] = field(default_factory=list)

    def first(self, standing: Standing) -> int | None:
        return 3

    def next(self, standing: Standing) -> Next:
        self.shown.append((standing.here, sum(trial.epochs for trial in standing.own), dict(standing.state)))
        if not standing.own:
            return New({"x": 0.25}, 3, Why("first"), {"decided": 1})
        if standing.paused:
            return Resume(standing.paused[0].number, standing.paused[0].epochs + 3, Why("on"))
        return Wait()


def test_it_is_asked_as_a_study_asks_it() -> None:
    """Where a grant ends, with the trial at hand; after its end without one; with what it has stored."""
    scheduler, draw = Alone(), InTurn([known(0.5)])
    imported = [Seen(0, {"x": 0.1}, {1: 5.0}, "ended", imported=True)]
    simulation = Simulation(scheduler, standing(1, imported=imported), draw, 1)
    simulation.run()
    assert scheduler.shown == [
        (None, 0, {}),
        (1, 3, {"decided": 1}),
        (1, 6, {"decided": 1}),
        (None, 9, {"decided": 1}),
    ]
    assert draw.asked == [{"x": 0.25}]
    (trial,) = simulation.trials
    assert (trial.number, trial.kinds, trial.state) == (1, ["first", "on", "on"], "ended")
    assert len(simulation.seconds) == 4


@pytest.mark.parametrize("values", [{1: 0.1, 2: math.nan}, {1: 0.1}, {1: math.nan}])
def test_one_that_diverged_is_shown_as_such_and_is_no_measure_of_how_long_trials_are(
    values: Mapping[int, float],
) -> None:
    curves = [Known({"x": 0.0}, values, counts=False), *(known(level / 20, 27) for level in range(11))]
    now = replace(standing(len(curves)), horizon=None)
    simulation = Simulation(Asha(), now, InTurn(curves), 1)
    simulation.run()
    lost = simulation.trials[0].seen()
    assert (lost.whole, lost.diverged, lost.state) == (False, True, "ended")
    assert max(trial.done for trial in simulation.trials) > max(values), "it is promoted as in a study"


def test_a_slow_trial_reports_later() -> None:
    """While one trial trains an epoch, the other worker trains three, and promotes the best of them."""
    curves = [known(0.5, pace=4.0), known(0.4), known(0.3), known(0.2)]
    simulation = simulated(Asha(), curves, workers=2, n_epochs=6)
    assert [trial.done for trial in simulation.trials] == [1, 1, 1, 3]


def test_forks_can_not_be_simulated() -> None:
    class Forking(Alone):
        def next(self, standing: Standing) -> Next:
            return Fork(0, 3, {"x": 0.5}) if standing.paused else super().next(standing)

    with pytest.raises(TypeError, match="fork"):
        simulated(Forking(), [known(0.5), known(0.4)])
