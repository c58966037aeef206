"""Schedules that can't do what a study file says: refused at their place, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpo.checks.checks import check_imports
from hpo.checks.schedule_errors import check_schedule
from hpo.config.spec import StudySpec, load_spec
from hpo.errors import InputError
from hpo.trial.builder import Builder
from tests.support.commands import hpo, make_study

STUDY = """
study: {name: odd, metric: val_loss, n_trials: 4}
data: {_target_: parts.load}
loader: {batch_size: 16}
model: {_target_: parts.Net}
loss: {_target_: parts.Explode}
optimizer: {_target_: torch.optim.SGD, lr: 1e-2, momentum: 0.9}
trainer: {max_epochs: 5}
search_space:
  optimizer.lr: {type: float, low: 1e-4, high: 1e-1, log: true}
"""
CYCLE = "cycle_momentum: false, base_lr: 1e-3"
TYPES = "lr_scheduler._target_: {type: categorical, choices: [torch.optim.lr_scheduler.StepLR, %s]}"
LR = "optimizer.lr: {type: float, low: 1e-4, high: 1e-1}"
WHOLE = "search_space.lr_scheduler={type: categorical, choices: [null, {_target_: %s}]}"
ONE_CYCLE, PLATEAU = "torch.optim.lr_scheduler.OneCycleLR", "torch.optim.lr_scheduler.ReduceLROnPlateau"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_study(tmp_path_factory.mktemp("odd"), STUDY)
    (path.parent / "own.py").write_text(
        "from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau\n"
        "class Patient(ReduceLROnPlateau): pass\n"
        "class Cycle(OneCycleLR): pass\n"
        "def step(model, batch): ...\n"
        "def telling(model, batch): ...\n"
        "telling.records = ('kl',)\n"
        "from trainer import Callback\n"
        "class Follows(Callback):\n"
        "    reads = ('val_f1',)\n"
    )
    return path


def spec_of(file: Path, *overrides: str) -> StudySpec:
    return load_spec(file, overrides)


def scheduler(name: str, arguments: str) -> str:
    return f"lr_scheduler={{_target_: torch.optim.lr_scheduler.{name}, {arguments}}}"


@pytest.mark.parametrize(
    ("overrides", "path", "problem"),
    [
        ([scheduler("ReduceLROnPlateau", "interval: step")], "lr_scheduler.interval", "a metric of a whole epoch"),
        (
            ["lr_scheduler={_target_: own.Patient, interval: step}"],
            "lr_scheduler.interval",
            "Patient follows a metric",
        ),
        (
            [scheduler("StepLR", "step_size: 1, interval: step"), f"search_space={{{TYPES % PLATEAU}}}"],
            "lr_scheduler.interval",
            "with lr_scheduler._target_ torch.optim.lr_scheduler.ReduceLROnPlateau",
        ),
        (
            [
                scheduler("ReduceLROnPlateau", "patience: 1"),
                "search_space={lr_scheduler.interval: {type: categorical, choices: [epoch, step]}}",
            ],
            "search_space[lr_scheduler.interval]",
            "a metric of a whole epoch",
        ),
        (
            [scheduler("OneCycleLR", "max_lr: 0.1, total_steps: 5")],
            "search_space[optimizer.lr]",
            "searched without effect: OneCycleLR sets it from `max_lr`",
        ),
        (
            [
                scheduler("OneCycleLR", "max_lr: 0.1, total_steps: 5"),
                "optimizer.groups={layers: {lr: 0.1}}",
                "search_space={optimizer.groups.layers.lr: {type: float, low: 0.1, high: 1.0}}",
            ],
            "search_space[optimizer.groups.layers.lr]",
            "searched without effect: OneCycleLR sets it from `max_lr`",
        ),
        (
            ["lr_scheduler={_target_: own.Cycle, max_lr: 0.1, total_steps: 5}"],
            "search_space[optimizer.lr]",
            "searched without effect: Cycle sets it",
        ),
        (
            [scheduler("OneCycleLR", "_args_: [0.1], total_steps: 5")],
            "search_space[optimizer.lr]",
            "searched without effect",
        ),
        (
            [scheduler("CyclicLR", f"max_lr: 0.1, {CYCLE}")],
            "search_space[optimizer.lr]",
            "CyclicLR sets it from `base_lr` and `max_lr`",
        ),
        (
            [scheduler("StepLR", "step_size: 1"), f"search_space={{{TYPES % ONE_CYCLE}, {LR}}}"],
            "search_space[optimizer.lr]",
            "searched without effect",
        ),
        (
            [
                scheduler("OneCycleLR", "max_lr: 0.1, total_steps: 5"),
                "search_space={optimizer.momentum: {type: float, low: 0.1, high: 0.9}}",
            ],
            "search_space[optimizer.momentum]",
            "sets it from `base_momentum` and `max_momentum`",
        ),
        (
            [scheduler("OneCycleLR", "max_lr: '${optimizer.lr}', total_steps: '${trainer.total_steps}'")],
            "lr_scheduler.total_steps",
            "counts optimizer steps, but the scheduler steps once an epoch",
        ),
        (
            [scheduler("OneCycleLR", "max_lr: '${optimizer.lr}', total_steps: 4")],
            "lr_scheduler.total_steps",
            "ends after 4 epochs, but the training has 5",
        ),
        (
            [WHOLE % f"{ONE_CYCLE}, max_lr: 0.1, total_steps: 4"],
            "search_space.lr_scheduler.choices[1].total_steps",
            "ends after 4 epochs, but the training has 5",
        ),
        (
            [WHOLE % f"{PLATEAU}, interval: step"],
            "search_space.lr_scheduler.choices[1].interval",
            "a metric of a whole epoch",
        ),
        (
            [scheduler("OneCycleLR", "max_lr: '${optimizer.lr}', epochs: 2, steps_per_epoch: 2")],
            "lr_scheduler.epochs",
            "ends after 4 epochs, but the training has 5",
        ),
        (
            [
                scheduler("OneCycleLR", "max_lr: 0.1, total_steps: 7"),
                "search_space={trainer.max_epochs: {type: int, low: 5, high: 9}}",
            ],
            "lr_scheduler.total_steps",
            "ends after 7 epochs, but the training has 9",
        ),
        (
            [
                scheduler("OneCycleLR", "max_lr: '${optimizer.lr}', total_steps: 30, interval: step"),
                "trainer={max_steps: 40}",
            ],
            "lr_scheduler.total_steps",
            "ends after 30 steps, but the training has 40",
        ),
    ],
)
def test_what_can_not_be_is_refused_where_it_stands(
    file: Path, overrides: list[str], path: str, problem: str
) -> None:
    with pytest.raises(InputError) as raised:
        check_schedule(spec_of(file, *overrides))
    assert raised.value.path == path
    assert problem in raised.value.problem
    assert raised.value.fix


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [scheduler("ReduceLROnPlateau", "patience: 2")],
        [scheduler("OneCycleLR", "max_lr: '${optimizer.lr}', total_steps: 5")],
        [scheduler("OneCycleLR", "max_lr: ['${optimizer.lr}'], total_steps: 5")],
        [scheduler("OneCycleLR", "max_lr: '${optimizer.lr}', total_steps: 3, warmup: 2")],
        [scheduler("CyclicLR", f"max_lr: '${{optimizer.lr}}', {CYCLE}")],
        [scheduler("LambdaLR", "lr_lambda: {_target_: parts.mae, _partial_: true}")],
        [
            scheduler("OneCycleLR", "max_lr: 0.1, total_steps: 5, cycle_momentum: false"),
            "search_space={optimizer.momentum: {type: float, low: 0.1, high: 0.9}}",
        ],
        [
            scheduler("StepLR", "step_size: 1"),
            (
                f"search_space={{{TYPES % ONE_CYCLE}, optimizer.lr: {{type: float, low: 1e-4, high: 1e-1, when: "
                "{lr_scheduler._target_: torch.optim.lr_scheduler.StepLR}}}"
            ),
        ],
    ],
)
def test_what_can_be_is_let_pass(file: Path, overrides: list[str]) -> None:
    check_schedule(spec_of(file, *overrides))


def test_a_single_training_sets_no_searched_value(file: Path) -> None:
    check_schedule(spec_of(file, scheduler("OneCycleLR", "max_lr: 0.1, total_steps: 5")), search=False)


class TestOnceTheDataIsThere:
    @pytest.mark.parametrize(
        ("params", "callbacks", "fits"),
        [
            ({}, "{}", True),  # 64 samples by 16, 5 epochs: 20 steps
            ({"loader.batch_size": 8}, "{}", False),
            ({"loader.batch_size": 8}, "{gradient_accumulation: {batches: 2}}", True),
            ({"loader.batch_size": 32}, "{}", True),
            ({"loader.batch_size": 8}, "{own: {_target_: own.Follows}}", True),  # it may change the steps
        ],
    )
    def test_a_one_cycle_that_is_too_short_does_not_begin(
        self, file: Path, params: dict[str, int], callbacks: str, fits: bool
    ) -> None:
        cycle = scheduler("OneCycleLR", "max_lr: 0.1, total_steps: 20, interval: step")
        builder = Builder(spec_of(file, cycle, f"callbacks={callbacks}"))
        config = builder.spec.resolve(params)
        if fits:
            builder.laid_out(config, builder.data(config))
            return
        with pytest.raises(InputError, match="ends after 20 steps, but the training has 40") as raised:
            builder.laid_out(config, builder.data(config))
        assert raised.value.path == "lr_scheduler.total_steps"
        assert "${trainer.total_steps}" in raised.value.fix

    def test_a_preflight_tells_of_a_schedule_that_does_not_end_with_the_training(self, file: Path) -> None:
        cosine = scheduler("CosineAnnealingLR", "T_max: 15, interval: step")
        said = hpo("check", file, cosine).stdout
        assert "CosineAnnealingLR spans 15 steps, and this training has 20" in said
        fits = scheduler("CosineAnnealingLR", "T_max: '${trainer.total_steps}', interval: step")
        assert " spans " not in hpo("check", file, fits).stdout


class TestMetricsThatNothingRecords:
    @pytest.mark.parametrize(
        ("overrides", "path"),
        [
            (["callbacks={own: {_target_: own.Follows}}"], "callbacks.own"),
            (
                ["callbacks={stop: {_target_: trainer.callbacks.EarlyStopping, monitor: val_f}}"],
                "callbacks.stop.monitor",
            ),
            (["callbacks={nan_detection: {metrics: [val_los]}}"], "callbacks.nan_detection.metrics"),
            (
                [
                    "callbacks={early_stopping: {monitor: val_loss}}",
                    "search_space={callbacks.early_stopping.monitor: {type: categorical, choices: [lr, val_f]}}",
                ],
                "search_space[callbacks.early_stopping.monitor]",
            ),
            (["step={_target_: own.telling}", "loss=null", "study.metric=val_mae"], "study.metric"),
            (["step={_target_: own.step}", "loss=null", "study.metric=mae"], "study.metric"),
        ],
    )
    def test_their_reader_is_named(self, file: Path, overrides: list[str], path: str) -> None:
        with pytest.raises(InputError, match="nothing records this metric") as raised:
            check_imports(spec_of(file, "study.direction=minimize", *overrides))
        assert raised.value.path == path

    def test_what_a_step_may_record_is_not_known(self, file: Path) -> None:
        overrides = ["step={_target_: own.step}", "loss=null", "study.metric=val_kl", "study.direction=minimize"]
        (found,) = check_imports(spec_of(file, *overrides))
        assert (found.path, found.value) == ("study.metric", "val_kl")
        assert "only the step could record this metric" in found.problem
        known = [*overrides[1:], "step={_target_: own.telling}"]
        assert check_imports(spec_of(file, *known)) == []
