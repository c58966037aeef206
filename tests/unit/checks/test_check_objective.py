"""A function in place of the Trainer: which files are refused, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from hpo.checks.checks import all_that_is_wrong, check_imports, check_search, check_study
from hpo.checks.json_schema import study_schema
from hpo.config.spec import StudySpec, load_spec
from hpo.config.study_modules import forget_modules
from hpo.errors import InputError, each_error
from hpo.search.auto_sampler import chosen_sampler

CODE = """
class Kind:
    def __init__(self, lr): ...

class Called:
    def __init__(self, lr): ...
    def __call__(self, trial): ...

async def later(lr): ...

def yields(lr):
    yield 1.0

def nothing(): ...

def plain(lr): ...

def session(trial, lr, hidden=4): ...

def reports(trial, lr):
    trial.report(1, val_loss=lr)

class Model:
    def __init__(self, trial):
        self.width = trial.suggest_int("width", 1, 8)

def script(trial):
    return Model(trial).width

def other_name(t):
    return Model(t).width

def saves(trial):
    trial.report(Model(trial).width, 0)
    trial.save_checkpoint({})
"""
#: An Optuna script: it draws its parameters itself.
SCRIPT = """study: {name: own, direction: minimize}
objective: {_target_: loop.script}
"""
STUDY = """study: {name: own, pruner: none}
objective: {_target_: loop.session, lr: 0.1}
search_space:
  objective.lr: {type: float, low: 0.001, high: 0.5}
"""


def read(folder: Path, *overrides: str, text: str = STUDY) -> StudySpec:
    (folder / "loop.py").write_text(CODE)
    (folder / "study.yaml").write_text(text)
    return load_spec(folder / "study.yaml", overrides)


def check(folder: Path, *overrides: str) -> None:
    """As before a run."""
    check_all(read(folder, *overrides))


def check_all(spec: StudySpec) -> None:
    check_study(spec)
    check_search(spec)


def test_a_function_takes_the_place_of_the_trainers_sections(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert check_study(spec) == []
    assert spec.trainer.max_epochs is None
    assert read(tmp_path, "trainer.max_epochs=8").trainer.known_epochs == 8
    config = spec.resolve({"objective.lr": 0.2})
    assert (config["objective"]["lr"], config["data"], config["model"]) == (0.2, None, None)


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("data: {_target_: loop.load}", "data"),
        ("model: {_target_: loop.Net}", "model"),
        ("loss: {_target_: torch.nn.MSELoss}", "loss"),
        ("step: {_target_: loop.step}", "step"),
        ("optimizer: {_target_: torch.optim.SGD}", "optimizer"),
        ("lr_scheduler: {_target_: loop.f}", "lr_scheduler"),
        ("metrics: {mae: {_target_: loop.mae}}", "metrics"),
        ("callbacks: {early_stopping: true}", "callbacks"),
        ("loader: {batch_size: 8}", "loader"),
        ("trainer: {max_steps: 8}", "trainer.max_steps"),
        ("trainer: {precision: bf16}", "trainer.precision"),
    ],
)
def test_sections_of_the_trainer_are_refused_beside_it(tmp_path: Path, line: str, path: str) -> None:
    with pytest.raises(InputError, match="can't stand beside `objective`") as refused:
        read(tmp_path, text=f"{STUDY}{line}\n")
    assert (refused.value.path, refused.value.line) == (path, 5)
    assert refused.value.value
    assert "leave it out" in refused.value.fix


def test_all_that_is_refused_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data: can't stand .*\n(.*\n)*.* model: can't stand"):
        read(tmp_path, text=f"{STUDY}data: {{_target_: loop.load}}\nmodel: {{_target_: loop.Net}}\n")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["search_space={optimizer.lr: {type: float, low: 0.1, high: 1}}"], "names no argument of the function"),
        (["search_space={objective.wd: {type: float, low: 0.1, high: 1}}"], "takes no argument `wd`"),
        (["objective.wd=0.1"], "takes no argument `wd`"),
        (["objective.trial=1"], "objective.trial: is passed to `loop.session` anyway"),
        (["objective={_target_: loop.Kind, lr: 1}"], "is a class: a call of it trains nothing"),
        (["objective={_target_: loop.Called, lr: 1}"], "fix: write `objective = Called(…)` in its module"),
        (["objective={_target_: loop.later, lr: 1}"], "is a coroutine function"),
        (["objective={_target_: loop.yields, lr: 1}"], "is a generator function"),
        (["objective._partial_=true"], "is called, not bound"),
        (["objective._target_=loop.gone"], "objective._target_: `loop` has no `gone`"),
        (["objective._target_=loop.plain", "study.scheduler=asha"], "can't resume: it has no parameter `trial`"),
        (["study.pruner=hyperband"], "needs `max_resource`"),
        (["study.scheduler={name: pbt, population: 2, every: 2}"], "fix: name those that fit its checkpoint"),
    ],
)
def test_what_can_not_train_is_refused_before_anything_runs(
    tmp_path: Path, overrides: list[str], problem: str
) -> None:
    with pytest.raises(InputError) as refused:
        check(tmp_path, *overrides)
    assert problem in str(refused.value)


def test_a_function_that_takes_nothing_is_refused(tmp_path: Path) -> None:
    spec = read(tmp_path, text=SCRIPT.replace("script", "nothing"))
    with pytest.raises(InputError, match="takes no argument, and no `trial` either"):
        check_study(spec, search=False)


def refused_script(folder: Path, *overrides: str) -> InputError:
    spec = read(folder, *overrides, text=SCRIPT)
    with pytest.raises(InputError) as refused:
        check_all(spec)
    return refused.value


def test_a_script_needs_no_search_space_and_gets_a_metric_and_a_sampler(tmp_path: Path) -> None:
    spec = read(tmp_path, text=SCRIPT)
    assert check_study(spec) == []
    check_search(spec)
    assert (spec.defines_by_run, spec.study.metric, chosen_sampler(spec).name) == (True, "value", "tpe")
    assert spec.resolve({"width": 3})["params"] == {"width": 3}
    with pytest.raises(InputError, match=r"study.direction: required key is missing") as refused:
        read(tmp_path, text=SCRIPT.replace(", direction: minimize", ""))
    assert "for `value`" in refused.value.fix


@pytest.mark.parametrize(
    ("overrides", "path", "problem"),
    [
        (
            ["objective._target_=loop.other_name"],
            "objective._target_",
            "draws its parameters, and takes no `trial`",
        ),
        (["objective={_target_: loop.plain, lr: 1}"], "search_space", "there is nothing to search"),
        (["objective._target_=loop.nothing"], "objective._target_", "takes no argument, and no `trial` either"),
        (
            ["search_space={objective.x: {type: int, low: 1, high: 2}}"],
            "search_space",
            "`loop.script`, which draws",
        ),
        (["study.sampler=curve_gp"], "study.sampler.name", "needs a search space"),
        (
            ["study.sampler={name: partial_fixed, fixed_params: {x: 1}, base_sampler: curve_gp}"],
            "study.sampler.base_sampler.name",
            "needs a search space",
        ),
        (["study.sampler=grid"], "study.sampler.name", "needs a search space"),
        (["study.sampler=GRID"], "study.sampler.name", "needs a search space"),
        (["study.sampler=CurveGPSampler"], "study.sampler.name", "needs a search space"),
        (["study.scheduler=freeze_thaw"], "study.scheduler.name", "needs a search space"),
        (["study.scheduler=pbt"], "study.scheduler.name", "needs a search space"),
        (["study.baseline=true"], "study.baseline", "needs a search space"),
        (["study.duplicates=reuse"], "study.duplicates", "needs a search space"),
        (
            ["study.sampler={name: tpe, n_startup_trials: few}"],
            "study.sampler.n_startup_trials",
            "must be a whole number",
        ),
    ],
)
def test_what_a_script_can_not_have_is_refused_before_anything_runs(
    tmp_path: Path, overrides: list[str], path: str, problem: str
) -> None:
    error = refused_script(tmp_path, *overrides)
    assert error.path == path
    assert problem in error.problem
    assert error.fix


def test_a_search_space_beside_a_script_is_refused_at_its_line(tmp_path: Path) -> None:
    spec = read(tmp_path, text=f"{SCRIPT}search_space:\n  objective.width: {{type: int, low: 1, high: 8}}\n")
    with pytest.raises(InputError, match="can't stand beside") as refused:
        check_study(spec)
    assert (refused.value.line, refused.value.path) == (3, "search_space")


def test_a_script_that_searches_when_it_is_imported_is_not_imported(tmp_path: Path) -> None:
    spec = read(tmp_path, "objective._target_=bare.objective", text=SCRIPT)
    code = "import optuna\ndef objective(trial):\n    return trial.suggest_float('x', 0, 1)\n{}"
    bare = tmp_path / "bare.py"
    bare.write_text(code.format("if True:\n    optuna.create_study().optimize(objective, n_trials=1)\n"))
    with pytest.raises(InputError, match="runs a search of its own when it is imported") as refused:
        check_study(spec)
    assert (refused.value.file, refused.value.line) == (bare, 5)
    forget_modules(tmp_path)
    guarded = "if __name__ == '__main__':\n    optuna.create_study().optimize(objective, n_trials=1)\n"
    bare.write_text(code.format(guarded))
    assert check_study(spec) == []


@pytest.mark.parametrize(
    ("target", "overrides", "problem"),
    [
        ("script", ["study.pruner=median"], "has no effect: `loop.script` reports no epochs"),
        ("saves", ["study.pruner=median"], None),
        ("script", ["study.scheduler=asha"], "calls no `trial.save_checkpoint(…)`"),
        ("saves", ["study.scheduler=asha"], None),
        ("script", [], None),
    ],
)
def test_a_pruner_or_scheduler_without_effect_is_a_warning(
    tmp_path: Path, target: str, overrides: list[str], problem: str | None
) -> None:
    spec = read(tmp_path, f"objective._target_=loop.{target}", *overrides, text=SCRIPT)
    found = [each.problem for each in check_imports(spec)]
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_a_pruner_of_a_function_that_only_returns_a_value_is_a_warning(tmp_path: Path) -> None:
    spec = read(tmp_path, "objective._target_=loop.plain", "study.pruner=median")
    (found,) = check_imports(spec)
    assert "has no effect: `loop.plain` reports no epochs, so none of its trials is pruned" in found.problem


@pytest.mark.parametrize("objective", ["loop.script", "{lr: 1}"])
def test_an_objective_that_names_nothing_is_no_study_of_the_trainer(tmp_path: Path, objective: str) -> None:
    text = SCRIPT.replace("{_target_: loop.script}", objective)
    with pytest.raises(InputError) as refused:
        read(tmp_path, text=text)
    said = all_that_is_wrong(tmp_path / "study.yaml", (), refused.value)
    assert [each.path.partition(".")[0] for each in each_error(said)] == ["objective"]


def test_a_space_whose_only_parameter_is_wrong_is_not_said_to_be_empty_too(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        read(tmp_path, text=STUDY.replace("type: float, ", ""))
    said = all_that_is_wrong(tmp_path / "study.yaml", (), refused.value)
    assert [each.path for each in each_error(said)] == ["search_space[objective.lr].type"]


def test_an_editor_takes_a_function_or_the_trainers_sections() -> None:
    validator = Draft202012Validator(study_schema())
    assert validator.is_valid(yaml.safe_load(STUDY))
    assert not validator.is_valid(yaml.safe_load(f"{STUDY}model: {{_target_: loop.Net}}\n"))
    assert not validator.is_valid({"study": {"name": "own"}})
