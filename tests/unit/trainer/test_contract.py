"""The contract of every shipped callback: built, run twice, stopped anywhere, saved, closed twice."""

import gc
import inspect
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from torch import nn

from tests.support import mlflow_store
from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    regression,
    run_scripted,
    through_file,
)
from trainer import Callback, Trainer
from trainer import callbacks as shipped
from trainer.data.plan import Plan
from trainer.events import EVENTS
from trainer.runner import SAVED_IN, CallbackRunner, hook_of

Make = Callable[[Path], Callback]

#: How each is made, and its priority.
ALL: dict[str, tuple[Make, int]] = {
    "BatchSizeSchedule": (lambda folder: shipped.BatchSizeSchedule({0: 4, 1: 6}, "sqrt"), 1),
    "LRFinder": (lambda folder: shipped.LRFinder(steps=4), 1),
    "GradientAccumulation": (lambda folder: shipped.GradientAccumulation(2), 2),
    "Freeze": (lambda folder: shipped.Freeze("*bias", until_step=4), 4),
    "SequenceLengthSchedule": (lambda folder: shipped.SequenceLengthSchedule({0: 4}), 3),
    "NaNDetection": (lambda folder: shipped.NaNDetection(), 5),
    "EMA": (lambda folder: shipped.EMA(0.9), 10),
    "OptimizerMode": (lambda folder: shipped.OptimizerMode(), 10),
    "WeightAveraging": (lambda folder: shipped.WeightAveraging(3), 10),
    "WeightMerging": (lambda folder: shipped.WeightMerging(folder / "merged", 3, every_n_steps=2), 10),
    "GradientDump": (lambda folder: shipped.GradientDump(folder / "gradients", 4), 12),
    "GradientMonitor": (lambda folder: shipped.GradientMonitor(), 12),
    "StabilityMonitor": (lambda folder: shipped.StabilityMonitor(window=8), 12),
    "TensorStatistics": (lambda folder: shipped.TensorStatistics(every_n_steps=2, activations=True), 12),
    "SanityValidation": (lambda folder: shipped.SanityValidation(), 15),
    "Evaluator": (lambda folder: shipped.Evaluator(every_n_steps=2, at_start=True, max_batches=1), 30),
    "GradientClipping": (lambda folder: shipped.GradientClipping(max_norm=0.1), 20),
    "ConfigSaver": (lambda folder: shipped.ConfigSaver(folder / "config.json", {"lr": 0.1}), 50),
    "GarbageCollection": (lambda folder: shipped.GarbageCollection(2), 50),
    "ModelSummary": (lambda folder: shipped.ModelSummary(), 50),
    "Profiler": (lambda folder: shipped.Profiler(folder / "profile", wait=1, warmup=1, active=1), 50),
    "TimeLimit": (lambda folder: shipped.TimeLimit(3600), 50),
    "GPUMemory": (lambda folder: shipped.GPUMemory(), 60),
    "ParameterCount": (lambda folder: shipped.ParameterCount(), 60),
    "Throughput": (lambda folder: shipped.Throughput(), 60),
    "LossPrediction": (lambda folder: shipped.LossPrediction(min_epochs=2), 70),
    "OverfitDetection": (lambda folder: shipped.OverfitDetection(), 75),
    "StepMetrics": (lambda folder: shipped.StepMetrics(folder, transfer_every_n_steps=2), 79),
    "ProgressBar": (lambda folder: shipped.ProgressBar(), 79),
    "CSVLogging": (lambda folder: shipped.CSVLogging(folder / "metrics.csv"), 80),
    "CometLogging": (lambda folder: shipped.CometLogging("p", folder=folder / "comet"), 80),
    "ConsoleLogging": (lambda folder: shipped.ConsoleLogging(), 80),
    "JSONLogging": (lambda folder: shipped.JSONLogging(folder / "metrics.jsonl"), 80),
    "MetricSaver": (lambda folder: shipped.MetricSaver(folder, every_n_steps=2), 80),
    "MLflowLogging": (lambda folder: shipped.MLflowLogging("p", tracking_uri=mlflow_store.uri()), 80),
    "TensorBoardLogging": (lambda folder: shipped.TensorBoardLogging(folder / "tensorboard", {"lr": 0.1}), 80),
    "WandbLogging": (lambda folder: shipped.WandbLogging("p", folder=folder), 80),
    "EarlyStopping": (lambda folder: shipped.EarlyStopping(), 90),
    "BestWeights": (lambda folder: shipped.BestWeights(), 94),
    "Checkpoint": (lambda folder: shipped.Checkpoint(folder / "checkpoints", max_overhead=1), 95),
    "SavePretrained": (lambda folder: shipped.SavePretrained(folder / "pretrained"), 96),
    # Nobody listens at this port of the own machine: a notification that fails ends nothing.
    "Notifier": (lambda folder: shipped.Notifier("json://127.0.0.1:9/", retries=0), 99),
}
#: Those that follow a metric of the validation.
NEED_VALIDATION = {"EarlyStopping", "BestWeights", "Evaluator"}
#: Those that change what is learnt; the others only look.
ACT = {
    "BatchSizeSchedule",
    "GradientAccumulation",
    "EMA",
    "Freeze",
    "WeightAveraging",
    "GradientClipping",
    "BestWeights",
    "LRFinder",
}
#: Of these metrics no run has the same twice.
CLOCKED = ("samples_per_second", "batches_per_second", "data_seconds_share", "eta_seconds")
EPOCHS, STEPS = 3, 9


def test_every_shipped_callback_is_under_the_contract() -> None:
    assert set(ALL) == {name for name in shipped.__all__ if name[0].isupper()}


def test_the_default_ones_differ_at_each_call() -> None:
    assert not set(map(id, shipped.default_callbacks())) & set(map(id, shipped.default_callbacks()))


@pytest.fixture(autouse=True)
def _wandb_goes_nowhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # W&B's own switch for a run that is not kept; the real files are tested beside this.
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("COMET_AUTO_LOG_DISABLE", "true")
    monkeypatch.setenv("COMET_START_ONLINE", "false")
    yield
    if "WandbLogging" in request.node.name:
        wandb.teardown()  # it remembers the switch


@pytest.fixture(autouse=True)
def _a_collection_visits_the_test_only(request: pytest.FixtureRequest) -> None:
    if "GarbageCollection" in request.node.name:  # hundreds of collections, of all that was imported
        gc.freeze()


@pytest.fixture
def callback(name: str, tmp_path: Path) -> Callback:
    return ALL[name][0](tmp_path)


@pytest.mark.parametrize("name", sorted((ACT | {"EarlyStopping", "Evaluator"}) - {"LRFinder"}))
def test_a_second_trainer_begins_anew(name: str, callback: Callback, tmp_path: Path) -> None:
    later = At(
        "on_train_batch_end",
        lambda trainer: trainer.state.stop("interrupted", now=True),
        lambda trainer: trainer.state.data_epoch == 1,  # after its first batch, of a run with 3 an epoch
    )
    make_trainer([callback]).fit(regression(), regression())
    make_trainer([callback, later]).fit(regression(), regression())
    results = []
    for one in (callback, ALL[name][0](tmp_path / "other")):
        model = make_model(11)
        trainer = make_trainer([one], model=model, max_epochs=EPOCHS)
        trainer.fit(regression(seed=1), regression(seed=2))
        results.append(frozen(trainer))
    assert_same(*results)


@pytest.mark.parametrize("name", ALL)
class TestContract:
    def test_has_its_documented_priority_and_an_example(self, name: str, callback: Callback) -> None:
        assert callback.priority == ALL[name][1]
        assert callback.name == name
        documentation = inspect.getdoc(type(callback)) or ""
        assert "Example::" in documentation
        assert f"{name}(" in documentation.partition("Example::")[2]

    def test_construction_touches_nothing(self, callback: Callback, tmp_path: Path) -> None:
        assert list(tmp_path.iterdir()) == []

    def test_two_fits_and_a_test_work(self, name: str, callback: Callback) -> None:
        trainer = make_trainer([callback], max_epochs=EPOCHS)
        trainer.fit(regression(), regression())
        trainer.plan = Plan(max_epochs=5)
        state = trainer.fit(regression(), regression())
        if name != "LRFinder":  # whose runs leave no trace
            assert (state.epoch, state.stop_reason) == (5, None)
        assert trainer.test(regression())["test_loss"] > 0

    def test_a_run_without_validation_works_unless_the_callback_needs_it(
        self, name: str, callback: Callback
    ) -> None:
        trainer = make_trainer([callback], max_epochs=EPOCHS)
        if name in NEED_VALIDATION:
            with pytest.raises((KeyError, ValueError), match=r"val_loss|no validation set"):
                trainer.fit(regression())
        elif name != "LRFinder":
            assert trainer.fit(regression()).epoch == EPOCHS

    def test_zero_epochs_and_an_interruption_at_once_work(self, name: str, callback: Callback) -> None:
        make_trainer([callback], max_epochs=0).fit(regression(), regression())
        state = make_trainer([callback, interrupt_at(1)]).fit(regression(), regression())
        assert state.stop_reason == ("interrupted" if name != "LRFinder" else None)

    def test_a_run_that_counts_steps_works(self, name: str, tmp_path: Path) -> None:
        trainer = make_trainer([ALL[name][0](tmp_path)], max_epochs=None, max_steps=7, validate_every=2)
        if name == "BatchSizeSchedule":
            with pytest.raises(ValueError, match="validate_every is 2"):
                trainer.fit(regression(), regression())
        else:
            state = trainer.fit(regression(), regression())
            assert (state.step, state.epoch) == ((7, 4) if name != "LRFinder" else (0, 0))

    def test_an_error_of_training_keeps_its_type(self, callback: Callback) -> None:
        def fail(trainer: Any) -> None:
            raise ZeroDivisionError

        trainer = make_trainer([callback, At("on_train_batch_end", fail, lambda t: t.state.data_batch == 2)])
        with pytest.raises(ZeroDivisionError):
            trainer.fit(regression(), regression())
        callback.teardown(trainer)

    def test_state_survives_a_file(self, name: str, callback: Callback, tmp_path: Path) -> None:
        trainer = make_trainer([callback], max_epochs=EPOCHS)
        trainer.fit(regression(), regression())
        fresh = ALL[name][0](tmp_path)
        fresh.load_state_dict(through_file(callback.state_dict()))
        assert_same(fresh.state_dict(), callback.state_dict())

    def test_teardown_twice_and_without_a_fit_does_no_harm(self, callback: Callback) -> None:
        trainer = make_trainer([callback], max_epochs=1)
        callback.teardown(trainer)
        trainer.validate(regression())
        trainer.fit(regression(), regression())
        callback.teardown(trainer)

    def test_declares_what_it_writes(self, callback: Callback) -> None:
        # Some evaluate more often than once an epoch, or call the step themselves.
        losses = {"val": [3.0, 2.0, 2.5, 2.6, 2.7, 2.8, 2.9, 3.0] * 3, "train": [8.0, 7, 6, 5, 4, 3, 2, 1]}
        plain = run_scripted([], **losses, max_epochs=8)
        trainer = run_scripted([callback], **losses, max_epochs=8)
        written = {metric for metrics in trainer.state.history for metric in metrics} - plain.state.metrics.keys()
        assert all(any(fnmatchcase(metric, pattern) for pattern in callback.writes) for metric in written)
        assert {callback.writes_in, callback.reads_in} <= EVENTS.keys()

    def test_declares_what_changes(self, name: str, callback: Callback, tmp_path: Path) -> None:
        """With a checkpoint beside it, and as one of many: the runner would refuse what is not right."""
        others = [] if name == "Checkpoint" else [shipped.Checkpoint(tmp_path / "kept")]
        trainer = make_trainer([callback, *others], max_epochs=2)
        trainer.fit(regression(), regression())

    def test_works_beside_the_default_callbacks(self, name: str, callback: Callback) -> None:
        others = [other for other in shipped.default_callbacks() if other.name != name]
        trainer = make_trainer(
            [callback, *others, shipped.EarlyStopping()][: None if name != "EarlyStopping" else -1]
        )
        trainer.fit(regression(), regression())

    def test_runs_alone_in_a_runner(self, name: str, callback: Callback) -> None:
        assert CallbackRunner([callback]).describe().split() == [str(callback.priority), name]


def build(*callbacks: Callback) -> Trainer:
    model = make_model()
    return make_trainer(
        callbacks,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        metrics={"mae": nn.functional.l1_loss},
        max_epochs=EPOCHS,
    )


def state_of(trainer: Trainer) -> dict[str, Any]:
    state = frozen(trainer)
    for metrics in state["state"]["history"]:
        for metric in CLOCKED:
            metrics.pop(metric, None)
    state["callbacks"].pop("TimeLimit", None)
    state["callbacks"].pop("Throughput", None)
    return state


def fit(*callbacks: Callback) -> Trainer:
    trainer = build(*callbacks)
    trainer.fit(regression(11), regression(7, seed=8))
    return trainer


@cache
def without_callbacks() -> dict[str, Any]:
    return state_of(fit())


@pytest.mark.parametrize("name", sorted(ALL.keys() - ACT))
def test_one_that_looks_changes_nothing_of_what_is_learnt(name: str, tmp_path: Path) -> None:
    state, plain = state_of(fit(ALL[name][0](tmp_path))), without_callbacks()
    for part in ("model", "optimizer"):
        assert_same(state[part], plain[part])
    for metrics, expected in zip(state["state"]["history"], plain["state"]["history"], strict=True):
        assert {key: metrics[key] for key in expected} == expected


@pytest.mark.parametrize("name", sorted(ALL.keys() & ACT - {"BestWeights", "LRFinder"}))
def test_one_that_acts_does(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        assert_same(state_of(fit(ALL[name][0](tmp_path)))["model"], without_callbacks()["model"])


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"LRFinder", "Notifier"}))
def test_a_run_stopped_at_any_batch_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    def make(place: str) -> Callback:
        (tmp_path / place).mkdir(exist_ok=True)
        return ALL[name][0](tmp_path / place)

    whole = fit(make("whole"))
    reference = state_of(whole)
    for batch in range(1, STEPS + 1):
        batches = iter(range(1, STEPS + 1))
        stop = At(
            "on_train_batch_end",
            lambda trainer: trainer.state.stop("interrupted", now=True),
            lambda trainer, batches=batches, batch=batch: next(batches) == batch,
        )
        place = f"{batch}"
        stopped = build(make(place), stop)
        stopped.fit(regression(11), regression(7, seed=8))
        if stopped.state.stop_reason != "interrupted":
            break  # fewer batches than that
        resumed = build(make(place))
        resumed.load_state_dict(through_file(stopped.state_dict()))
        resumed.fit(regression(11), regression(7, seed=8))
        assert_same(state_of(resumed), reference, f"batch {batch}")


@pytest.mark.parametrize("name", ALL)
def test_what_saves_and_what_is_saved_agree_about_the_events(name: str, tmp_path: Path) -> None:
    callback = ALL[name][0](tmp_path)
    assert callback.saves == (name == "Checkpoint")
    assert not callback.saves or all(hook_of(callback, event) for event in SAVED_IN)
