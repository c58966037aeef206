"""What torch's optimizers and schedulers refuse: said before anything runs, at its argument or its range."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpo.checks.checks import check_imports
from hpo.config.spec import load_spec
from hpo.errors import InputError
from tests.support.commands import hpo, make_study

pytestmark = pytest.mark.full

SGD = "optimizer={_target_: torch.optim.SGD, lr: 0.1}"
KINDS = "optimizer._target_: {type: categorical, choices: [torch.optim.AdamW, torch.optim.SGD]}"
OF_SGD = "when: {optimizer._target_: torch.optim.SGD}"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_study(tmp_path_factory.mktemp("built"))


def searched(path: str, entry: str) -> str:
    return f"search_space={{'{path}': {{{entry}}}}}"


def scheduler(name: str, arguments: str) -> str:
    return f"lr_scheduler={{_target_: torch.optim.lr_scheduler.{name}, {arguments}}}"


@pytest.mark.parametrize(
    ("overrides", "path", "value", "problem", "fix"),
    [
        (
            ["optimizer.weight_decay=-0.1"],
            "optimizer.weight_decay",
            "-0.1",
            "`torch.optim.AdamW` fails with this value: ValueError: Invalid weight_decay value: -0.1",
            "write a value that it takes; without the key it is 0.01",
        ),
        (
            [scheduler("CosineAnnealingLR", "T_max: 0")],
            "lr_scheduler.T_max",
            "0",
            "CosineAnnealingLR` fails with this value: ZeroDivisionError",
            "write a value that it takes",
        ),
        (
            [scheduler("CosineAnnealingLR", "T_max: trainer.max_epochs")],
            "lr_scheduler.T_max",
            "trainer.max_epochs",
            "fails with this value: TypeError",
            'write `T_max: "${trainer.max_epochs}"`',
        ),
        (
            [
                scheduler("CyclicLR", "base_lr: 0.1, max_lr: 1.0"),
                "optimizer._target_=torch.optim.Adagrad",
                searched("model.hidden", "type: int, low: 1, high: 2"),
            ],
            "lr_scheduler._target_",
            "torch.optim.lr_scheduler.CyclicLR",
            "fails with its arguments: ValueError",
            "correct the arguments beside it",
        ),
        (
            [searched("optimizer.lr", "type: float, low: -0.1, high: 0.1")],
            "search_space[optimizer.lr]",
            "-0.1",
            "Invalid learning rate",
            "narrow the range to values that it takes",
        ),
        (
            [searched("lr_scheduler.T_max", "type: int, low: 0, high: 3")],
            "search_space[lr_scheduler.T_max]",
            "0",
            "ZeroDivisionError",
            "narrow the range to values that it takes",
        ),
        (
            [searched("optimizer.eps", "type: categorical, choices: [1e-8, -1.0]")],
            "search_space[optimizer.eps]",
            "-1.0",
            "Invalid epsilon value",
            "leave this choice out",
        ),
        (
            [searched("optimizer.betas", "type: categorical, choices: [[0.9, 0.99], [0.9]]")],
            "search_space[optimizer.betas]",
            "[0.9]",
            "`torch.optim.AdamW` fails with this value: IndexError",
            "leave this choice out",
        ),
        (
            [
                SGD,
                f"search_space={{{KINDS}, optimizer.momentum: {{type: float, low: 0, high: -1, {OF_SGD}}}}}",
                "search_space[optimizer.momentum].low=-2",
            ],
            "search_space[optimizer.momentum]",
            "-2.0",
            "`torch.optim.SGD` fails with this value: ValueError: Invalid momentum value",
            "narrow the range to values that it takes",
        ),
    ],
)
def test_a_value_that_a_class_of_torch_refuses(
    file: Path, overrides: list[str], path: str, value: str, problem: str, fix: str
) -> None:
    with pytest.raises(InputError) as refused:
        check_imports(load_spec(file, overrides))
    error = refused.value
    assert problem in error.problem
    assert (error.path, error.value, error.fix) == (path, value, fix)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.betas=[0.9, 0.99]", searched("optimizer.betas[1]", "type: float, low: 0.9, high: 1.0")],
        # With momentum 0 alone it is refused.
        [
            SGD,
            searched("optimizer.nesterov", "type: categorical, choices: [true, false]"),
            "optimizer.momentum=0.9",
        ],
        [
            SGD,
            searched("optimizer.nesterov", "type: categorical, choices: [true, false]"),
            "search_space[optimizer.momentum]={type: float, low: 0, high: 0.9}",
        ],
        [searched("optimizer.lr", "type: float, low: -0.1, high: 0.1"), "where=['optimizer.lr > 0']"],
        [
            "optimizer={_target_: torch.optim.AdamW, groups: {layers: {lr: 0.1}}}",
            searched("model.hidden", "type: int, low: 1, high: 2"),
        ],
        [
            scheduler("OneCycleLR", "max_lr: 0.1, total_steps: '${trainer.total_steps}', interval: step"),
            searched("model.hidden", "type: int, low: 1, high: 2"),
        ],
        [scheduler("ReduceLROnPlateau", "patience: 2")],
        ["optimizer.capturable=true"],
    ],
)
def test_what_some_trial_may_use_is_not_refused(file: Path, overrides: list[str]) -> None:
    check_imports(load_spec(file, overrides))


def test_a_run_ends_with_it_before_its_first_trial(file: Path) -> None:
    said = hpo("run", file, "search_space[optimizer.lr]={type: float, low: -1.0, high: 0.1}", code=2).stderr
    assert "search_space[optimizer.lr]: `torch.optim.AdamW` fails with this value: ValueError" in said
    assert not (file.parent / "runs").exists()
