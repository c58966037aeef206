"""Evaluator and SanityValidation: evaluations at other times than an epoch's end, which change nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import l1_loss

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    regression,
    through_file,
)
from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import (
    EMA,
    BestWeights,
    Checkpoint,
    EarlyStopping,
    Evaluator,
    GradientAccumulation,
    GradientMonitor,
    ModelSummary,
    SanityValidation,
    StepMetrics,
)
from trainer.state import OPTIMIZER_STEP

MAIN, HARD = regression(9, seed=4), regression(7, seed=5)
SETS = {"main": MAIN, "hard": HARD}


def run(*callbacks: Callback, data: Any = SETS, checkpoint: Any = None, **options: Any) -> Trainer:
    trainer = make_trainer(callbacks, **options)
    if checkpoint is not None:
        trainer.load_state_dict(through_file(checkpoint))
    trainer.fit(regression(), data)
    return trainer


def steps(evaluator: Evaluator) -> list[float]:
    return [item["step"] for item in evaluator.history]


def without(callback: str, trainer: Trainer) -> dict[str, Any]:
    state = frozen(trainer)
    state["callbacks"].pop(callback, None)
    state["state"]["history"] = [
        {name: value for name, value in epoch.items() if "hard" not in name and "start" not in name}
        for epoch in state["state"]["history"]
    ]
    return state


@pytest.mark.parametrize(
    ("times", "found"),
    [
        ({"every_n_steps": 2}, [2, 4, 6]),
        ({"at_steps": [1, 5]}, [1, 5]),
        ({"at_start": True}, [0]),
        ({"at_end": True}, [6]),
        ({"every_n_steps": 4, "at_steps": [4, 6], "at_start": True, "at_end": True}, [0, 4, 6, 6]),
    ],
)
def test_a_set_is_evaluated_at_its_own_times(times: dict[str, Any], found: list[int]) -> None:
    evaluator = Evaluator("hard", **times)
    trainer = run(evaluator)  # 2 epochs of 3 steps
    assert steps(evaluator) == found
    recorded = [sorted(name for name in epoch if "hard" in name) for epoch in trainer.state.history]
    by_epoch = [{step for step in found if step > 0 and (step - 1) // 3 == epoch} for epoch in (0, 1)]
    start = ["start_val_hard_loss"] if 0 in found else []
    assert recorded == [
        start + ["val_hard_loss"] * bool(by_epoch[0]),
        ["val_hard_loss"] * bool(by_epoch[1]),
    ]


def test_the_numbers_are_those_of_an_evaluation_by_hand() -> None:
    seen: list[float] = []
    measure = At(
        "on_train_batch_end", lambda trainer: seen.append(trainer.validate(HARD)["val_loss"]), priority=29
    )
    evaluator = Evaluator("hard", every_n_steps=1)
    trainer = run(measure, evaluator)
    assert [item["val_hard_loss"] for item in evaluator.history] == seen
    assert [epoch["val_hard_loss"] for epoch in trainer.state.history] == [seen[2], seen[5]]


def test_nothing_else_changes() -> None:
    plain = without("", run(data={"main": MAIN}))
    evaluator = Evaluator("hard", every_n_steps=1, at_start=True, max_batches=1)
    assert_same(without("Evaluator(hard)", run(evaluator)), plain)
    assert_same(without("", run(SanityValidation(), data={"main": MAIN})), plain)


def test_the_first_set_is_evaluated_at_each_epochs_end_too() -> None:
    evaluator = Evaluator(every_n_steps=2, at_start=True)
    trainer = run(evaluator, data=MAIN)
    assert steps(evaluator) == [0, 2, 4, 6]
    assert trainer.state.history[-1]["val_loss"] == evaluator.history[-1]["val_loss"]
    assert list(trainer.state.history[0])[-1] == "start_val_loss"


def test_every_epoch_keeps_a_further_set_at_the_epochs_ends() -> None:
    evaluator = Evaluator("hard", at_steps=[1], every_epoch=True)
    trainer = run(evaluator)
    assert steps(evaluator) == [1]
    assert all(epoch["val_hard_loss"] != evaluator.history[0]["val_hard_loss"] for epoch in trainer.state.history)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_a_run_resumes_to_the_bit_with_its_evaluations(at: int) -> None:
    def callbacks() -> list[Callback]:
        return [Evaluator("hard", every_n_steps=2, at_start=True, at_end=True), SanityValidation(1), EMA(0.7)]

    whole = frozen(run(*callbacks()))
    stopped = run(*callbacks(), interrupt_at(at))
    assert_same(frozen(run(*callbacks(), checkpoint=stopped.state_dict())), whole)


def test_steps_count_not_batches() -> None:
    evaluator = Evaluator("hard", every_n_steps=1)
    run(GradientAccumulation(2), evaluator)
    assert steps(evaluator) == [1, 2, 3, 4]


def test_the_step_of_what_is_left_over_may_be_due(tmp_path: Path) -> None:
    """It comes after the epoch's last batch."""

    def callbacks() -> list[Callback]:
        return [GradientAccumulation(2), Evaluator("hard", every_n_steps=2), EMA(0.7)]

    metrics, evaluator = StepMetrics(tmp_path), Evaluator("hard", every_n_steps=2)
    trainer = run(GradientAccumulation(2), evaluator, EMA(0.7), metrics)
    assert steps(evaluator) == [2, 4]
    assert [epoch["val_hard_loss"] for epoch in trainer.state.history] == [
        item["val_hard_loss"] for item in evaluator.history
    ]
    assert ["val_hard_loss" in record.values for record in metrics.log] == [False, True, False, True]
    assert evaluator.history[-1]["val_hard_loss"] == trainer.validate(HARD)["val_loss"]  # of the average
    whole = frozen(run(*callbacks()))
    stopped = run(*callbacks(), At("on_epoch_end", lambda trainer: trainer.state.stop("interrupted")))
    assert_same(frozen(run(*callbacks(), checkpoint=stopped.state_dict())), whole)


def test_a_run_may_end_with_the_first_evaluation() -> None:
    evaluator = Evaluator("hard", every_n_steps=2, stop_after_first=True)
    trainer = run(evaluator)
    assert (steps(evaluator), trainer.state.step, trainer.state.stop_reason) == ([2], 2, "evaluated")


def test_a_run_may_end_before_it_trains_anything() -> None:
    evaluator, model = Evaluator("hard", at_start=True, stop_after_first=True), make_model().eval()
    trainer = run(evaluator)
    state = trainer.state
    assert (state.stop_reason, state.step, state.batch_index, state.data_batch) == ("evaluated", 0, 0, 0)
    assert state.history == []
    assert_same(dict(trainer.model.state_dict()), dict(model.state_dict()))
    error = nn.functional.mse_loss(model(HARD.tensors[0]), HARD.tensors[1]).item()
    assert evaluator.history == [{"step": 0, "val_hard_loss": pytest.approx(error, rel=1e-6)}]


@pytest.mark.parametrize(("reason", "found"), [("enough", [3]), ("interrupted", []), ("pruned", [])])
def test_the_end_of_a_run_that_ends_early(reason: str, found: list[int], caplog: pytest.LogCaptureFixture) -> None:
    evaluator = Evaluator("hard", at_end=True)
    with caplog.at_level("INFO"):
        run(evaluator, At("on_epoch_end", lambda trainer: trainer.state.stop(reason)))
    assert steps(evaluator) == found
    assert ("step 3: val_hard_loss" in caplog.text) == bool(found)


def test_the_numbers_of_an_early_end_are_saved_and_not_measured_again(tmp_path: Path) -> None:
    def start(*callbacks: Callback) -> Evaluator:
        evaluator = Evaluator("hard", at_end=True)
        trainer = make_trainer([evaluator, Checkpoint(tmp_path, max_overhead=1), *callbacks], max_epochs=9)
        trainer.fit(regression(), SETS, ckpt="last")
        return evaluator

    first = start(At("on_epoch_end", lambda trainer: trainer.state.stop("enough")))
    measured: list[str] = []
    again = start(At("on_validation_start", lambda trainer: measured.append(trainer.state.evaluating)))
    assert again.history == first.history
    assert [item["step"] for item in again.history] == [3]
    assert measured == []


def test_records_of_steps_have_the_numbers(tmp_path: Path) -> None:
    metrics, evaluator = StepMetrics(tmp_path, transfer_every_n_steps=2), Evaluator("hard", every_n_steps=2)
    run(metrics, evaluator)
    found = {record.step: record.values.get("val_hard_loss") for record in metrics.log}
    assert found == {
        step: next((item["val_hard_loss"] for item in evaluator.history if item["step"] == step), None)
        for step in range(1, 7)
    }


def test_a_metric_of_an_evaluator_can_be_followed() -> None:
    followed = EarlyStopping("val_hard_loss", patience=1, min_delta=0.99)
    assert run(Evaluator("hard", every_n_steps=3), followed, max_epochs=9).state.epoch == 2


def test_a_sanity_validation_comes_before_the_first_step_alone() -> None:
    seen: list[tuple[int, str]] = []
    note = At(
        "on_validation_batch_start", lambda trainer: seen.append((trainer.state.step, trainer.state.evaluating))
    )
    run(SanityValidation(1), note, data=SETS)
    assert seen == [(0, "val"), (0, "val_hard"), (3, "val"), (3, "val_hard"), (6, "val"), (6, "val_hard")]


@pytest.mark.parametrize("make", [SanityValidation, ModelSummary])
def test_lazy_modules_draw_the_weights_that_they_draw_without_it(make: Callable[[], Callback]) -> None:
    def lazy(*callbacks: Callback) -> Trainer:
        model = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Dropout(0.3), nn.Linear(6, 1))
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model[3].reset_parameters()  # type: ignore[operator]
        return run(*callbacks, data={"main": MAIN}, model=model)

    assert_same(without("", lazy(make())), without("", lazy()))


def test_a_model_with_lazy_modules_is_evaluated_and_shown_after_its_first_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[tuple[int, str]] = []
    note = At("on_validation_start", lambda trainer: seen.append((trainer.state.step, trainer.state.evaluating)))
    with caplog.at_level("INFO", logger="trainer.callbacks.model_summary"):
        run(SanityValidation(1), ModelSummary(depth=0), note, data=SETS, model=nn.LazyLinear(1), max_epochs=1)
    assert seen == [(1, "val"), (1, "val_hard"), (3, "val"), (3, "val_hard")]
    assert [record.message.split()[-4:] for record in caplog.records] == [["Linear", "4x1", "5", "5"]]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Evaluator("hard"), "no time is given"),
        (lambda: Evaluator("hard", every_n_steps=0), "every_n_steps is 0"),
        (lambda: Evaluator("hard", at_steps=[3, 0.5]), r"a step in at_steps is 0\.5"),  # type: ignore[list-item]
        (lambda: Evaluator("hard", at_end=True, max_batches=0), "max_batches is 0"),
        (lambda: SanityValidation(0), "batches is 0"),
        (
            lambda: run(Evaluator("other", at_end=True)),
            "is called 'other': fit was given 'main', 'hard'",
        ),
        (lambda: run(Evaluator("hard", at_end=True), data=MAIN), "fit was given one without a name"),
        (
            lambda: run(Evaluator(every_n_steps=1), data=None),
            "no validation set for Evaluator: give fit validation",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_what_was_measured_before_the_first_step_is_kept_where_an_epoch_made_no_step() -> None:
    def build(*callbacks: Any) -> Any:
        skipping = At("on_train_batch_start", lambda trainer: trainer.state.skip(OPTIMIZER_STEP))
        return make_trainer([Evaluator(at_start=True), skipping, *callbacks])

    at_the_end = At("on_epoch_end", lambda trainer: trainer.state.stop("interrupted"))
    stopped = build(at_the_end)
    stopped.fit(regression(), MAIN)
    resumed = build()
    resumed.load_state_dict(through_file(stopped.state_dict()))
    resumed.fit(regression(), MAIN)
    whole = build()
    whole.fit(regression(), MAIN)
    assert_same(frozen(resumed), frozen(whole))


def test_with_overfit_batches_every_set_is_the_batches_that_are_trained_on() -> None:
    evaluator = Evaluator("hard", at_end=True)
    trainer = make_trainer([evaluator], batching=BatchOptions(batch_size=4, overfit_batches=1))
    metrics = trainer.fit(regression(), SETS).metrics
    assert metrics["val_hard_loss"] == metrics["val_loss"]


def unchanged(*callbacks: Any, **options: Any) -> Trainer:
    """A run of epochs of 3 steps that leaves the weights as they are."""
    model = nn.Linear(4, 1)
    return make_trainer(callbacks, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), **options)


def test_only_epochs_that_measure_a_metric_count_for_who_monitors_it() -> None:
    def record(trainer: Trainer) -> None:  # each epoch, a number with the same beginning
        trainer.state.metrics["val_hard_gap"] = 0.0

    watching = EarlyStopping("val_hard_loss", patience=2), BestWeights("val_hard_loss")
    other = At("on_epoch_end", record)
    trainer = unchanged(Evaluator("hard", every_n_steps=5), other, *watching, max_epochs=9)
    trainer.fit(regression(), SETS)
    measured = ["val_hard_loss" in epoch for epoch in trainer.state.history]
    assert measured == [False, True, False, True, True]  # steps 5, 10 and 15: the first is the best
    assert trainer.state.stop_reason == "early_stopping"
    assert watching[1].state_dict()["epoch"] == 2


@pytest.mark.parametrize(
    ("monitor", "times", "epoch"),
    [
        ("val_hard_lost", {"every_n_steps": 5}, 2),
        ("val_hard_loss", {"at_start": True}, 1),
        ("val_soft_loss", {"every_n_steps": 5}, 1),
    ],
)
def test_a_metric_that_is_never_measured_is_refused(monitor: str, times: dict[str, Any], epoch: int) -> None:
    trainer = unchanged(Evaluator("hard", **times), EarlyStopping(monitor), max_epochs=4)
    with pytest.raises(KeyError, match=f"no metric is called '{monitor}'; recorded are .*val_loss"):
        trainer.fit(regression(), SETS)
    assert trainer.state.epoch == epoch


def test_a_checkpoint_waits_for_the_metric_it_monitors(tmp_path: Path, caplog: Any) -> None:
    unchanged(Evaluator("hard", every_n_steps=5), Checkpoint(tmp_path, "val_hard_loss")).fit(regression(), SETS)
    assert "val_hard_loss" not in caplog.text
    unchanged(Evaluator("hard", every_n_steps=5), Checkpoint(tmp_path / "other", "val_hard_lost")).fit(
        regression(), SETS
    )
    assert "nothing records 'val_hard_lost'" in caplog.text


def test_a_scheduler_can_not_follow_what_is_measured_at_other_times() -> None:
    trainer = unchanged(Evaluator("hard", every_n_steps=1), scheduler_monitor="val_hard_loss")
    trainer.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer)
    with pytest.raises(ValueError, match="scheduler_monitor is 'val_hard_loss', which no epoch records before"):
        trainer.fit(regression(), SETS)


@pytest.mark.parametrize("broken_at", [1, 2, 3, 6])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_evaluation_that_is_broken_off_is_made_by_the_next_fit(
    error: type[BaseException], broken_at: int, tmp_path: Path
) -> None:
    """At the first, a middle and the last step of an epoch, and of the run: files and numbers are the same."""

    def build(folder: Path, *callbacks: Callback) -> Trainer:
        monitors = [GradientMonitor(), StepMetrics(folder, transfer_every_n_steps=2)]
        return make_trainer([Evaluator("hard", every_n_steps=1), *monitors, *callbacks], metrics={"l1": l1_loss})

    def fail(trainer: Any) -> None:
        broken.append(trainer.state.step)
        raise error

    broken: list[int] = []
    breaks = At(
        "on_validation_batch_end", fail, lambda t: t.state.batch_index and t.state.step == broken_at and not broken
    )
    whole, trainer = build(tmp_path / "whole"), build(tmp_path / "broken", breaks)
    whole.fit(regression(), SETS)
    with pytest.raises(error):
        trainer.fit(regression(), SETS)
    trainer.fit(regression(), SETS)
    assert broken == [broken_at]
    assert_same(frozen(trainer), frozen(whole))
    assert (tmp_path / "broken" / "steps.csv").read_text() == (tmp_path / "whole" / "steps.csv").read_text()


def test_an_earlier_checkpoint_in_the_same_trainer_is_not_evaluated_again() -> None:
    start = make_trainer([], max_epochs=1)
    start.fit(regression(), SETS)
    evaluator = Evaluator("hard", every_n_steps=2)
    trainer = make_trainer([evaluator], max_epochs=3)
    trainer.fit(regression(), SETS)
    before = len(evaluator.history)
    trainer.load_state_dict(start.state_dict())
    trainer.fit(regression(), SETS)
    after = [each["step"] for each in evaluator.history[before:]]
    assert after == [step for step in range(start.state.step + 1, trainer.state.step + 1) if step % 2 == 0]
