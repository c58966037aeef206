"""Samplers on real studies: each by name, the same draw for the same trial, and no point twice."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from hpo.config.space import SearchSpace
from hpo.config.spec import load_spec
from hpo.errors import BudgetExhaustedError, InputError, StudyError
from hpo.search import samplers
from hpo.search.as_predicted import as_predicted
from hpo.search.samplers import SAMPLERS, ExhaustiveSampler, make_sampler, tpe_arguments
from hpo.study.open_study import OpenStudy, start_study
from hpo.study.queue import enqueue
from tests.support.commands import STUDY, make_study
from tests.support.studies import Studies, ask, take

FINITE = (
    "search_space={optimizer.lr: {type: categorical, choices: [0.1, 0.2, 0.3]}, "
    "model.hidden: {type: int, low: 2, high: 5}}"
)
CONDITIONAL = STUDY + (
    "  optimizer._target_: {type: categorical, choices: [torch.optim.AdamW, torch.optim.SGD]}\n"
    "  optimizer.momentum: {type: float, low: 0.0, high: 0.9, when: {optimizer._target_: torch.optim.SGD}}\n"
)
EXHAUSTIVE = {"grid", "brute_force"}
EXTRA = {
    "cmaes": "allow_pickle: true",
    "partial_fixed": "fixed_params: {optimizer.lr: 0.01}, base_sampler: {name: tpe, n_startup_trials: 2}",
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


def sampler(options: str) -> tuple[str, str]:
    """Overrides of a study that is drawn by this sampler."""
    return f"study.sampler={options}", "study.n_trials=200"


def loss(params: dict[str, Any]) -> float:
    return float((params["optimizer.lr"] - 0.02) ** 2 * 1e3 + (params["model.hidden"] - 4.4) ** 2)


def play(view: OpenStudy, count: int) -> list[dict[str, Any]]:
    """Ask and tell ``count`` trials; their parameters."""
    drawn = []
    for _ in range(count):
        trial, params = ask(view)
        view.study.tell(trial, loss(params))
        drawn.append(params)
    return drawn


def points(drawn: Sequence[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {tuple(params.values()) for params in drawn}


@pytest.mark.parametrize("short", SAMPLERS)
def test_each_sampler_runs_a_study_by_its_name_and_is_found_by_its_class_name(
    studies: Studies, short: str
) -> None:
    options = f"{{name: {SAMPLERS[short].__name__}, {EXTRA.get(short, '')}}}"
    spec = studies.spec(*sampler(options), *((FINITE,) if short in EXHAUSTIVE else ()))
    make_sampler(spec, SearchSpace.from_spec(spec))
    options = f"{{name: {short}, {EXTRA.get(short, '')}}}"
    space = (FINITE,) if short in EXHAUSTIVE else ()
    with studies.open(*sampler(options), *space) as (view,):
        drawn = play(view, 4)
        assert view.count(TrialState.COMPLETE) == 4
    assert all(params.keys() == {"optimizer.lr", "model.hidden"} for params in drawn)
    if short == "partial_fixed":
        assert {params["optimizer.lr"] for params in drawn} == {0.01}


@pytest.mark.parametrize("short", ["tpe", "cmaes", "qmc"])
def test_each_sampler_copes_with_a_conditional_space(studies: Studies, short: str) -> None:
    options = f"{{name: {short}, {EXTRA.get(short, '')}}}"
    with studies.open(*sampler(options), text=CONDITIONAL) as (view,):
        for params in play(view, 5):
            assert ("optimizer.momentum" in params) == (params["optimizer._target_"] == "torch.optim.SGD")


@pytest.mark.parametrize("short", ["tpe", "qmc"])
def test_one_worker_and_one_seed_draw_the_same_study_twice(studies: Studies, short: str) -> None:
    options = f"{{name: {short}, seed: 5, {EXTRA.get(short, '')}}}"
    with studies.open(*sampler(options), at="whole") as (view,):
        whole = play(view, 6)
    with studies.open(*sampler(options), at="parts", views=3) as views:
        # Three processes, one after another, of which one has drawn something else before.
        views[1].study.sampler.before_trial(views[1].study, views[0].study.ask().study.trials[0])
        views[0].storage.requeue(views[0].study.trials[0]._trial_id)
        assert [params for view in views for params in play(view, 2)] == whole


def test_hyperband_shows_a_sampler_the_same_trials_however_the_study_is_cut(studies: Studies) -> None:
    pruner = "study.pruner={name: hyperband, min_resource: 1, reduction_factor: 2}"
    options = "{name: tpe, seed: 1, n_startup_trials: 2}"
    with studies.open(*sampler(options), pruner, "trainer.max_epochs=8", at="whole") as (view,):
        whole = [prunable(view) for _ in range(8)]
    with studies.open(*sampler(options), pruner, "trainer.max_epochs=8", at="parts", views=4) as views:
        assert [prunable(view) for view in views for _ in range(2)] == whole


def prunable(view: OpenStudy) -> dict[str, Any]:
    trial, params = ask(view)
    trial.report(loss(params), 1)
    pruned = trial.should_prune()
    view.study.tell(trial, None if pruned else loss(params), TrialState.PRUNED if pruned else TrialState.COMPLETE)
    return params


def test_a_trials_startup_point_follows_from_seed_and_number_alone(studies: Studies) -> None:
    with studies.open(*sampler("{name: tpe, seed: 5}"), at="a") as (view,):
        first = play(view, 4)
    with studies.open(*sampler("{name: tpe, seed: 5}"), at="b", views=4) as views:
        assert [play(view, 1)[0] for view in views] == first
    with studies.open(*sampler("{name: tpe, seed: 6}"), at="c") as (view,):
        assert not points(play(view, 4)) & points(first)


@pytest.mark.parametrize("short", ["tpe", "random"])
def test_a_trial_lost_between_two_draws_gets_the_point_it_would_have_had(studies: Studies, short: str) -> None:
    options = sampler(f"{{name: {short}, seed: 5}}")
    with studies.open(*options, at="undisturbed") as (view,):
        whole = play(view, 1)
    with studies.open(*options, at="lost") as (view,):
        trial = view.study.ask()
        trial.suggest_float("optimizer.lr", 1e-3, 1e-1, log=True)
        view.storage.requeue(trial._trial_id)
        assert play(view, 1) == whole


@pytest.mark.parametrize("where", ["[]", "[model.hidden > 2]"])
@pytest.mark.parametrize("scheduler", ["asha", "freeze_thaw"])
def test_a_sampler_is_shown_the_study_for_a_trial_that_it_draws_alone(
    studies: Studies, monkeypatch: pytest.MonkeyPatch, scheduler: str, where: str
) -> None:
    shown = list[int]()

    def counted(study: optuna.Study, encoding: Any) -> optuna.Study:
        shown.append(len(study.get_trials(deepcopy=False)))
        return as_predicted(study, encoding)

    monkeypatch.setattr(samplers, "as_predicted", counted)
    options = (f"study.scheduler={scheduler}", f"where={where}")
    with studies.open(*sampler("{name: tpe, seed: 5}"), *options) as (view,):
        for number in range(3):
            shown.clear()  # by the try-out at the start, and by the trial before
            trial = begun(take(view))
            had = view.space.suggest(trial)
            assert shown == ([] if scheduler == "freeze_thaw" else [number + 1])  # its points are the scheduler's
            view.storage.requeue(trial._trial_id)
            again = begun(take(view))
            assert (again.number, view.space.suggest(again)) == (number, had)
            assert len(shown) == (scheduler != "freeze_thaw")
            view.study.tell(again, loss(had))


def begun(taken: Any) -> optuna.Trial:
    assert isinstance(taken, optuna.Trial)
    return taken


@pytest.mark.parametrize("short", ["tpe", "qmc"])
def test_four_workers_never_start_at_the_same_points(studies: Studies, short: str) -> None:
    options = f"{{name: {short}, seed: 1, {EXTRA.get(short, '')}}}"
    with studies.open(*sampler(options), views=4) as views:
        running = [ask(view) for _ in range(2) for view in views]
    assert len(points([params for _, params in running])) == 8


def test_workers_that_ask_qmc_at_the_same_time_share_no_point(studies: Studies) -> None:
    drawn: list[dict[str, Any]] = []
    with studies.open(*sampler("{name: qmc, seed: 1}"), views=4) as views:
        threads = [threading.Thread(target=lambda view=view: drawn.extend(play(view, 5))) for view in views]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(points(drawn)) == len(drawn) == 20


@pytest.mark.parametrize(
    ("short", "pruner"), [("grid", "none"), ("brute_force", "{name: hyperband, max_resource: 9}")]
)
def test_every_point_of_a_grid_comes_once(studies: Studies, short: str, pruner: str) -> None:
    with studies.open(*sampler(short), FINITE, f"study.pruner={pruner}", views=2) as views:
        views[0].storage.set_budget(views[0].study_id, 14)
        views[0].study.enqueue_trial({"optimizer.lr": 0.2, "model.hidden": 3})
        drawn = []
        for turn in range(14):
            view = views[turn % 2]
            if turn == 4:  # a trial that is put back takes its own point with it
                trial, params = ask(view)
                views[0 if view is views[0] else 1].storage.requeue(trial._trial_id)
                again, same = ask(views[1 - turn % 2])
                assert (again.number, same) == (trial.number, params)
                views[1 - turn % 2].study.tell(again, 1.0)
                drawn.append((again, params))
                continue
            if turn == 6:
                view.study.enqueue_trial({"optimizer.lr": 0.3, "model.hidden": 5})
            trial, params = ask(view)
            trial.report(1.0, 1)
            trial.should_prune()
            view.study.tell(trial, 1.0)
            drawn.append((trial, params))
        enqueued = {trial.number for trial in view.study.trials if "fixed_params" in trial.system_attrs}
        own = [params for trial, params in drawn if trial.number not in enqueued]
        assert len(own) == len(points(own)) == 12


def test_the_budget_of_a_grid_is_its_points_beside_what_was_enqueued(studies: Studies) -> None:
    with studies.open(*sampler("grid"), FINITE) as (view,):
        assert view.budget() == 12
        view.study.enqueue_trial({"optimizer.lr": 0.2, "model.hidden": 3})
        again = start_study(view.spec)
        assert again.budget() == 13
        again.storage.close()
        play(view, 13)
        with pytest.raises(BudgetExhaustedError):
            view.study.ask()


@pytest.mark.parametrize("read", ["get_all_trials", "get_study_user_attrs"])
def test_two_that_enqueue_at_once_at_a_grids_last_point_leave_it_to_the_grid(
    studies: Studies, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """The second one's trial comes right after something that the first one has read."""
    point = {"optimizer.lr": 0.2, "model.hidden": 3}
    with studies.open(*sampler("grid"), FINITE, views=2) as (view, other):
        drawn = play(view, 11)
        storage: Any = view.study._storage
        given = getattr(storage, read)

        def overtaken(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(storage, read, given)
            seen = given(*args, **kwargs)
            enqueue(other.spec, other.storage, other.study, point)
            return seen

        monkeypatch.setattr(storage, read, overtaken)
        enqueue(view.spec, view.storage, view.study, point)
        assert view.budget() == 14
        drawn += play(view, 3)
        assert len({tuple(params.values()) for params in drawn}) == 12


@pytest.mark.parametrize(("short", "choices"), [("grid", "[0.1, 0.2, 0.3]"), ("brute_force", "[[0.1], 0.01]")])
def test_the_baseline_is_one_of_a_grids_points(studies: Studies, short: str, choices: str) -> None:
    rates = f"optimizer.lr: {{type: categorical, choices: {choices}}}"
    steps = "model.hidden: {type: float, low: 0.1, high: 0.5, step: 0.1}"  # 0.1 + 2 * 0.1 is not 0.3
    space = f"search_space={{{rates}, {steps}}}"
    base = ("study.baseline=true", f"optimizer.lr={choices[1:].split(', ')[0]}", f"model.hidden={0.1 + 2 * 0.1}")
    with studies.open(*sampler(short), space, *base, views=2) as views:
        whole = 5 * len(views[0].space.params["optimizer.lr"].choices)
        assert views[0].budget() == whole
        drawn = []
        for turn in range(whole):
            trial, params = ask(views[turn % 2])
            views[turn % 2].study.tell(trial, 1.0)
            drawn.append(tuple(f"{value}"[:3] for value in params.values()))
        assert len(set(drawn)) == len(drawn)
        with pytest.raises(BudgetExhaustedError):
            views[0].study.ask()
    with studies.open(*sampler(short), space, *base) as (view,):
        assert view.budget() == whole


def test_an_open_place_in_an_enqueued_trial_is_an_error_of_that_trial(studies: Studies) -> None:
    with studies.open(*sampler("grid"), FINITE) as (view,):
        view.study.enqueue_trial({"optimizer.lr": 0.2})
        with pytest.raises(StudyError, match=r"no value for model\.hidden"):
            ask(view)


def test_the_order_of_a_grid_is_the_seeds(studies: Studies) -> None:
    spec = studies.spec("study.sampler=grid", FINITE)
    grid = SearchSpace.from_spec(spec).grid()
    one, two, other = (ExhaustiveSampler(grid, seed, {})._points for seed in (1, 1, 2))
    assert one == two != other
    assert len(one) == 12


@pytest.mark.parametrize(
    ("options", "path", "text"),
    [
        ("cmaes", "study.sampler.name", "allow_pickle: true"),
        (
            "{name: partial_fixed, fixed_params: {}, base_sampler: cmaes}",
            "study.sampler.base_sampler.name",
            "allow_pickle: true",
        ),
        ("{name: tpe, n_startup: 3}", "study.sampler.n_startup", "did you mean `n_startup_trials`?"),
        ("{name: tpee}", "study.sampler.name", "did you mean `tpe`?"),
        ("{name: partial_fixed, fixed_params: {}}", "study.sampler", "add `base_sampler: …`"),
        (
            "{name: partial_fixed, fixed_params: {}, base_sampler: 3}",
            "study.sampler.base_sampler",
            "{name: random}",
        ),
        (
            "{name: partial_fixed, fixed_params: {}, base_sampler: brute_force}",
            "study.sampler.base_sampler.name",
            "name it as the study's sampler",
        ),
        (
            "{name: partial_fixed, fixed_params: {optimizer.lrr: 0.01}, base_sampler: random}",
            "study.sampler.fixed_params",
            "did you mean `optimizer.lr`?",
        ),
        (
            "{name: partial_fixed, fixed_params: {optimizer.lr: 99}, base_sampler: random}",
            "study.sampler.fixed_params",
            "write a value from ",
        ),
        (
            "{name: partial_fixed, fixed_params: 3, base_sampler: random}",
            "study.sampler.fixed_params",
            "{optimizer.lr: 1e-3}",
        ),
        ("{name: qmc, qmc_type: nothing}", "study.sampler", "Optuna's documentation"),
        ("{name: grid, search_space: {}}", "study.sampler.search_space", "takes: "),
    ],
)
def test_what_does_not_fit_is_named_with_its_fix(tmp_path: Path, options: str, path: str, text: str) -> None:
    spec = load_spec(make_study(tmp_path), [f"study.sampler={options}"])
    with pytest.raises(InputError) as caught:
        make_sampler(spec, SearchSpace.from_spec(spec))
    assert caught.value.path == path
    assert text in caught.value.fix


def test_a_fixed_value_is_stored_as_the_space_has_it(studies: Studies) -> None:
    fixed = sampler("{name: partial_fixed, fixed_params: {model.hidden: [2, 3]}, base_sampler: random}")
    space = "search_space={model.hidden: {type: categorical, choices: [[2, 3], [4, 5]]}}"
    with studies.open(space, *fixed) as (view,):
        drawn = [ask(view)[1]["model.hidden"] for _ in range(3)]
        assert set(drawn) == {view.space.as_stored("model.hidden", [2, 3])}


@pytest.mark.full
@pytest.mark.parametrize(
    ("sampler", "pruner", "imported"),
    [
        ("curve_gp", "none", ["scipy.linalg", "scipy.optimize"]),
        (
            "{name: partial_fixed, fixed_params: {}, base_sampler: curve_gp}",
            "none",
            ["scipy.linalg", "scipy.optimize"],
        ),
        ("tpe", "median", ["scipy.linalg"]),  # its model is not fitted
        ("tpe", "none", []),
        ("random", "median", []),
    ],
)
def test_a_worker_imports_before_it_forks_what_each_draw_needs(
    tmp_path: Path, sampler: str, pruner: str, imported: list[str]
) -> None:
    file = make_study(tmp_path)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from hpo.config.spec import load_spec\n"
        "from hpo.storage.ledger import Owner\n"
        "from hpo.study.open_study import load_study, start_study\n"
        f"spec = load_spec(Path({str(file)!r}), ['study.sampler={sampler}', 'study.pruner={pruner}'])\n"
        "start_study(spec).storage.close()\n"
        "before = {*sys.modules}\n"
        "load_study(spec, Owner.current(worker='one')).storage.close()\n"
        "print(*sorted({'scipy.linalg', 'scipy.optimize'} & ({*sys.modules} - before)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert done.stdout.split() == imported


def test_tpe_looks_at_parameters_together_where_they_depend_on_each_other() -> None:
    number = optuna.distributions.FloatDistribution(0.0, 1.0)
    choice = optuna.distributions.CategoricalDistribution(["a", "b"])
    assert tpe_arguments({"x": number}, {}) == {"multivariate": False, "constant_liar": False}
    assert tpe_arguments({"x": number, "c": choice}, {}) == {}
    conditions = {"x": {"c": ["a"]}}
    assert tpe_arguments({"x": number, "c": choice}, conditions) == {"multivariate": True, "group": True}
