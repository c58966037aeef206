"""From a config to a Trainer: what is built, what is kept between trials, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpo.checks.check import check_spec
from hpo.checks.check_callbacks import check_callbacks
from hpo.checks.check_metrics import check_metric
from hpo.config.spec import StudySpec
from hpo.errors import InputError, together
from hpo.trial.builder import Builder, make_loss
from hpo.trial.callbacks import CALLBACKS
from hpo.trial.place import RunPlace
from hpo.trial.run_length import Progress
from tests.support import mlflow_store
from tests.support.studies import Studies
from trainer import Callback, Trainer
from trainer.callback import LogDispatch
from trainer.callbacks import (
    Checkpoint,
    CSVLogging,
    EarlyStopping,
    LossPrediction,
    MLflowLogging,
    NaNDetection,
    StepMetrics,
    TensorBoardLogging,
    WandbLogging,
)
from trainer.deterministic import DeterministicMode
from trainer.lr_schedulers import Warmup

CPU = torch.device("cpu")
OWN = """
import torch
from torch.utils.data import TensorDataset

from trainer import Callback


def random_data(samples=8):
    inputs = torch.randn(samples, 4)
    return {"train": TensorDataset(inputs, inputs[:, :1]), "val": TensorDataset(inputs, inputs[:, :1])}


def rubbish(what):
    return {"list": [1, 2], "none": None, "keys": {"train": 1, "test": 2}}[what]


def step(model, batch, scale=1.0):
    outputs = model(batch[0])
    return {"loss": scale * outputs.square().mean(), "outputs": outputs, "size": outputs.numel()}


step.records = ("size",)


class Complex(torch.nn.Module):
    def __init__(self, hidden=4):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden, dtype=torch.complex64))


class Plain(torch.optim.SGD):
    pass


class Mine(Callback):
    writes = ("mine",)

    def __init__(self, factor=2.0):
        self.factor = factor

    def on_epoch_end(self, trainer):
        trainer.state.metrics["mine"] = self.factor
"""


@pytest.fixture(autouse=True)
def own(studies: Studies) -> None:
    (studies.folder / "own.py").write_text(OWN)


def build(studies: Studies, *overrides: str, **options: Any) -> Trainer:
    spec = studies.spec(*overrides)
    place = RunPlace(studies.folder / "out", "trial-0")
    return Builder(spec).trainer(spec.resolve(), place, seed=1, device=CPU, **options)


def by_type(trainer: Trainer, kind: type[Callback]) -> Any:
    found = [callback for callback in trainer.callbacks.callbacks if type(callback) is kind]
    return found[0] if found else None


def callbacks_checked(spec: StudySpec) -> set[str]:
    errors: list[InputError] = []
    written, _ = check_callbacks(spec, (), errors)
    if errors:
        raise together(errors)
    return written


def check(spec: StudySpec) -> None:
    """What `hpo run` checks before anything starts."""
    check_spec(spec)
    check_metric(spec, callbacks_checked(spec))


@pytest.mark.parametrize(
    ("overrides", "fused"),
    [
        ((), True),
        (("optimizer={_target_: torch.optim.SGD, lr: 0.1}",), True),
        (("optimizer={_target_: torch.optim.Adagrad}",), None),
        (("optimizer.fused=false",), False),
        (("optimizer.foreach=true",), None),
        (("optimizer={_target_: torch.optim.RMSprop}",), None),
        (("optimizer={_target_: own.Plain, lr: 0.1}",), None),
        (("model={_target_: own.Complex}", "search_space={}"), None),
    ],
)
def test_an_optimizer_is_fused_where_it_can_be_unless_forbidden(
    studies: Studies, overrides: tuple[str, ...], fused: bool | None
) -> None:
    assert build(studies, *overrides).optimizer.param_groups[0].get("fused") is fused


GROUPS = "optimizer.groups={layers.0: {lr: 0.5}, biases: {parameters: ['*.bias'], weight_decay: 0.0}}"


def test_groups_give_parameters_arguments_of_their_own(studies: Studies) -> None:
    space = "search_space={'optimizer.groups[layers.0].lr': {type: float, low: 0.1, high: 1.0}}"
    spec = studies.spec(GROUPS, space)
    check(spec)
    groups = build(studies, GROUPS).optimizer.param_groups
    assert [(len(group["params"]), group["lr"], group["weight_decay"]) for group in groups] == [
        (1, 0.01, 0.01),
        (2, 0.5, 0.01),
        (1, 0.01, 0.0),
    ]
    config = spec.resolve({"optimizer.groups[layers.0].lr": 0.25})
    trainer = Builder(spec).trainer(config, RunPlace(studies.folder / "out", "x"), seed=1, device=CPU)
    assert trainer.optimizer.param_groups[1]["lr"] == 0.25


@pytest.mark.parametrize(
    ("overrides", "path", "problem"),
    [
        (("optimizer.groups=[a]",), "optimizer.groups", "must be a mapping of groups"),
        (("optimizer.groups={a: 1}",), "optimizer.groups", "`a` must be a mapping of arguments"),
        (
            ("optimizer.groups={a: {parameters: 3}}",),
            "optimizer.groups",
            "`parameters` of the group `a` must be a pattern",
        ),
        (("optimizer.groups={layers: {lrr: 1}}",), "optimizer.groups.layers.lrr", "takes no argument `lrr`"),
        (
            ("search_space={optimizer.groups.layers.lrr: {type: float, low: 0.1, high: 1.0}}",),
            "search_space[optimizer.groups.layers.lrr]",
            "takes no argument `lrr`",
        ),
        (
            (GROUPS, "search_space={optimizer.groups.biases.lr: {type: float, low: 0.1, high: 1.0}}"),
            "search_space[optimizer.groups.biases.lr]",
            "names nothing in the config",
        ),
    ],
)
def test_groups_that_can_not_be_made_are_refused_at_their_place(
    studies: Studies, overrides: tuple[str, ...], path: str, problem: str
) -> None:
    with pytest.raises(InputError) as caught:
        check(studies.spec(*overrides))
    assert (caught.value.path, problem in str(caught.value)) == (path, True)


def test_a_group_without_a_parameter_is_refused_with_the_models_names(studies: Studies) -> None:
    with pytest.raises(InputError, match=r"optimizer\.groups: no parameter .* 'layer': did you mean 'layers'"):
        build(studies, "optimizer.groups={layer: {lr: 0.1}}")


def test_the_weights_follow_from_the_trials_seed(studies: Studies) -> None:
    spec = studies.spec()
    place = RunPlace(studies.folder, "x")
    builder = Builder(spec)

    def weights(seed: int) -> torch.Tensor:
        model = builder.trainer(spec.resolve(), place, seed=seed, device=CPU).model
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_data_is_made_once_for_equal_configs_and_only_the_latest_is_kept(studies: Studies) -> None:
    spec = studies.spec()
    builder = Builder(spec)
    first = builder.data(spec.resolve({"optimizer.lr": 0.1}))
    assert builder.data(spec.resolve({"optimizer.lr": 0.01})) is first
    other = builder.data(spec.resolve({"data.samples": 48}))
    assert len(other["train"]) == 32
    assert len(builder._data) == 1
    assert builder.data(spec.resolve()) is not first


def test_every_trial_sees_the_split_of_the_studys_seed(studies: Studies) -> None:
    def inputs(*overrides: str, seed: int = 0) -> torch.Tensor:
        torch.manual_seed(seed)
        spec = studies.spec("data={_target_: own.random_data}", *overrides)
        made: torch.Tensor = Builder(spec).data(spec.resolve())["train"].tensors[0]
        return made

    assert torch.equal(inputs(seed=1), inputs(seed=2))
    assert not torch.equal(inputs(), inputs("study.sampler.seed=4"))
    assert torch.equal(inputs("trainer.seed=4"), inputs("study.sampler.seed=4"))


@pytest.mark.parametrize(
    ("what", "described"), [("list", "list"), ("none", "NoneType"), ("keys", "the keys train, test")]
)
def test_data_that_is_no_mapping_of_train_and_val_is_the_studys_fault(
    studies: Studies, what: str, described: str
) -> None:
    spec = studies.spec(f"data={{_target_: own.rubbish, what: {what}}}")
    with pytest.raises(InputError) as caught:
        Builder(spec).data(spec.resolve())
    assert caught.value.value == f"own.rubbish returned {described}"
    assert "{'train': dataset" in caught.value.fix


def test_without_a_section_the_defaults_run_and_nothing_else(studies: Studies) -> None:
    kinds = {type(callback) for callback in build(studies).callbacks.callbacks} - {LogDispatch}
    assert kinds == {row.kind for row in CALLBACKS.values() if row.default}


@pytest.mark.parametrize("written", ["true", "{}", "null"])
def test_early_stopping_follows_the_studys_metric_in_its_direction(studies: Studies, written: str) -> None:
    callback = by_type(build(studies, f"callbacks={{early_stopping: {written}}}"), EarlyStopping)
    assert (callback.monitor, callback.mode) == ("val_loss", "min")
    overrides = ("study.metric=val_mae", "study.direction=maximize")
    callback = by_type(build(studies, f"callbacks={{early_stopping: {written}}}", *overrides), EarlyStopping)
    assert (callback.monitor, callback.mode) == ("val_mae", "max")
    other = "callbacks={early_stopping: {monitor: val_loss, patience: 3}}"
    callback = by_type(build(studies, other, *overrides), EarlyStopping)
    assert (callback.monitor, callback.mode, callback.patience) == ("val_loss", "min", 3)


def test_a_prediction_of_the_studys_metric_is_in_its_direction(studies: Studies) -> None:
    for metric, mode in (("val_mae", "max"), ("val_loss", "min")):
        overrides = (f"callbacks={{loss_prediction: {{metric: {metric}}}}}", "study.metric=val_mae")
        callback = by_type(build(studies, *overrides, "study.direction=maximize"), LossPrediction)
        assert (callback.metric, callback.mode) == (metric, mode)


def test_a_callback_is_switched_off_or_given_arguments(studies: Studies) -> None:
    trainer = build(studies, "callbacks={csv: false, checkpoint: {keep_last: 3}, early_stopping: false}")
    assert by_type(trainer, CSVLogging) is None
    assert by_type(trainer, EarlyStopping) is None
    checkpoint = by_type(trainer, Checkpoint)
    assert (checkpoint.keep_last, checkpoint.monitor, checkpoint.mode) == (3, "val_loss", "min")
    assert checkpoint.manager.folder == studies.folder / "out" / "checkpoints"


def test_nan_detection_always_watches_the_studys_metric(studies: Studies) -> None:
    overrides = ("study.metric=val_mae", "study.direction=minimize")
    assert by_type(build(studies, *overrides), NaNDetection).metrics == ("train_loss", "val_loss", "val_mae")
    narrowed = build(studies, "callbacks={nan_detection: {metrics: [train_loss]}}", *overrides)
    assert by_type(narrowed, NaNDetection).metrics == ("train_loss", "val_mae")


def test_a_studys_own_callback_runs_and_its_metric_can_be_the_studys(studies: Studies) -> None:
    overrides = (
        "callbacks={mine: {_target_: own.Mine, factor: 3.0}}",
        "study.metric=mine",
        "study.direction=minimize",
    )
    spec = studies.spec(*overrides)
    check(spec)
    trainer = build(studies, *overrides, "trainer.max_epochs=1")
    data = Builder(spec).data(spec.resolve())
    assert trainer.fit(data["train"], data["val"]).metrics["mine"] == 3.0


@pytest.mark.parametrize("name", [name for name, row in CALLBACKS.items() if row.required])
def test_what_a_study_needs_cannot_be_switched_off(studies: Studies, name: str) -> None:
    with pytest.raises(InputError, match=f"callbacks.{name}: can't be switched off"):
        check(studies.spec(f"callbacks={{{name}: false}}"))
    space = f"search_space={{callbacks.{name}: {{type: categorical, choices: [true, false]}}}}"
    with pytest.raises(InputError, match=rf"search_space\[callbacks.{name}\]: can't be switched off"):
        check(studies.spec(f"callbacks={{{name}: true}}", space))


@pytest.mark.parametrize(
    ("callbacks", "path"),
    [
        ("{erly_stopping: {}}", "callbacks.erly_stopping"),
        ("{early_stopping: {patience: 3, paitence: 4}}", "callbacks.early_stopping.paitence"),
        ("{checkpoint: {folder: /tmp}}", "callbacks.checkpoint.folder"),
        ("{csv: {path: x.csv}}", "callbacks.csv.path"),
        ("{wandb: {run_id: x}}", "callbacks.wandb.run_id"),
        ("{mlflow: {params: {}}}", "callbacks.mlflow.params"),
        ("{tensorboard: {hparams: {}}}", "callbacks.tensorboard.hparams"),
        ("{mine: {_target_: own.Mine, facto: 1}}", "callbacks.mine.facto"),
        ("{mine: {_target_: own.Nobody}}", "callbacks.mine._target_"),
    ],
)
def test_what_a_callback_does_not_take_is_named(studies: Studies, callbacks: str, path: str) -> None:
    with pytest.raises(InputError) as caught:
        check(studies.spec(f"callbacks={callbacks}"))
    assert caught.value.path == path


def test_an_argument_that_a_callback_needs_is_asked_for(studies: Studies) -> None:
    with pytest.raises(
        InputError, match=r"callbacks\.gradient_accumulation: `gradient_accumulation` needs the argument"
    ):
        check(studies.spec("callbacks.gradient_accumulation={}"))


def test_a_step_of_ones_own_replaces_the_loss_and_its_numbers_are_metrics(studies: Studies) -> None:
    overrides = ("step={_target_: own.step, scale: 0.5}", "study.metric=val_size", "study.direction=minimize")
    spec = studies.spec(*overrides)
    check(spec)
    trainer = build(studies, *overrides, "trainer.max_epochs=1")
    data = Builder(spec).data(spec.resolve())
    state = trainer.fit(data["train"], data["val"])
    assert state.metrics["val_size"] == 32.0
    assert {"train_size", "val_loss", "val_mae"} <= state.metrics.keys()


@pytest.mark.parametrize(("interval", "steps"), [("epoch", 2), ("step", 8)])
def test_a_scheduler_steps_per_epoch_or_per_step(studies: Studies, interval: str, steps: int) -> None:
    scheduler = f"{{_target_: torch.optim.lr_scheduler.StepLR, step_size: 100, interval: {interval}}}"
    trainer = build(studies, f"lr_scheduler={scheduler}", "trainer.max_epochs=2")
    data = Builder(studies.spec()).data(studies.spec().resolve())
    trainer.fit(data["train"], data["val"])
    assert trainer.scheduler is not None
    assert trainer.scheduler.last_epoch == steps


def test_a_plateau_scheduler_follows_the_studys_metric(studies: Studies) -> None:
    scheduler = "lr_scheduler={_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, patience: 0}"
    trainer = build(studies, scheduler, "study.metric=val_mae", "study.direction=minimize")
    assert trainer.scheduler_monitor == "val_mae"


def test_no_scheduler_is_no_scheduler(studies: Studies) -> None:
    assert build(studies, "lr_scheduler=null").scheduler is None


def test_what_is_trained_already_comes_before_the_configs_length(studies: Studies) -> None:
    plan = build(studies, after=Progress(data_epochs=6, steps=50)).plan
    assert (plan.max_epochs, plan.max_steps) == (9, None)
    plan = build(studies, "trainer.max_steps=20", after=Progress(data_epochs=6, steps=50)).plan
    assert (plan.max_epochs, plan.max_steps) == (9, 70)


def test_lengths_precision_and_pace_come_from_the_trainer_section(studies: Studies) -> None:
    options = "max_steps: 9, max_epochs: null, validate_every: 4, precision: bf16, deterministic: true"
    trainer = build(studies, f"trainer={{{options}}}")
    assert by_type(trainer, DeterministicMode)
    assert (trainer.plan.max_epochs, trainer.plan.max_steps, trainer.plan.validate_every) == (None, 9, 4)
    assert trainer.precision.kind == "bf16"


def test_a_warm_up_stands_before_any_scheduler(studies: Studies) -> None:
    scheduler = "{_target_: torch.optim.lr_scheduler.StepLR, step_size: 100, warmup: 3, interval: step}"
    trainer = build(studies, f"lr_scheduler={scheduler}")
    assert isinstance(trainer.scheduler, Warmup)
    assert trainer.scheduler_interval == "step"
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * trainer.scheduler.base_lrs[0])


#: What those need that can't do without an argument.
NEEDED = {  # the others are named with none
    "freeze": "{parts: layers.0}",
    "evaluator": "{every_n_steps: 5}",
    "weight_merging": "{every_n_steps: 5}",
    "gradient_clipping": "{max_norm: 1.0}",
    "gradient_accumulation": "{batches: 2}",
    "batch_size_schedule": "{sizes: {'0': 8, '1': 16}}",
    "sequence_length_schedule": "{lengths: {'0': 64}}",
    "time_limit": "{seconds: 60}",
    "notifier": "{url: 'json://127.0.0.1:9/', retries: 0}",
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_each_built_in_callback_goes_by_its_name_and_writes_inside_the_runs_folder(
    studies: Studies, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("COMET_START_ONLINE", "false")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store.uri() if name == "mlflow" else "")
    override = f"callbacks.{name}={NEEDED.get(name, '{}')}"
    spec = studies.spec(override)
    check(spec)
    before = {path for path in studies.folder.rglob("*") if "out" not in path.parts}
    trainer = build(studies, override, "trainer.max_epochs=2")
    assert by_type(trainer, CALLBACKS[name].kind) is not None
    data = Builder(spec).data(spec.resolve())
    trainer.fit(data["train"], data["val"])
    assert {path for path in studies.folder.rglob("*") if "out" not in path.parts} <= before | caches(studies)


def caches(studies: Studies) -> set[Path]:
    return {path for path in studies.folder.rglob("*") if "__pycache__" in str(path)}


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("early_stopping={patience: 0}", "callbacks.early_stopping.patience: `early_stopping` refuses this value"),
        (
            "ema={decay: 2}",
            "callbacks.ema.decay: `ema` refuses this value\n  value: 2\n  fix: give a number from 0",
        ),
        ("gradient_clipping={}", "callbacks.gradient_clipping: max_norm is None and max_value None"),
        (
            "gradient_accumulation={batches: 0}",
            "callbacks.gradient_accumulation.batches: `gradient_accumulation` refuses",
        ),
        ("checkpoint={keep_best: 0}", "callbacks.checkpoint.keep_best: `checkpoint` refuses this value"),
        (
            "gradient_accumulation={batches: 2.5}",
            "callbacks.gradient_accumulation.batches: must be a whole number",
        ),
        ("ema={decay: abc}", "callbacks.ema.decay: must be a number"),
        ("wandb={tags: one}", "callbacks.wandb.tags: must be a list, each entry a text"),
        ("mlflow={tags: one}", "callbacks.mlflow.tags: `mlflow` refuses this value"),
        ("early_stopping={monitor: val_acc}", "callbacks.early_stopping.monitor: nothing records this metric"),
        ("loss_prediction={metric: los}", "callbacks.loss_prediction.metric: nothing records this metric"),
        ("notifier={url: 'env:NOT_SET_ANYWHERE'}", "callbacks.notifier: url is 'env:NOT_SET_ANYWHERE'"),
    ],
)
def test_arguments_that_a_callback_refuses_are_known_before_anything_runs(
    studies: Studies, written: str, problem: str
) -> None:
    with pytest.raises(InputError) as caught:
        callbacks_checked(studies.spec(f"callbacks.{written}"))
    assert problem in str(caught.value)


def test_a_package_that_a_callback_needs_and_is_missing_is_named_before_anything_runs(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(InputError, match=r"callbacks\.notifier: .*pip install 'hpo-service\[notify\]'"):
        callbacks_checked(studies.spec("callbacks.notifier={url: 'jsons://host'}"))


@pytest.mark.parametrize("metric", ["grad_norm/0.weight", "parameters"])
def test_a_metric_of_a_built_in_callback_can_be_the_studys(studies: Studies, metric: str) -> None:
    overrides = ["callbacks.tensor_statistics={}", "callbacks.parameter_count={}", "study.direction=minimize"]
    spec = studies.spec(f"study.metric={metric}", *overrides)
    check_metric(spec, callbacks_checked(spec))


@pytest.mark.parametrize(
    ("path", "entry", "problem"),
    [
        ("trainer.precision", "{type: categorical, choices: [fp32, bf61]}", "bf61"),
        ("loader.batch_size", "{type: categorical, choices: [32, 0]}", "0"),
        ("callbacks.ema.decay", "{type: float, low: 0.5, high: 1.5}", "1.5"),
        ("callbacks.gradient_clipping.max_norm", "{type: float, low: -1.0, high: 1.0}", "-1.0"),
    ],
)
def test_a_searched_value_that_a_trial_could_not_have_is_known_before_anything_runs(
    studies: Studies, path: str, entry: str, problem: str
) -> None:
    overrides = ("callbacks={ema: {}, gradient_clipping: {max_norm: 1.0}}", f"search_space={{{path}: {entry}}}")
    with pytest.raises(InputError) as caught:
        callbacks_checked(studies.spec(*overrides))
    assert caught.value.path == f"search_space[{path}]"
    assert problem in caught.value.value


def test_values_that_fit_are_no_trouble(studies: Studies) -> None:
    space = (
        "{trainer.precision: {type: categorical, choices: [fp32, bf16]}, "
        "callbacks.ema.decay: {type: float, low: 0.5, high: 0.99}, "
        "callbacks.gradient_clipping.max_norm: {type: float, low: 0.1, high: 1.0, log: true}}"
    )
    spec = studies.spec("callbacks={ema: {}, gradient_clipping: {max_norm: 1.0}}", f"search_space={space}")
    check(spec)


SHOWN = "callbacks={wandb: {tags: [a], job_type: mine}, mlflow: {tags: {a: 1}}, tensorboard: {}}"


def shown(studies: Studies, folder: Path, params: dict[str, Any], *overrides: str) -> tuple[Any, Any, Any]:
    """The callbacks that show a run elsewhere, as a run in this folder gets them."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = studies.spec(SHOWN, *overrides)
    place = RunPlace(folder, "trial-3", params)
    trainer = Builder(spec).trainer(spec.resolve(params), place, seed=1, device=CPU)
    kinds = (WandbLogging, MLflowLogging, TensorBoardLogging)
    wandb, mlflow, tensorboard = (by_type(trainer, kind) for kind in kinds)
    return wandb, mlflow, tensorboard


def test_each_attempt_at_a_trial_is_the_same_run_elsewhere(studies: Studies) -> None:
    trial, params = studies.folder / "trials" / "3", {"optimizer.lr": 0.05}
    first = shown(studies, trial / "attempt-1", params)
    (trial / "attempt-1.bak").mkdir()
    second = shown(studies, trial / "attempt-2", params)
    assert first[0].run_id == second[0].run_id == first[1].run_key == second[1].run_key
    assert first[0].run_id.startswith("trial-3-")
    assert (first[0].earlier, second[0].earlier) == ((), (trial / "attempt-1",))
    assert set(second[0].checkpoints) == {trial / f"attempt-{number}" / "checkpoints" for number in (1, 2)}
    assert first[2].folder == second[2].folder == trial / "tensorboard"
    assert first[0].config == first[1].params == first[2].hparams == params
    assert (first[0].monitor, first[0].mode, first[1].monitor, first[1].mode) == ("val_loss", "min") * 2
    assert shown(studies, studies.folder / "trials" / "4" / "attempt-1", params)[0].run_id != first[0].run_id


def test_a_run_elsewhere_is_named_after_the_study_unless_the_file_says_otherwise(studies: Studies) -> None:
    wandb, mlflow, _ = shown(studies, studies.folder / "trials" / "3" / "attempt-1", {})
    assert (wandb.project, wandb.group, wandb.run_name, wandb.job_type) == ("tiny", "tiny", "trial-3", "mine")
    assert (wandb.tags, wandb.log_model) == (("a",), False)
    assert (mlflow.experiment, mlflow.tags) == ("tiny", {"group": "tiny", "job_type": "trial", "a": "1"})


@pytest.mark.parametrize(
    ("written", "used"),
    [
        ("sqlite:///runs of all.db", "sqlite:///{folder}/runs of all.db"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("http://tracking:5000", "http://tracking:5000"),
    ],
)
def test_a_relative_file_of_mlflow_lies_beside_the_study_wherever_it_is_run_from(
    studies: Studies, written: str, used: str
) -> None:
    attempt = studies.folder / "trials" / "3" / "attempt-1"
    _, mlflow, _ = shown(studies, attempt, {}, f"callbacks.mlflow.tracking_uri={written}")
    assert mlflow.tracking_uri == used.format(folder=studies.folder)


def test_each_final_training_is_a_run_of_its_own_with_the_base_config_as_parameters(studies: Studies) -> None:
    final = studies.folder / "final"
    one, other = (shown(studies, final, {}) for _ in range(2))
    assert one[0].run_id != other[0].run_id
    assert one[1].tags["job_type"] == "final"
    assert one[2].folder == final / "tensorboard"
    hparams = one[2].hparams
    assert (hparams["optimizer.lr"], hparams["model.hidden"], hparams["model._target_"]) == (0.01, 4, "parts.Net")
    assert list(final.iterdir()) == []


def test_a_key_that_a_process_died_over_is_made_anew(studies: Studies) -> None:
    trial = studies.folder / "trials" / "3"
    trial.mkdir(parents=True)
    (trial / "run_key").write_text("")
    keys = [shown(studies, trial / f"attempt-{number}", {})[0].run_id for number in (1, 2)]
    assert keys[0] == keys[1] != ""


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            "{_target_: torch.nn.BCEWithLogitsLoss, pos_weight: 3.0}",
            nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)),
        ),
        (
            "{_target_: torch.nn.BCEWithLogitsLoss, pos_weight: [3.0]}",
            nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])),
        ),
    ],
)
def test_weights_of_a_loss_are_written_as_numbers(studies: Studies, written: str, expected: nn.Module) -> None:
    loss = make_loss(Builder(studies.spec()).resolver, studies.spec(f"loss={written}").base_config()["loss"])
    outputs, targets = torch.tensor([[0.3], [-0.7]]), torch.tensor([[1.0], [0.0]])
    assert loss is not None
    assert torch.equal(loss(outputs, targets), expected(outputs, targets))


class TestStartingWeights:
    def saved(self, studies: Studies, **overrides: Any) -> nn.Module:
        model = build(studies, *(f"{key}={value}" for key, value in overrides.items())).model
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
        torch.save(model.state_dict(), studies.folder / "pretrained.pt")
        return model

    def test_the_model_begins_with_them(self, studies: Studies) -> None:
        self.saved(studies)
        model = build(studies, "trainer.weights.path=pretrained.pt").model
        assert all(bool((parameter == 0.25).all()) for parameter in model.parameters())

    def test_what_does_not_fit_is_refused_at_its_path_or_left_out(self, studies: Studies) -> None:
        self.saved(studies, **{"model.hidden": 3})
        wider = ("model.hidden=5", "trainer.weights.path=pretrained.pt")
        with pytest.raises(InputError, match="of another shape") as raised:
            build(studies, *wider)
        assert raised.value.path == "trainer.weights.path"
        assert "`strict: false`" in raised.value.fix
        model = build(studies, *wider, "trainer.weights.strict=false").model
        fitting = [bool((parameter == 0.25).all()) for parameter in model.parameters()]
        assert any(fitting)
        assert not all(fitting)

    def test_a_file_that_is_not_there_is_refused_at_its_path(self, studies: Studies) -> None:
        with pytest.raises(InputError, match="no readable weights") as raised:
            build(studies, "trainer.weights.path=missing.pt")
        assert (raised.value.path, raised.value.value) == ("trainer.weights.path", "missing.pt")


def test_a_console_of_steps_needs_what_records_them(studies: Studies) -> None:
    with pytest.raises(InputError, match=r"callbacks\.console\.every_n_steps: the console can't print steps"):
        callbacks_checked(studies.spec("callbacks={console: {every_n_steps: 5}}"))
    callbacks_checked(studies.spec("callbacks={console: {every_n_steps: 5}, step_metrics: true}"))


def test_each_attempt_records_its_steps_in_its_own_folder_and_finds_those_of_the_attempts_before(
    studies: Studies,
) -> None:
    places = [studies.folder / f"attempt-{number}" for number in (1, 2)]
    for place in places:
        place.mkdir()
    spec = studies.spec("callbacks={step_metrics: {every_n_steps: 5}}")
    trainer = Builder(spec).trainer(spec.resolve(), RunPlace(places[1], "trial-0"), seed=1, device=CPU)
    log = by_type(trainer, StepMetrics).log
    assert (log.path, log.earlier) == (places[1] / "steps.csv", (places[0] / "steps.csv",))
