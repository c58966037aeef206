"""What is allowed and hardly meant: each warning at its place, and none where nothing is odd."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpo.checks import meaning
from hpo.checks.findings import Finding
from hpo.checks.meaning import check_meaning
from hpo.config.spec import load_spec
from hpo.errors import InputError
from tests.support.commands import make_study

STUDY = """
study:
  name: odd
  metric: val_loss
  n_trials: 40
data: {_target_: parts.load}
model: {_target_: parts.Net}
loss: {_target_: parts.Explode}
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
trainer: {max_epochs: 10}
search_space:
  optimizer.lr: {type: float, low: 1e-4, high: 1e-1, log: true}
  model.hidden: {type: int, low: 2, high: 8}
"""

FREEZE_THAW = "study.scheduler=freeze_thaw"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_study(tmp_path_factory.mktemp("odd"), STUDY)


def warned(file: Path, *overrides: str, search: bool = True) -> list[Finding]:
    return check_meaning(load_spec(file, overrides), search=search)


def pbt(arguments: str) -> str:
    return f"study.scheduler={{name: pbt, {arguments}}}"


def scheduler(name: str, arguments: str) -> str:
    return f"lr_scheduler={{_target_: torch.optim.lr_scheduler.{name}, {arguments}}}"


@pytest.mark.parametrize(
    ("overrides", "path", "problem"),
    [
        (["optimizer.lr=0.02"], "optimizer.lr", "has no effect on trials"),
        (
            ["study.epochs=40", "trainer.max_epochs=null", "trainer.max_steps=99"],
            "study.epochs",
            "trials train one after another",
        ),
        (["run.agents=2..8"], "run.agents", "no engine places agents"),
        ([FREEZE_THAW, "study.sampler.name=grid"], "study.sampler.name", "freeze_thaw proposes them itself"),
        (["run.resources.memory=16GiB"], "run.resources", "no engine places agents"),
        (["run.trial_memory=1KB"], "run.trial_memory", "torch alone takes more"),
        (["run.disk_quota=1KB"], "run.disk_quota", "no checkpoint fits"),
        (
            [scheduler("CosineAnnealingLR", "T_max: 20")],
            "lr_scheduler.T_max",
            "spans 20 epochs, and a trial has",
        ),
        ([scheduler("CosineAnnealingLR", "T_max: 9")], "lr_scheduler.T_max", "spans 9 epochs"),
        ([scheduler("OneCycleLR", "max_lr: 0.1, total_steps: 12")], "lr_scheduler.total_steps", "spans 12 epochs"),
        (
            [scheduler("OneCycleLR", "max_lr: 0.1, total_steps: 12, interval: step"), "trainer.max_steps=99"],
            "lr_scheduler.total_steps",
            "spans 12 steps, and a trial has 99",
        ),
        (
            [scheduler("CosineAnnealingLR", "T_max: 10, interval: step")],
            "lr_scheduler.T_max",
            "with `interval: step` these are 10 optimizer steps",
        ),
        ([scheduler("LinearLR", "total_iters: 11")], "lr_scheduler.total_iters", "never gets to its end"),
        ([scheduler("PolynomialLR", "total_iters: 11")], "lr_scheduler.total_iters", "never gets to its end"),
        ([scheduler("StepLR", "step_size: 10")], "lr_scheduler.step_size", "the learning rate never changes"),
        (
            [scheduler("ReduceLROnPlateau", "patience: 10")],
            "lr_scheduler.patience",
            "the learning rate never changes",
        ),
        (
            [scheduler("ReduceLROnPlateau", "patience: 2"), "study.metric=val_acc", "study.direction=maximize"],
            "lr_scheduler.mode",
            "the learning rate falls while `val_acc` gets better",
        ),
        (
            [scheduler("ReduceLROnPlateau", "patience: 2, mode: max")],
            "lr_scheduler.mode",
            "follows it, and the study has `direction: minimize`",
        ),
        (
            [scheduler("CosineAnnealingWarmRestarts", "T_0: 10")],
            "lr_scheduler.T_0",
            "the learning rate never restarts: 10 epochs",
        ),
        (
            [scheduler("CyclicLR", "base_lr: 0.01, max_lr: 0.1, step_size_up: 12")],
            "lr_scheduler.step_size_up",
            "never gets to max_lr",
        ),
        (
            [
                scheduler("CosineAnnealingLR", "T_max: 20"),
                "search_space={trainer.max_epochs: {type: int, low: 10, high: 30}}",
            ],
            "lr_scheduler.T_max",
            "spans 20 epochs in every trial, and their length is searched: trainer.max_epochs",
        ),
        (
            [
                scheduler("OneCycleLR", "max_lr: 0.1, total_steps: 300, interval: step"),
                "search_space={loader.batch_size: {type: categorical, choices: [16, 32]}}",
            ],
            "lr_scheduler.total_steps",
            "spans 300 steps in every trial, and their length is searched: loader.batch_size",
        ),
        (
            [scheduler("MultiStepLR", "milestones: [5, 10, 15]")],
            "lr_scheduler.milestones",
            r"never gets to \[10, 15\]",
        ),
        (
            [scheduler("ExponentialLR", "gamma: 0.9, warmup: 10")],
            "lr_scheduler.warmup",
            "takes the whole trial of 10",
        ),
        (
            ["callbacks={early_stopping: {patience: 10}}"],
            "callbacks.early_stopping.patience",
            "nothing stops early",
        ),
        (["callbacks={early_stopping: true}"], "callbacks.early_stopping.patience", "with patience 20"),
        (
            ["search_space[optimizer.lr].high=3.0"],
            "search_space[optimizer.lr]",
            "a learning rate of 3 diverges with",
        ),
        (["search_space[optimizer.lr].low=1e-9"], "search_space[optimizer.lr]", "of 1e-09 AdamW stands still"),
        (
            ["optimizer._target_=torch.optim.SGD", "search_space[optimizer.lr].high=11.0"],
            "search_space[optimizer.lr]",
            "11 diverges with SGD",
        ),
        (
            ["search_space={optimizer.lr: {type: categorical, choices: [1e-3, 5.0]}}"],
            "search_space[optimizer.lr]",
            "5 diverges",
        ),
        (
            ["optimizer.lr=30", "search_space={model.hidden: {type: int, low: 2, high: 8}}"],
            "optimizer.lr",
            "of 30 div",
        ),
        (["search_space[optimizer.lr].log=false"], "search_space[optimizer.lr]", "hardly ever tried"),
        (["search_space[model.hidden].high=2"], "search_space[model.hidden]", "has one value only"),
        (
            ["search_space={loader.batch_size: {type: categorical, choices: [32]}}"],
            "search_space[loader.batch_size]",
            "has one value only",
        ),
        (
            ["search_space={data.seed: {type: int, low: 1, high: 9999}}"],
            "search_space[data.seed]",
            "the best trial is the luckiest",
        ),
        (["study.sampler={name: tpe, n_startup_trials: 40}"], "study.sampler.n_startup_trials", "begins after 40"),
        (["study.sampler={name: gp, n_startup_trials: 41}"], "study.sampler.n_startup_trials", "drawn at random"),
        (
            ["study.pruner={name: median, n_startup_trials: 40}"],
            "study.pruner.n_startup_trials",
            "none of the 40 trials can be pruned",
        ),
        (
            ["study.pruner={name: median, n_warmup_steps: 10}"],
            "study.pruner.n_warmup_steps",
            "saves no epoch: a trial has 10",
        ),
        (
            ["study.pruner={name: predicted_loss, min_epochs: 12}"],
            "study.pruner.min_epochs",
            "pruning saves no epoch",
        ),
        (
            ["study.pruner={name: hyperband, min_resource: 10}"],
            "study.pruner.min_resource",
            "pruning saves no epoch",
        ),
        (
            ["study.sampler=grid", "search_space={model.hidden: {type: int, low: 2, high: 99}}"],
            "study.n_trials",
            "the grid has 98 points or more, and only 40",
        ),
        (["run.workers=41"], "run.workers", "there are 40 trials for 41 workers"),
        ([pbt("population: 40"), "study.pruner=none"], "study.n_trials", "the first 40 take all 40 trials"),
        ([pbt("population: 4"), "study.pruner=none", "run.workers=5"], "run.workers", "4 trials train at a time"),
        ([pbt("every: 10"), "study.pruner=none"], "study.scheduler.every", "no trial is forked: a trial has 10"),
        (
            ["run.trial_timeout=1h", "run.no_progress_timeout=2h"],
            "run.no_progress_timeout",
            "a trial is ended after 3600 s anyway",
        ),
        (["study.metric=val_accuracy", "study.direction=minimize"], "study.direction", "is better when larger"),
        (["study.direction=maximize"], "study.direction", "`val_loss` is better when smaller"),
        (
            ["callbacks={early_stopping: {monitor: val_accuracy, patience: 3}}"],
            "callbacks.early_stopping.monitor",
            "`val_accuracy` is better when larger",
        ),
        (
            ["callbacks={loss_prediction: {metric: train_loss, mode: max}}"],
            "callbacks.loss_prediction.metric",
            "`train_loss` is better when smaller",
        ),
        (
            ["study.scheduler={name: asha, first_rung: 99}", "study.pruner=none"],
            "study.scheduler.first_rung",
            "no trial pauses, so each trains to its end: it has 10 epochs",
        ),
        (
            ["study.scheduler={name: hyperband, first_rung: 10}", "study.pruner=none"],
            "study.scheduler.first_rung",
            "no trial pauses",
        ),
        (
            ["study.sampler={name: TPESampler, n_startup_trials: 40}"],
            "study.sampler.n_startup_trials",
            "at random",
        ),
    ],
)
def test_what_is_hardly_meant_is_warned_of_where_it_stands(
    file: Path, overrides: list[str], path: str, problem: str
) -> None:
    (found,) = warned(file, *overrides)
    assert found.path == path
    with pytest.raises(InputError, match=problem):
        raise InputError(found.problem)
    assert found.value
    assert found.fix
    assert found.file is not None


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [FREEZE_THAW, "study.sampler={name: random, seed: 3}"],
        ["optimizer.lr=0.02", "study.baseline=true"],
        ["callbacks={early_stopping: {monitor: val_accuracy, mode: max, patience: 3}}"],
        ["callbacks={early_stopping: {monitor: val_loss, patience: 3}}"],
        ["optimizer.weight_decay=0.02"],
        [scheduler("CosineAnnealingLR", '"T_max": "${trainer.max_epochs}"')],
        [scheduler("CosineAnnealingLR", "T_max: 7, warmup: 3")],
        [scheduler("CosineAnnealingLR", "T_max: 1000, interval: step")],
        [scheduler("OneCycleLR", "max_lr: 0.1, epochs: 10, steps_per_epoch: 3, interval: step")],
        [
            scheduler("OneCycleLR", "max_lr: 0.1, total_steps: '${trainer.total_steps}', interval: step"),
            "search_space={loader.batch_size: {type: categorical, choices: [16, 32]}}",
        ],
        [
            scheduler("CosineAnnealingLR", "T_max: '${trainer.max_epochs}'"),
            "search_space={trainer.max_epochs: {type: int, low: 10, high: 30}}",
        ],
        [
            scheduler("CosineAnnealingLR", "T_max: '${trainer.max_steps}', interval: step"),
            "trainer={max_steps: 40, validate_every: 8}",
            "search_space={loader.batch_size: {type: categorical, choices: [16, 32]}}",
        ],
        [scheduler("LinearLR", "total_iters: 5")],
        [scheduler("StepLR", "step_size: 9")],
        [scheduler("MultiStepLR", "milestones: [5, 9]")],
        [scheduler("ReduceLROnPlateau", "patience: 2")],
        [
            scheduler("ReduceLROnPlateau", "patience: 2, mode: max"),
            "study.metric=val_acc",
            "study.direction=maximize",
        ],
        [
            scheduler("ReduceLROnPlateau", "patience: 2"),
            "study.metric=val_acc",
            "study.direction=maximize",
            "search_space={lr_scheduler.mode: {type: categorical, choices: [min, max]}}",
        ],
        ["callbacks={early_stopping: {patience: 9}}"],
        ["callbacks={early_stopping: false}"],
        ["optimizer._target_=torch.optim.SGD", "search_space[optimizer.lr].high=9.0"],
        ["optimizer._target_=pytorch_optimizer.SPlus", "search_space[optimizer.lr].high=50.0"],
        ["search_space={model.hidden: {type: int, low: 1, high: 4096, step: 3}}"],
        ["search_space={model.hidden: {type: int, low: 0, high: 4096}}"],
        ["study.n_trials=3"],  # for a quick try, on the command line
        ["study.sampler=grid", "search_space={model.hidden: {type: int, low: 2, high: 8}}"],
        [
            "study.sampler=grid",
            "search_space={model.hidden: {type: int, low: 2, high: 99}}",
            "where=['model.hidden % 9 == 0']",
        ],
        [
            "study.sampler=grid",
            "search_space={loader.batch_size: {type: int, low: 2, high: 8}}",
            "search_space[model.hidden]={type: int, low: 2, high: loader.batch_size}",
        ],
        ["study.pruner={name: median, n_warmup_steps: 9}"],
        ["study.scheduler={name: asha, first_rung: 9}", "study.pruner=none"],
        ["study.scheduler={name: asha, first_rung: 2}", "study.pruner=none", "trainer.max_epochs=1"],
        ["run.workers=40"],
        ["run.trial_memory=1GB", "run.disk_quota=90kB", "run.agents=null", "run.resources={}"],
        ["run={on: 'slurm:partition=gpu', agents: 2..8, resources: {gpu: 1}}"],
        [
            "study.epochs=40",
            "trainer.max_epochs=null",
            "trainer.max_steps=99",
            "study.pruner=none",
            "study.scheduler=asha",
        ],
    ],
)
def test_nothing_is_said_where_nothing_is_odd(file: Path, overrides: list[str]) -> None:
    assert warned(file, *overrides) == []


def test_a_default_is_worth_a_word_where_the_file_itself_has_too_few_trials(tmp_path: Path) -> None:
    path = make_study(tmp_path, STUDY.replace("n_trials: 40", "n_trials: 5"))
    assert [(item.path, item.line) for item in warned(path)] == [("study.sampler", 1), ("study.pruner", 1)]
    assert "curve_gp begins after 8" in warned(path)[0].problem


def test_a_pruner_that_knows_the_trials_of_an_earlier_study_begins_with_them(file: Path) -> None:
    few = ("study.n_trials=4", "study.pruner={name: median, n_startup_trials: 5}")
    assert any("can be pruned" in item.problem for item in warned(file, *few))
    assert not any("can be pruned" in item.problem for item in warned(file, *few, "study.warm_start=first.yaml"))


def test_what_is_one_is_in_the_singular(file: Path) -> None:
    one = [
        "study.n_trials=1",
        "trainer.max_epochs=1",
        "callbacks={early_stopping: {patience: 2}}",
        "run.workers=2",
    ]
    said = [item.problem for item in warned(file, *one, "study.pruner={name: median, n_startup_trials: 2}")]
    assert "with patience 2 nothing stops early: a trial has 1 epoch" in said
    assert "there is 1 trial for 2 workers: the others have nothing to do" in said
    assert "the only trial can't be pruned: median begins after 2" in said


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("callbacks={early_stopping: {patience: 2}}", "let trials be longer, or leave `early_stopping` out"),
        (scheduler("StepLR", "step_size: 3"), "let trials be longer, or leave `lr_scheduler` out"),
        (scheduler("MultiStepLR", "milestones: [3]"), "let trials be longer, or leave `lr_scheduler` out"),
        (pbt("population: 4, every: 2"), "let trials be longer, or name another scheduler"),
    ],
)
def test_where_a_trial_has_one_epoch_no_fix_asks_for_less(file: Path, override: str, fix: str) -> None:
    found = warned(file, "trainer.max_epochs=1", "study.pruner=none", override)
    assert [item.fix for item in found] == [fix]


def test_a_single_training_hears_nothing_of_the_search(file: Path) -> None:
    odd = (
        "run.workers=99",
        "search_space[optimizer.lr].high=3.0",
        "study.sampler={name: tpe, n_startup_trials: 99}",
    )
    assert len(warned(file, *odd)) == 3
    assert warned(file, *odd, search=False) == []
    assert len(warned(file, *odd, "optimizer.lr=3.0", search=False)) == 1


def test_several_objectives_each_have_a_direction(file: Path) -> None:
    goals = "study={name: odd, pruner: none, objectives: {val_mae: maximize, parameters: minimize}}"
    (found,) = warned(file, goals)
    assert (found.path, found.value) == ("study.objectives.val_mae", "maximize")


def test_a_database_on_a_network_file_system(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meaning, "network_file_system", lambda url: "nfs4")
    (found,) = warned(file)
    assert found.path == "run.storage"
    assert found.problem.startswith("the database is on a network file system (nfs4): SQLite's log and locks")
    assert "postgresql://" in found.fix


def test_a_warning_reads_as_an_error_does(file: Path) -> None:
    path = make_study(file.parent / "again", STUDY.replace("log: true", "log: false"))
    (found,) = warned(path)
    assert str(found) == (
        f"{path}:11: search_space[optimizer.lr]: from 0.0001 to 0.1 in equal steps: small values are hardly ever "
        "tried\n  value: 0.0001 to 0.1\n  fix: add `log: true`"
    )


@pytest.mark.parametrize(
    ("override", "values", "shown"),
    [
        ("optimizer.lr=0.02", "0.001", "`search_space[optimizer.lr].low=…`"),
        ("model.hidden=4", "3", "`search_space[model.hidden].low=…`"),
        ("loader.batch_size=32", "[16]", "`search_space[loader.batch_size].choices=[…]`"),
    ],
)
def test_a_search_is_narrowed_by_what_its_parameter_has(
    file: Path, override: str, values: str, shown: str
) -> None:
    searched = "search_space[loader.batch_size]={type: categorical, choices: [16, 32]}"
    (found,) = (each for each in warned(file, searched, override) if "has no effect on trials" in each.problem)
    assert shown in found.fix
    narrowed = shown.strip("`").partition("=")[0] + "=" + values
    load_spec(file, [searched, narrowed])
