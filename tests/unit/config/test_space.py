"""The search space: ranges, conditions, grids; every value that any sampler draws lies in it."""

from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.trial import FixedTrial

from hpo.config.space import SearchSpace
from hpo.config.spec import load_spec
from hpo.errors import InputError

BASE: dict[str, Any] = {
    "study": {"name": "s"},
    "data": {"_target_": "data.load"},
    "model": {"_target_": "model.Net"},
    "loss": {"_target_": "torch.nn.MSELoss"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
}


def space_of(folder: Path, entries: dict[str, Any]) -> SearchSpace:
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump({**BASE, "search_space": entries}, sort_keys=False))
    return SearchSpace.from_spec(load_spec(path))


def choice(*choices: Any, **when: Any) -> dict[str, Any]:
    return {"type": "categorical", "choices": list(choices), **when}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("space")


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for at in range(draw(st.integers(1, 4))):
        low, width = draw(st.integers(1, 5)), draw(st.integers(0, 4))
        kind = draw(st.sampled_from(["int", "float", "categorical"]))
        entry: dict[str, Any] = {"type": kind}
        if kind == "categorical":
            entry["choices"] = [*range(low, low + width + 1), "text", None]
        else:
            entry |= {"low": low, "high": low + width}
            entry |= draw(st.sampled_from([{}, {"log": True}] if kind == "int" else [{"step": 0.25}, {"step": 1}]))
        switches = [path for path, other in found.items() if other["type"] == "categorical"]
        if switches and draw(st.booleans()):
            switch = draw(st.sampled_from(switches))
            entry["when"] = {switch: draw(st.sampled_from([found[switch]["choices"][0], ["text", None]]))}
        found[f"model.p{at}"] = entry
    # Any order in the file will do: conditions are sorted out.
    return {path: found[path] for path in draw(st.permutations(list(found)))}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=entries(), seed=st.integers(0, 99))
def test_what_is_suggested_lies_in_the_space(folder: Path, entries: dict[str, Any], seed: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = space_of(folder, entries)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    trial = study.ask()
    values = space.suggest(trial)
    assert values == trial.params
    assert space.contains(values)
    assert trial.distributions == {path: space.distributions[path] for path in values}
    assert set(space.params) == set(entries)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=entries())
def test_a_grid_holds_every_point_once(folder: Path, entries: dict[str, Any]) -> None:
    space = space_of(folder, entries)
    points = space.grid()
    assert points
    assert len({repr(sorted(point.items())) for point in points}) == len(points)
    for point in points[:50]:
        assert space.contains(point)
        assert space.suggest(FixedTrial(point)) == point
    free = {path for path, entry in entries.items() if "when" not in entry}
    sizes = {path: len({repr(point[path]) for point in points}) for path in free}
    for path in free:
        distribution = space.distributions[path]
        if isinstance(distribution, optuna.distributions.CategoricalDistribution):
            assert sizes[path] == len(distribution.choices)


def test_conditions_come_first_and_chain(folder: Path) -> None:
    space = space_of(
        folder,
        {
            "model.c": {"type": "int", "low": 1, "high": 2, "when": {"model.b": 1}},
            "model.b": choice(1, 2, when={"model.a": [True]}),
            "model.a": choice(True, False, 3),
        },
    )
    assert list(space.params) == ["model.a", "model.b", "model.c"]
    assert space.suggest(FixedTrial({"model.a": False})) == {"model.a": False}
    assert space.grid() == [
        {"model.a": True, "model.b": 1, "model.c": 1},
        {"model.a": True, "model.b": 1, "model.c": 2},
        {"model.a": True, "model.b": 2},
        {"model.a": False},
        {"model.a": 3},
    ]
    assert not space.contains({"model.a": False, "model.b": 1})
    assert not space.contains({"model.a": True, "model.b": 1})


def test_one_value_and_decimal_steps(folder: Path) -> None:
    space = space_of(
        folder,
        {
            "model.a": {"type": "float", "low": 0.1, "high": 0.4, "step": 0.1},
            "model.b": {"type": "float", "low": 2.0, "high": 2.0},
        },
    )
    assert [point["model.a"] for point in space.grid()] == [0.1, 0.2, 0.3, 0.4]
    assert {point["model.b"] for point in space.grid()} == {2.0}
    assert not space.contains({"model.a": 0.15, "model.b": 2.0})


def test_a_grid_needs_steps(folder: Path) -> None:
    space = space_of(folder, {"model.a": {"type": "float", "low": 0, "high": 1}})
    with pytest.raises(
        InputError, match=r"search_space\[model.a\]: the grid sampler needs a step here\n  fix: give it a step"
    ):
        space.grid()


def test_a_grid_has_its_limit(folder: Path) -> None:
    entry = {"type": "int", "low": 1, "high": 1001}
    space = space_of(folder, {"model.a": entry, "model.b": entry})
    with pytest.raises(InputError, match="too large"):
        space.grid()


def test_a_condition_on_the_config_that_holds(folder: Path) -> None:
    when = {"when": {"optimizer._target_": ["torch.optim.SGD", "torch.optim.Adam"]}}
    space = space_of(folder, {"optimizer.momentum": {"type": "float", "low": 0, "high": 0.9, **when}})
    assert space.active({}) == ["optimizer.momentum"]


def test_two_entries_name_two_values(folder: Path) -> None:
    space = {"optimizer.betas[0]": choice(0.8, 0.9), "optimizer.betas.0": choice(0.8, 0.9)}
    with pytest.raises(InputError, match=r"betas\.0\]: names the same value as `optimizer\.betas\[0\]`"):
        space_of(folder, {**space, "optimizer.betas": choice([0.9, 0.99])})


def test_a_condition_names_an_entry_as_the_search_space_does(folder: Path) -> None:
    space = {"optimizer.lr": choice(0.1, 0.2), "model.width": choice(1, 2, when={"optimizer[lr]": 0.1})}
    with pytest.raises(InputError, match=r"is searched as `optimizer\.lr`"):
        space_of(folder, space)


def test_entries_under_conditions_that_exclude_each_other_never_meet(folder: Path) -> None:
    space = space_of(
        folder,
        {
            "model.kind": choice("a", "b"),
            "model.deep": choice(1, 2, when={"model.kind": "a"}),
            "model.flat": choice(1, 2, when={"model.kind": ["b"]}),
            "model.inner": choice(1, 2, when={"model.deep": 2}),
        },
    )
    assert space.may_meet("model.inner", "model.kind", "a")
    assert not space.may_meet("model.inner", "model.kind", "b")
    assert space.may_meet("model.inner", "model.deep", 2)
    assert not space.may_meet("model.inner", "model.deep", 1)
    assert not space.may_meet("model.inner", "model.flat", 1)


@pytest.mark.parametrize("path", ["optimizer.betas[0]", "optimizer.betas.0", "model.inner.sizes[1]"])
def test_a_position_in_a_list_that_the_config_does_not_hold_is_refused(folder: Path, path: str) -> None:
    with pytest.raises(InputError, match="the config holds nothing at") as caught:
        space_of(folder, {path: {"type": "float", "low": 0.8, "high": 0.9}})
    assert caught.value.path == f"search_space[{path}]"
    with pytest.raises(InputError, match="the config holds nothing at"):
        load_spec(folder / "s.yaml", [f"{path}=0.8"])


def test_a_position_in_a_list_that_is_searched_whole_is_taken(folder: Path) -> None:
    sizes = {"model.sizes": choice([8, 8], [16, 16]), "model.sizes[0]": {"type": "int", "low": 1, "high": 4}}
    assert set(space_of(folder, sizes).params) == set(sizes)


def test_a_group_of_parameters_may_be_called_by_a_number(folder: Path) -> None:
    entries = {"optimizer.groups[0].lr": {"type": "float", "low": 0.8, "high": 0.9}}
    assert set(space_of(folder, entries).params) == set(entries)
