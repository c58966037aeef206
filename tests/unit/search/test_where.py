"""No trial violates `where`: whatever sampler draws it, whatever scheduler starts it, whatever was given."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec, load_spec
from hpo.errors import InputError, StudyError
from hpo.search.samplers import SAMPLERS, make_sampler
from hpo.search.schedulers.by_name import make_scheduler
from hpo.search.schedulers.pbt.perturbation import perturbed
from hpo.search.schedulers.scheduler import Fork, New, Standing
from hpo.search.schedulers.seen import Seen
from hpo.search.valid_points import check_where
from tests.support.standings import grown

pytestmark = pytest.mark.full

BASE: dict[str, Any] = {
    "study": {"name": "s", "metric": "val_loss", "direction": "minimize"},
    "data": {"_target_": "data.load"},
    "model": {"_target_": "model.Net", "a": 1},
    "loss": {"_target_": "torch.nn.MSELoss"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
}
#: In an order that leaves a tenth of the space.
SPACE: dict[str, Any] = {
    "model.a": {"type": "int", "low": 1, "high": 64},
    "model.b": {"type": "int", "low": 1, "high": "model.a", "log": True},
    "model.kind": {"type": "categorical", "choices": ["flat", [8, 16], None]},
    "model.c": {"type": "float", "low": 0.0, "high": 1.0, "when": {"model.kind": "flat"}},
    "optimizer.lr": {"type": "float", "low": 1e-4, "high": 0.1, "log": True},
}
WHERE = ["model.a % model.b == 0", "model.c * 100 <= model.a", "model.kind != null or optimizer.lr < 1e-3"]
FINITE: dict[str, Any] = {
    "model.a": {"type": "int", "low": 1, "high": 6},
    "model.b": {"type": "int", "low": 1, "high": 6},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return tmp_path_factory.mktemp("where")


def spec_of(folder: Path, entries: Any, where: list[str], **study: Any) -> StudySpec:
    path = folder / "s.yaml"
    data = {**BASE, "study": {**BASE["study"], **study}, "search_space": entries, "where": where}
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return load_spec(path)


def sampler_node(name: str) -> dict[str, Any]:
    more: dict[str, Any] = {
        "cmaes": {"allow_pickle": True},
        "partial_fixed": {"fixed_params": {"model.a": 4}},
    }.get(name, {})
    if name == "partial_fixed":
        more["base_sampler"] = "tpe"
    if name in ("tpe", "gp", "curve_gp", "cmaes"):
        more["n_startup_trials"] = 3
    return {"name": name, "seed": 3, **more}


def loss_of(params: Mapping[str, Any]) -> float:
    return (params["model.a"] - 40) ** 2 / 1000 + 1 / params["model.b"] + params.get("model.c", 0.5)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if name == "gp" else [])
        for name in SAMPLERS
        if name not in ("grid", "brute_force", "nsgaiii")
    ],
)
def test_no_sampler_draws_a_point_that_violates_it(folder: Path, name: str) -> None:
    spec = spec_of(folder, SPACE, WHERE, sampler=sampler_node(name))
    space = SearchSpace.from_spec(spec)
    with warnings.catch_warnings(action="ignore"):  # experimental samplers
        study = optuna.create_study(sampler=make_sampler(spec, space))
        study.enqueue_trial({"model.b": 32})
        for _ in range(6 if name == "gp" else 25):
            trial = study.ask()
            params = space.suggest(trial)
            assert space.contains(params)
            assert space.violated(params) is None, params
            study.tell(trial, loss_of(params))
    assert study.trials[0].params["model.b"] == 32
    if name == "partial_fixed":
        assert {trial.params["model.a"] for trial in study.trials[1:]} == {4}


def test_where_hardly_a_point_is_left_the_model_finds_one(folder: Path) -> None:
    """All that was moved about from a point may violate it."""
    space = {"model.a": {"type": "int", "low": 8, "high": 256}, "model.b": {"type": "int", "low": 16, "high": 512}}
    spec = spec_of(folder, space, ["model.b == 2 * model.a"], sampler=sampler_node("curve_gp"))
    points = SearchSpace.from_spec(spec)
    study = optuna.create_study(sampler=make_sampler(spec, points))
    for _ in range(20):
        trial = study.ask()
        params = points.suggest(trial)
        assert points.violated(params) is None
        study.tell(trial, loss_of(params))


@pytest.mark.parametrize("name", ["grid", "brute_force", "tpe", "random", "auto"])
def test_every_point_of_a_finite_space_that_satisfies_it_comes_once(folder: Path, name: str) -> None:
    spec = spec_of(folder, FINITE, ["model.a % model.b == 0"], sampler={"name": name, "seed": 0})
    space = SearchSpace.from_spec(spec)
    wanted = {(a, b) for a, b in itertools.product(range(1, 7), repeat=2) if a % b == 0}
    study = optuna.create_study(sampler=make_sampler(spec, space))
    drawn = []
    for _ in wanted:
        trial = study.ask()
        params = space.suggest(trial)
        drawn.append((params["model.a"], params["model.b"]))
        study.tell(trial, float(params["model.a"]))
    assert sorted(drawn) == sorted(wanted)
    if name not in ("grid", "brute_force"):  # and then one of them again
        trial = study.ask()
        assert tuple(space.suggest(trial).values()) in wanted


def test_random_points_are_even_among_those_that_satisfy_it(folder: Path) -> None:
    """The share of each value is that of the points which have it, counted by hand."""
    entries = {name: {"type": "int", "low": 1, "high": 40} for name in ("model.a", "model.b", "model.c")}
    spec = spec_of(
        folder, entries, ["model.a < model.b < model.c"], sampler={"name": "random", "seed": 1}, duplicates="allow"
    )
    space = SearchSpace.from_spec(spec)
    study = optuna.create_study(sampler=make_sampler(spec, space))
    drawn = [space.suggest(study.ask())["model.b"] for _ in range(300)]
    weights = np.array([(b - 1) * (40 - b) for b in range(1, 41)], dtype=float)
    mean = float(np.average(np.arange(1, 41), weights=weights))
    assert abs(np.mean(drawn) - mean) < 4 * np.std(drawn) / np.sqrt(len(drawn))
    spread = float(np.sqrt(np.average((np.arange(1, 41) - mean) ** 2, weights=weights)))
    assert abs(np.std(drawn) / spread - 1) < 0.16


def test_a_trial_that_was_lost_while_it_drew_keeps_what_it_has(folder: Path) -> None:
    spec = spec_of(folder, SPACE, WHERE, sampler={"name": "tpe", "seed": 0})
    space = SearchSpace.from_spec(spec)
    study = optuna.create_study(sampler=make_sampler(spec, space))
    trial = study.ask()
    first = trial.suggest_int("model.a", 1, 64)
    again = optuna.load_study(
        study_name=study.study_name, storage=study._storage, sampler=make_sampler(spec, space)
    )
    resumed = optuna.Trial(again, trial._trial_id)
    params = space.suggest(resumed)
    assert params["model.a"] == first
    assert space.violated(params) is None


@st.composite
def spaces(draw: st.DrawFn) -> tuple[dict[str, Any], list[str]]:
    names = [f"model.p{at}" for at in range(draw(st.integers(2, 4)))]
    entries: dict[str, Any] = {}
    for at, name in enumerate(names):
        kind = draw(st.sampled_from(["int", "float", "choice", "bound"]))
        if kind == "choice":
            entries[name] = {"type": "categorical", "choices": draw(st.permutations([1, 2, 4, 8]))}
        elif kind == "bound" and at:
            entries[name] = {"type": "float", "low": 0.5, "high": f"{names[at - 1]} + 1"}
        else:
            entries[name] = {"type": "float" if kind == "float" else "int", "low": 1, "high": 9}
    pair = st.tuples(st.sampled_from(names), st.sampled_from(["<=", "<", "!="]), st.sampled_from(names))
    where = draw(st.lists(pair.map(" ".join), max_size=3))
    where += draw(
        st.sampled_from([[], [f"{names[0]} * {names[1]} <= 12"], [f"{names[0]} in [1, 2, 3] or {names[1]} > 3"]])
    )
    return entries, where


@pytest.mark.full
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=spaces(), name=st.sampled_from(["tpe", "random", "curve_gp", "nsgaii", "qmc", "auto"]), data=st.data()
)
def test_no_trial_of_any_space_violates_it(folder: Path, drawn: Any, name: str, data: st.DataObject) -> None:
    spec = spec_of(
        folder, *drawn, sampler={"name": name, "seed": data.draw(st.integers(0, 9))}, n_trials=40, epochs=200
    )
    space = SearchSpace.from_spec(spec)
    try:
        share = check_where(spec, space)
    except InputError:  # no point does
        assume(False)
    assert 0 <= share <= 1
    study = optuna.create_study(sampler=make_sampler(spec, space))
    for number in range(6):
        trial = study.ask()
        params = space.suggest(trial)
        assert space.contains(params)
        assert space.violated(params) is None, (params, space.where)
        study.tell(trial, float(number % 5))
    points = [trial.params for trial in study.trials]
    for scheduler in ("freeze_thaw", "pbt"):
        _no_grant_violates(
            spec_of(folder, *drawn, scheduler=_scheduler(scheduler, drawn[0]), pruner="none", epochs=200), points
        )


def _scheduler(name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name} if name == "freeze_thaw" else {"name": name, "perturb": list(entries), "every": 1}


def _no_grant_violates(spec: StudySpec, points: list[dict[str, Any]]) -> None:
    space, scheduler = SearchSpace.from_spec(spec), make_scheduler(spec)
    trials = [
        Seen(at, point, {1: float(at), 2: float(-at)}, "paused", 2, ("breadth",))
        for at, point in enumerate(points)
    ]
    standing = Standing(
        read=lambda: trials,
        space=space.distributions,
        conditions=space.conditions,
        where=space.where,
        horizon=9,
        n_epochs=200,
    )
    if spec.study.scheduler is not None and spec.study.scheduler.name == "pbt":
        rng = np.random.default_rng(0)
        for point in points:
            new = perturbed(point, space.distributions, list(point), rng, resample=0.5, where=space.where)
            assert space.violated(new) is None
            assert space.contains(new)
        found = scheduler.next(standing)
        answers: list[Any] = [found]
    else:
        standing, answers = grown(
            scheduler, standing, lambda params, epoch: sum(map(hash, params)) % 7 / epoch, most=6
        )
    granted = [each.params for each in answers if isinstance(each, New | Fork) and each.params is not None]
    assert all(space.violated(params) is None for params in granted)


@pytest.mark.parametrize(
    ("where", "said", "fix"),
    [
        (
            "model.a > model.b + 70",
            "none of 22,000 points of the search space satisfies this",
            "loosen a condition",
        ),
        ("optimizer.lr == model.a / 999", "none of", "two real numbers are never equal"),
        (
            "model.kind < 3",
            r"can't be computed where model.kind = (flat|\[8, 16\]|null): .* is not a number",
            "compare like with like",
        ),
    ],
)
def test_a_space_without_a_point_is_refused_before_anything_runs(
    folder: Path, where: str, said: str, fix: str
) -> None:
    spec = spec_of(folder, SPACE, [where])
    with pytest.raises(InputError, match=rf"where(\[0\])?: {said}") as caught:
        check_where(spec, SearchSpace.from_spec(spec))
    assert fix in str(caught.value)


def test_values_that_leave_no_point_end_the_trial_with_a_reason(folder: Path) -> None:
    spec = spec_of(folder, SPACE, WHERE, sampler={"name": "random"})
    space = SearchSpace.from_spec(spec)
    study = optuna.create_study(sampler=make_sampler(spec, space))
    study.enqueue_trial({"model.a": 7, "model.b": 3})
    with pytest.raises(StudyError, match=r"none of 100,000 points with model.a=7, model.b=3 satisfies `where`"):
        space.suggest(study.ask())
