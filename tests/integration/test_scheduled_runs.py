"""Whole studies under each scheduler: epochs exact, repeatable, and continued with a larger budget."""

from __future__ import annotations

from typing import Any

import pytest
from optuna.trial import TrialState

import hpo
from hpo.search.schedulers.by_name import SCHEDULERS
from hpo.storage.grants import grants_of
from hpo.storage.lineage import epochs_trained
from hpo.study.open_study import OpenStudy, load_study
from hpo.study.ranking import is_feasible
from tests.support.commands import STUDY
from tests.support.studies import Studies

pytestmark = pytest.mark.full

_EPOCHS = 30
# freeze_thaw weighs how long a switch of trials takes: measured, it may differ from run to run.
_WITH_ARGUMENTS = {"pbt": "{name: pbt, population: 4, every: 2}", "freeze_thaw": "{name: freeze_thaw, switch: 1}"}
_OVERRIDES = ("trainer.max_epochs=9", "study.pruner=none", "study.sampler=random")


@pytest.fixture(params=SCHEDULERS)
def scheduled(request: pytest.FixtureRequest) -> tuple[str, ...]:
    name = _WITH_ARGUMENTS.get(request.param, request.param)
    return (f"study.scheduler={name}", "study.n_trials=30", *_OVERRIDES)


def run(studies: Studies, *overrides: str, at: str = "", workers: int = 1) -> OpenStudy:
    spec = studies.spec(*overrides, at=at)
    result = hpo.run(spec.path, overrides, workers=workers, progress=False)
    assert result.ending == "done"
    return load_study(spec)


def told(view: OpenStudy) -> list[tuple[Any, ...]]:
    """All that a study has decided and seen, by trial."""
    return [
        (trial.state, trial.params, trial.intermediate_values, [dict(each) for each in grants_of(trial)])
        for trial in view.study.get_trials()
    ]


def trained(view: OpenStudy) -> int:
    return sum(map(epochs_trained, view.study.get_trials()))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("workers", [1, 3])
def test_the_epochs_are_spent_exactly(scheduled: tuple[str, ...], workers: int, studies: Studies) -> None:
    view = run(studies, *scheduled, f"study.epochs={_EPOCHS}", workers=workers)
    trials = view.study.get_trials()
    assert trained(view) == _EPOCHS
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    numbers = sorted(each["number"] for trial in trials for each in grants_of(trial))
    assert numbers == list(range(len(numbers)))
    params = [tuple(sorted(trial.params.items())) for trial in trials]
    assert len(set(params)) == len(params)
    best = min(value for trial in trials for value in trial.intermediate_values.values())
    assert hpo.best_params(view.spec.path, list(scheduled)) == next(
        trial.params for trial in trials if best in trial.intermediate_values.values()
    )
    view.storage.close()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("searched", ["trainer.max_epochs", "model.hidden"])
def test_where_the_length_of_a_trial_is_searched_the_config_does_not_say_it(
    scheduled: tuple[str, ...], searched: str, studies: Studies
) -> None:
    length = "3" if searched == "trainer.max_epochs" else '"${model.hidden}"'
    text = STUDY.replace("max_epochs: 3", f"max_epochs: {length}").replace(
        "model.hidden: {type: int, low: 2, high: 8}", f"{searched}: {{type: int, low: 6, high: 9}}"
    )
    studies.spec(text=text)
    overrides = [each for each in scheduled if "max_epochs" not in each]
    view = run(studies, *overrides, f"study.epochs={_EPOCHS}")
    trials = view.study.get_trials()
    assert trained(view) == _EPOCHS
    assert any(len(grants_of(trial)) > 1 for trial in trials)
    assert all(epochs_trained(trial) <= trial.params[searched] for trial in trials)
    view.storage.close()


#: A function of which only odd epochs have a value. It notes each epoch that it trains.
EVERY_OTHER = """
def train(trial, rate=0.5, epochs=9):
    done = trial.load_checkpoint() or 0
    for epoch in range(done + 1, epochs + 1):
        value = {"val_loss": abs(rate - 0.3) + 1 / epoch} if epoch % 2 else {"train_loss": 1.0}
        with open(__file__ + ".trained", "a") as trained:
            print(trial.number, epoch, file=trained)
        trial.report(epoch, **value)
        trial.save_checkpoint(epoch)
"""
FUNCTION = """
study: {name: tiny, sampler: {name: random, seed: 3}, pruner: none}
objective: {_target_: parts.train, rate: 0.5, epochs: 9}
search_space: {objective.rate: {type: float, low: 0.0, high: 1.0}}
"""


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", ["freeze_thaw", "asha", "hyperband", "none"])
@pytest.mark.parametrize("workers", [1, 3])
def test_epochs_without_a_value_are_spent_exactly(name: str, workers: int, studies: Studies) -> None:
    spec = studies.spec(text=FUNCTION, code=EVERY_OTHER)
    overrides = (f"study.scheduler={name}", "study.epochs=32", "trainer.max_epochs=9")
    assert hpo.run(spec.path, overrides, workers=workers, progress=False).ending == "done"
    epochs = (spec.folder / "parts.py.trained").read_text().splitlines()
    assert len(epochs) == len(set(epochs)) == 32


@pytest.mark.full
@pytest.mark.usefixtures("in_process")
def test_one_worker_and_one_seed_give_the_same_study_twice(scheduled: tuple[str, ...], studies: Studies) -> None:
    budget = f"study.epochs={_EPOCHS}"
    views = [run(studies, *scheduled, budget, at=at) for at in ("one", "two")]
    one, two = (told(view) for view in views)
    assert one == two
    for view in views:
        view.storage.close()


@pytest.mark.full
@pytest.mark.usefixtures("in_process")
def test_a_larger_budget_goes_on_from_there(scheduled: tuple[str, ...], studies: Studies) -> None:
    first = run(studies, *scheduled, "study.epochs=12")
    before = told(first)
    first.storage.close()
    view = run(studies, *scheduled, f"study.epochs={_EPOCHS}")
    assert trained(view) == _EPOCHS
    for (_, params, values, grants), now in zip(before, told(view), strict=False):
        assert now[1] == params
        assert now[3][: len(grants)] == grants
        assert {step: now[2][step] for step in values} == values
    view.storage.close()


@pytest.mark.usefixtures("in_process")
def test_a_trial_that_violates_a_bound_is_never_resumed(scheduled: tuple[str, ...], studies: Studies) -> None:
    bound = ("study.constraints={parameters: <= 25}", "callbacks.parameter_count=true")
    view = run(studies, *scheduled, *bound, f"study.epochs={_EPOCHS}")
    violating = [trial for trial in view.study.get_trials() if not is_feasible(trial)]
    assert violating
    assert len(violating) < len(view.study.get_trials())
    for trial in violating:
        assert len(grants_of(trial)) == 1
    view.storage.close()


#: A function whose accuracy keeps to a bound from the fourth epoch on, or never.
IMPROVING = """
def train(trial, rate=0.5, epochs=9):
    for epoch in range((trial.load_checkpoint() or 0) + 1, epochs + 1):
        trial.report(epoch, val_loss=abs(rate - 0.3) + 1 / epoch, acc=epoch / (epoch + 1) - (rate > 0.8))
        trial.save_checkpoint(epoch)
"""


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("workers", [1, 3])
def test_a_trial_is_trained_until_it_keeps_to_a_bound(
    scheduled: tuple[str, ...], workers: int, studies: Studies
) -> None:
    spec = studies.spec(text=FUNCTION, code=IMPROVING)
    perturb = ("study.scheduler.perturb=[objective.rate]",) if "pbt" in scheduled[0] else ()
    overrides = (*scheduled, *perturb, 'study.constraints={acc: ">= 0.8"}', "study.epochs=60")
    assert hpo.run(spec.path, overrides, workers=workers, progress=False).ending == "done"
    view = load_study(studies.spec(*overrides))
    within = [trial for trial in view.study.get_trials() if is_feasible(trial)]
    view.storage.close()
    assert len(within) >= 3
    assert all(max(trial.intermediate_values) >= 4 for trial in within)
    assert hpo.best_params(spec.path, list(overrides)) in [trial.params for trial in within]


@pytest.mark.usefixtures("in_process")
def test_without_epochs_the_trials_end_the_study(scheduled: tuple[str, ...], studies: Studies) -> None:
    view = run(studies, *scheduled, "study.n_trials=8")
    trials = view.study.get_trials()
    assert len(trials) == 8
    assert all(trial.state.is_finished() for trial in trials)
    assert trained(view) < 8 * 9
    view.storage.close()
