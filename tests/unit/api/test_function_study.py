"""A function given to `hpo.run`: the study file that it becomes, and what is refused."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

import hpo
from hpo.api.function_study import study_of_function


def train(lr: float, hidden: int = 4, scale: float = 1.0) -> float:
    return lr * hidden * scale


def objective(trial: Any) -> float:
    return float(trial.suggest_float("x", 0, 1))


class Called:
    def __call__(self, trial: Any) -> float:
        return objective(trial)


CALLED = Called()
SPACE = {"lr": hpo.Float(1e-3, 1.0, log=True), "hidden": hpo.Int(1, 8)}


def written(function: Any, **given: Any) -> dict[str, Any]:
    return dict(yaml.safe_load(study_of_function(function, **given).yaml()))


def test_a_function_becomes_a_study_file_of_its_own() -> None:
    config = written(train, search_space=SPACE, metric="score", direction="maximize", n_trials=3)
    study = {"name": "test_function_study-train", "metric": "score", "direction": "maximize", "n_trials": 3}
    assert config["study"] == study
    assert config["objective"] == {"_target_": f"{__name__}.train"}
    assert config["search_space"] == {
        "objective.lr": {"type": "float", "low": 0.001, "high": 1.0, "log": True},
        "objective.hidden": {"type": "int", "low": 1, "high": 8},
    }
    assert study_of_function(train).folder == Path(__file__).parents[3]
    assert written(objective, direction="minimize").keys() == {"study", "objective"}
    assert written(train, name="other")["study"] == {"name": "other"}


@pytest.mark.parametrize("function", [hpo.Call(train, scale=2.0), functools.partial(train, scale=2.0)])
def test_its_further_arguments_are_kept(function: Any) -> None:
    assert written(function, search_space=SPACE)["objective"] == {"_target_": f"{__name__}.train", "scale": 2.0}


def test_conditions_name_arguments_too() -> None:
    space = {"kind": hpo.Categorical(["a", "b"]), "objective.lr": hpo.Float(0.1, 1.0, when={"kind": "a"})}
    entries = written(train, search_space=space)["search_space"]
    assert list(entries) == ["objective.kind", "objective.lr"]
    assert entries["objective.lr"]["when"] == {"objective.kind": "a"}


def test_the_script_that_runs_is_imported_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "tune.py")
    exec("def fit(lr):\n    return lr\n", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    study = study_of_function(main.fit)
    assert (study.name, study.folder) == ("tune-fit", tmp_path)
    assert yaml.safe_load(study.yaml())["objective"] == {"_target_": "tune.fit"}
    del main.__file__
    with pytest.raises(hpo.InputError, match="is defined in a notebook or an interactive session") as refused:
        study_of_function(main.fit).yaml()
    assert "%%writefile" in refused.value.fix


@pytest.mark.parametrize(
    ("function", "given", "problem"),
    [
        (lambda lr: lr, {}, "is a lambda, so workers can't import it"),
        (3, {}, "is an object of int"),
        (torch.nn.Linear, {}, "is an object of type"),
        ("study.yaml", {"metric": "loss"}, "metric: can't stand beside a study"),
        (train, {"direction": "minimize"}, "there is nothing to search"),
        (objective, {}, "study.direction: required key is missing"),
        (objective, {"direction": "minimize", "search_space": {"x": hpo.Float(0.0, 1.0)}}, "can't stand beside"),
        (objective, {"direction": "minimize", "samplr": "tpe"}, "study.samplr: unknown key"),
    ],
)
def test_what_is_no_study_is_refused_before_anything_runs(
    function: Any, given: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hpo.InputError, match=problem):
        hpo.run(function, n_trials=1, metric=given.pop("metric", None), **given)
    assert not list(tmp_path.iterdir())


def test_an_object_that_is_called_is_named_in_a_study_file() -> None:
    with pytest.raises(hpo.InputError, match="is an object of Identity") as refused:
        hpo.run(torch.nn.Identity(), direction="minimize", n_trials=1)
    assert refused.value.fix == "give a function that calls it, or name it as `objective` in a study file"
    with pytest.raises(hpo.InputError, match="objective: is an object of Identity") as refused:
        hpo.Study("called", objective=torch.nn.Identity()).yaml()
    assert refused.value.fix == "give a function that calls it, or name it as `objective` in a study file"


@pytest.mark.parametrize(("name", "guess"), [("worker", "workers"), ("trials", "n_trials"), ("pruner", "")])
def test_an_argument_that_is_misspelt_is_told_the_one_that_is_meant(name: str, guess: str) -> None:
    with pytest.raises(hpo.InputError, match=f"{name}: can't stand beside a study") as refused:
        hpo.run("study.yaml", **{name: 2})
    assert refused.value.fix.startswith(f"did you mean `{guess}`?" if guess else "write it into the study")


def test_a_function_inside_a_function_is_refused() -> None:
    def inner(lr: float) -> float:
        return lr

    with pytest.raises(hpo.InputError, match="is made inside a function") as refused:
        hpo.run(inner, search_space=SPACE)
    assert "top level of a module" in refused.value.fix
