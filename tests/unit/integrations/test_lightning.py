"""Lightning's Trainer trains trials: exact after an interruption, ended as the study says, wrong use refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpo.integrations.lightning import HPOCallback
from hpo.study.outcome import Outcome
from hpo.trial.session import Session
from tests.support.attempts import AskedAt, stored
from tests.support.pausing import PauseAll
from tests.support.studies import Studies
from tests.unit.integrations.support import StopAt, reason, run

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated:FutureWarning"),
]
EPOCHS = 4
SCHEDULERS: dict[str, Any] = {
    "none": lambda _: None,
    "epoch": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "step": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
}


class Net(LightningModule):
    def __init__(self, scheduler: str = "none", metric: str = "val_loss", nan: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: Any, _: int) -> Any:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log(self.hparams["metric"], loss * float("nan") if self.hparams["nan"] else loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        name = self.hparams["scheduler"]
        scheduler = SCHEDULERS[name](optimizer)
        if scheduler is None:
            return optimizer
        interval = "step" if name == "step" else "epoch"
        config = {"scheduler": scheduler, "interval": interval, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def loaders(validates: bool = True) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
    inputs = torch.randn(70, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs[:, :1] * 2)
    return DataLoader(data, 10, shuffle=True), DataLoader(data, 35) if validates else None


def trainer_of(trial: Session, *callbacks: Any, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {"accelerator": "cpu", "max_epochs": EPOCHS, "default_root_dir": trial.folder / "lightning"}
    return Trainer(callbacks=list(callbacks), **(quiet | options))


def fit(
    trial: Session, *callbacks: Any, module: Net | None = None, validates: bool = True, **options: Any
) -> Trainer:
    """A person's function."""
    callback = HPOCallback(trial)
    trainer = trainer_of(trial, callback, *callbacks, **options)
    train, validation = loaders(validates)
    trainer.fit(module or Net(), train, validation, ckpt_path=callback.load_checkpoint())
    return trainer


@pytest.mark.parametrize(
    ("scheduler", "validates", "options"),
    [
        ("none", False, {}),
        ("epoch", True, {"accumulate_grad_batches": 2}),
        ("step", True, {}),
        ("plateau", True, {}),
        ("epoch", True, {"check_val_every_n_epoch": 2}),
        ("none", True, {"max_steps": 22, "max_epochs": -1}),
        ("plateau", True, {"max_steps": 1000}),
    ],
)
def test_a_trial_that_is_interrupted_ends_as_one_that_is_not(
    studies: Studies, scheduler: str, validates: bool, options: dict[str, Any]
) -> None:
    metric = "val_loss" if validates else "train_loss"
    ends: list[dict[str, Any]] = []

    def train(trial: Session, stop: StopAt | None = None) -> None:
        callbacks = [] if stop is None else [LambdaCallback(on_train_batch_start=stop)]
        trainer = fit(trial, *callbacks, module=Net(scheduler), validates=validates, **options)
        ends.append(trainer.lightning_module.state_dict())

    with studies.open(f"study.metric={metric}", at="whole") as (view,):
        whole, curve = run(view, train)
    with studies.open(f"study.metric={metric}", at="cut") as (view,):
        stop = StopAt(18)
        report, begun = run(view, lambda trial: train(trial, stop), stop.request)
        assert (report.outcome, report.reason, len(ends)) == (None, "", 1)
        again, resumed = run(view, train)
    assert not again.reason
    assert 0 < len(begun) < len(curve)
    assert (whole.outcome, again.outcome, again.value) == (Outcome.COMPLETE, Outcome.COMPLETE, whole.value)
    assert resumed == curve
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


class StepsItself(Net):
    """Steps torch's own optimizer, which Lightning does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


def test_a_module_that_steps_its_optimizer_itself_resumes(studies: Studies) -> None:
    stop = StopAt(18)
    callback = LambdaCallback(on_train_batch_start=stop)
    with studies.open(at="whole") as (view,):
        _, curve = run(view, lambda trial: fit(trial, module=StepsItself()))
    with studies.open(at="cut") as (view,):
        _, begun = run(view, lambda trial: fit(trial, callback, module=StepsItself()), stop.request)
        report, resumed = run(view, lambda trial: fit(trial, module=StepsItself()))
    assert (len(begun), report.outcome, resumed) == (2, Outcome.COMPLETE, curve)


def test_a_trial_that_has_lost_its_end_only_trains_nothing_more(studies: Studies) -> None:
    with studies.open() as (view,):
        stop = StopAt(1)
        report, begun = run(view, lambda trial: fit(trial, LambdaCallback(on_fit_end=stop)), stop.request)
        assert (report.outcome, len(begun)) == (Outcome.COMPLETE, EPOCHS)


def test_each_validation_is_an_epoch_with_all_that_is_logged_and_the_sanity_check_is_none(
    studies: Studies,
) -> None:
    with studies.open() as (view,):
        report, curve = run(view, fit)
        assert stored(view).intermediate_values.keys() == set(range(1, EPOCHS + 1))
    assert (report.epochs, [set(each) for each in curve]) == (EPOCHS, [{"train_loss", "val_loss"}] * EPOCHS)


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({"check_val_every_n_epoch": 2}, 2),
        ({"val_check_interval": 3}, 8),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, 5),
        ({"limit_val_batches": 1, "num_sanity_val_steps": 0}, 4),
    ],
)
def test_what_counts_as_an_epoch(studies: Studies, options: dict[str, Any], epochs: int) -> None:
    with studies.open() as (view,):
        report, _ = run(view, lambda trial: fit(trial, **options))
    assert (report.outcome, report.epochs) == (Outcome.COMPLETE, epochs)


@pytest.mark.parametrize(
    ("options", "validates", "known"),
    [
        ({}, True, EPOCHS),
        ({"check_val_every_n_epoch": 2}, True, EPOCHS // 2),
        ({"check_val_every_n_epoch": 2}, False, EPOCHS),
        ({"val_check_interval": 1}, True, 0),
        ({"val_check_interval": "00:00:00:30"}, True, 0),
        ({"max_steps": 10}, True, 0),
    ],
)
def test_how_many_epochs_are_to_come_is_said_where_it_is_known(
    studies: Studies, options: dict[str, Any], validates: bool, known: int
) -> None:
    told: list[int] = []

    def train(trial: Session) -> None:
        look = LambdaCallback(on_train_batch_start=lambda *_: told.append(trial.max_epochs))
        fit(trial, look, validates=validates, **options)

    with studies.open("study.metric=train_loss", "trainer.max_epochs=null", "trainer.max_steps=100") as (view,):
        report, _ = run(view, train)
    assert "AttributeError" not in report.reason
    assert set(told) == {known}


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_validations_inside_an_epoch_have_one_curve_after_an_interruption(studies: Studies) -> None:
    stop = StopAt(13)
    with studies.open() as (view,):
        run(
            view,
            lambda trial: fit(trial, LambdaCallback(on_train_batch_start=stop), val_check_interval=3),
            stop.request,
        )
        report, _ = run(view, lambda trial: fit(trial, val_check_interval=3))
        assert list(stored(view).intermediate_values) == list(range(1, report.epochs + 1))
    assert (report.outcome, report.epochs) == (Outcome.COMPLETE, 8)


def test_a_pruned_trial_ends_with_its_epoch_and_the_function_returns(studies: Studies) -> None:
    with studies.open() as (view,):
        view.study.pruner = AskedAt(2)
        report, _ = run(view, fit)
    assert (report.outcome, report.epochs) == (Outcome.PRUNED, 2)


def test_a_pruned_trial_ends_before_min_epochs(studies: Studies) -> None:
    with studies.open() as (view,):
        view.study.pruner = AskedAt(2)
        report, _ = run(view, lambda trial: fit(trial, min_epochs=EPOCHS))
    assert (report.outcome, report.epochs) == (Outcome.PRUNED, 2)


def test_a_paused_trial_resumes_and_one_without_an_epoch_left_does_not_pause(studies: Studies) -> None:
    with studies.open("trainer.max_epochs=null", "trainer.max_steps=100") as (view,):
        paused = replace(view, scheduler=PauseAll(2))
        report, _ = run(paused, fit)
        assert (report.paused, report.epochs) == (True, 2)
        at_its_end = replace(view, scheduler=PauseAll(EPOCHS))
        report, _ = run(at_its_end, fit)
        assert (report.outcome, report.paused, report.epochs) == (Outcome.COMPLETE, False, EPOCHS)


def test_a_metric_that_is_nan_has_diverged(studies: Studies) -> None:
    with studies.open() as (view,):
        report, _ = run(view, lambda trial: fit(trial, module=Net(nan=True)))
    assert (report.outcome, report.epochs) == (Outcome.DIVERGED, 1)


def test_what_lightning_stops_by_itself_is_complete_and_its_best_checkpoint_is_there(studies: Studies) -> None:
    def train(trial: Session) -> None:
        early = EarlyStopping("val_loss", min_delta=100.0, patience=1)
        trainer = fit(trial, ModelCheckpoint(trial.folder / "best", monitor="val_loss"), early)
        assert trainer.validate(dataloaders=loaders()[1], ckpt_path="best", verbose=False)

    with studies.open() as (view,):
        report, _ = run(view, train)
    assert (report.outcome, report.epochs, report.reason) == (Outcome.COMPLETE, 2, "")


def test_what_can_not_be_read_back_does_not_keep_a_module_from_training(studies: Studies) -> None:
    class Odd(Net):
        def __init__(self, part: object) -> None:
            super().__init__()
            self.save_hyperparameters()

    with studies.open() as (view,):
        assert run(view, lambda trial: fit(trial, module=Odd(object())))[0].outcome == Outcome.COMPLETE


# ---- wrong use


def unasked(trial: Session) -> None:
    trainer_of(trial, HPOCallback(trial)).fit(Net(), *loaders())


def twice(trial: Session) -> None:
    fit(trial)
    fit(trial)


def one_callback_twice(trial: Session) -> None:
    callback = HPOCallback(trial)
    path = callback.load_checkpoint()
    for _ in range(2):
        trainer_of(trial, callback).fit(Net(), *loaders(), ckpt_path=path)


def two_callbacks(trial: Session) -> None:
    trainer_of(trial, HPOCallback(trial), HPOCallback(trial))


def tuned(trial: Session) -> None:
    Tuner(trainer_of(trial, HPOCallback(trial))).lr_find(Net(), *loaders(), attr_name="lr")


def other_device(trial: Session) -> None:
    trial.device = torch.device("cuda:0")
    fit(trial)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda trial: fit(trial, module=Net(metric="loss")), "metric, but loss, train_loss"),
        (unasked, "fix: write `trainer.fit(…, ckpt_path=callback.load_checkpoint())`"),
        (twice, "one trial is one training, and this is another"),
        (one_callback_twice, "the callback trains one trial once"),
        (two_callbacks, "Found more than one stateful callback of type `HPOCallback`"),
        (tuned, "fix: call `Tuner(other).lr_find(…)` before"),
        (lambda trial: fit(trial, LearningRateFinder(attr_name="lr")), "LearningRateFinder would set"),
        (other_device, "fix: `Trainer(accelerator='cuda', devices=1)`"),
        (lambda trial: fit(trial, default_root_dir="."), "(default_root_dir=trial.folder / 'lightning')"),
        (lambda trial: fit(trial, ModelCheckpoint(dirpath="best")), "leave `dirpath` of ModelCheckpoint out"),
        (lambda trial: fit(trial, devices=2, strategy="ddp_fork"), "it trains on 2 devices, and a"),
        (lambda trial: fit(trial, max_epochs=-1, max_steps=3), "has ended without a validation"),
        (lambda trial: fit(trial, module=Net(metric="loss"), validates=False), "metric, but train_loss"),
    ],
)  # fmt: skip
def test_wrong_use_is_the_trials_error_and_says_what_to_write(
    studies: Studies, function: Any, expected: str
) -> None:
    with studies.open() as (view,):
        assert expected in reason(view, function)
