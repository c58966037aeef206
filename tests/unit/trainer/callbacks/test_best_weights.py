"""BestWeights: a finished run's model is its best, and an unfinished one resumes as if it were not there."""

import logging
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schedulefree import AdamWScheduleFree
from torch import Tensor

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    one_batch,
    quick,
    regression,
    scripted_trainer,
    splus,
    through_file,
)
from trainer import Callback, Trainer
from trainer.callbacks import Checkpoint, NaNDetection, OptimizerMode
from trainer.callbacks.best_weights import BestWeights
from trainer.callbacks.ema import EMA
from trainer.checkpoint.manager import newest_checkpoint, snapshot
from trainer.state import best_epoch

EPOCHS, BATCHES = 4, 3
STEPS = EPOCHS * BATCHES


class Ends(Callback):
    """Keeps the model of each epoch's end."""

    transient = ("models",)

    def __init__(self) -> None:
        self.models: list[dict[str, Tensor]] = []

    def on_epoch_end(self, trainer: Any) -> None:
        self.models.append(snapshot(trainer.model.state_dict()))


def spoil(trainer: Any) -> None:
    """Makes the last epoch worse than those before it, whatever the machine's arithmetic."""
    if trainer.state.epoch == EPOCHS - 1:
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(10.0)


def build(*callbacks: Callback, seed: int = 7, **options: Any) -> Trainer:
    spoils = At("on_train_epoch_end", spoil)
    return make_trainer((*callbacks, spoils), model=make_model(seed), **{"max_epochs": EPOCHS, **options})


def fit(trainer: Trainer) -> Trainer:
    trainer.fit(regression(), regression(9, seed=8))
    return trainer


def scripted(callbacks: list[Callback], val: list[float], parent: Trainer | None = None) -> tuple[Trainer, Ends]:
    """A run, or a fork, whose validation losses are given and whose weight is the number of its epoch."""

    def count(trainer: Any) -> None:
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(trainer.state.epoch + 1)

    ends = Ends()
    epochs = len(val) + (0 if parent is None else parent.state.epoch)
    trainer = scripted_trainer([*callbacks, ends, At("on_train_epoch_end", count)], val, max_epochs=epochs)
    if parent is not None:
        trainer.load_state_dict(through_file(parent.state_dict()), fork=True)
    trainer.fit(one_batch(), one_batch())
    return trainer, ends


def weight(trainer: Trainer) -> float:
    return next(trainer.model.parameters()).item()


@cache
def whole() -> dict[str, Any]:
    return frozen(fit(build(BestWeights())))


def test_parameters_and_buffers_of_the_best_epoch_come_back() -> None:
    ends = Ends()
    trainer = fit(build(BestWeights(), ends))
    best = best_epoch(trainer.state.history, "val_loss", "min")
    assert best is not None
    assert best < EPOCHS
    assert_same(dict(trainer.model.state_dict()), ends.models[best - 1])
    assert trainer.validate(regression(9, seed=8))["val_loss"] == trainer.state.history[best - 1]["val_loss"]


@quick(30)
@given(
    losses=st.lists(st.sampled_from([0.5, 1.0, 2.0, math.nan, math.inf, -math.inf]), min_size=1, max_size=8),
    mode=st.sampled_from(["min", "max"]),
)
def test_the_best_is_what_the_history_says(losses: list[float], mode: Any) -> None:
    trainer, _ = scripted([BestWeights(mode=mode)], losses)
    assert weight(trainer) == (best_epoch(trainer.state.history, "val_loss", mode) or len(losses))


def test_a_run_that_diverged_ends_with_its_best_finite_epoch() -> None:
    trainer, _ = scripted([NaNDetection(), BestWeights()], [2.0, 1.0, 3.0, math.nan])
    assert (trainer.state.stop_reason, weight(trainer)) == ("diverged", 2)


def test_a_run_that_diverged_inside_an_epoch_does_too() -> None:
    def break_loss(trainer: Any) -> None:
        trainer.state.loss = trainer.state.loss * math.nan

    ends = Ends()
    breaks = At("on_after_forward", break_loss, lambda t: (t.state.epoch, t.state.batch_index) == (2, 0))
    trainer = fit(build(NaNDetection(every_n_batches=2), BestWeights(), ends, breaks))
    assert (trainer.state.stop_reason, trainer.state.epoch, trainer.state.batch_index) == ("diverged", 2, 2)
    best = best_epoch(trainer.state.history, "val_loss", "min")
    assert best is not None
    assert_same(dict(trainer.model.state_dict()), ends.models[best - 1])


@pytest.mark.parametrize("kind", [AdamWScheduleFree, splus])
def test_evaluation_keeps_the_best_of_a_run_that_diverged_with_weights_of_its_own_for_it(kind: Any) -> None:
    def break_loss(trainer: Any) -> None:
        trainer.state.loss = trainer.state.loss * math.nan

    model, best, ends = make_model(), BestWeights(), Ends()
    breaks = At("on_after_forward", break_loss, lambda t: (t.state.epoch, t.state.batch_index) == (2, 1))
    callbacks = [NaNDetection(every_n_batches=1), OptimizerMode(), best, ends, breaks]
    trainer = fit(make_trainer(callbacks, model=model, optimizer=kind(model.parameters(), lr=0.05), max_epochs=4))
    assert (trainer.state.stop_reason, trainer.state.epoch, trainer.state.batch_index) == ("diverged", 2, 2)
    number = best_epoch(trainer.state.history, "val_loss", "min") or 0
    evaluated = trainer.validate(regression(9, seed=8))
    trainer.predict(regression())
    assert_same(dict(model.state_dict()), ends.models[number - 1])
    assert evaluated["val_loss"] == trainer.state.history[number - 1]["val_loss"]


@pytest.mark.parametrize("reason", ["early_stopping", "pruned"])
def test_a_run_that_was_ended_has_its_best(reason: str) -> None:
    stop = At("on_epoch_end", lambda t: t.state.stop(reason), lambda t: t.state.epoch == 3)
    trainer, _ = scripted([BestWeights(), stop], [2.0, 1.0, 3.0, 0.5])
    assert (trainer.state.epoch, weight(trainer)) == (3, 2)


def test_no_finite_value_leaves_the_last_weights_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    trainer, _ = scripted([BestWeights()], [math.nan, math.nan])
    assert weight(trainer) == 2
    assert "no epoch had a finite val_loss" in caplog.text


def test_the_checkpoint_holds_the_last_epoch(tmp_path: Path) -> None:
    ends = Ends()
    fit(build(BestWeights(), Checkpoint(tmp_path, max_overhead=1), ends))
    newest = newest_checkpoint([tmp_path])
    assert newest is not None
    assert_same(dict(newest[1]["model"]), ends.models[-1])


@pytest.mark.parametrize("step", range(1, STEPS + 1))
@pytest.mark.parametrize("now", [True, False])
def test_a_run_stopped_anywhere_goes_on_to_the_same_bits(step: int, now: bool) -> None:
    stopped = fit(build(BestWeights(), interrupt_at(step, now=now)))
    resumed = build(BestWeights(), seed=99)
    resumed.load_state_dict(through_file(stopped.state_dict()))
    assert_same(frozen(fit(resumed)), whole())
    assert_same(frozen(fit(stopped)), whole())


def test_a_fit_that_stops_inside_an_epoch_keeps_its_weights_whatever_the_reason() -> None:
    last: list[dict[str, Tensor]] = []

    def stop(trainer: Any) -> None:
        trainer.state.stop("out of time", now=True)
        last.append(snapshot(trainer.model.state_dict()))

    trainer = fit(build(BestWeights(), At("on_train_batch_end", stop, lambda t: t.state.step == BATCHES + 1)))
    assert (trainer.state.epoch, trainer.state.batch_index) == (1, 1)
    assert_same(dict(trainer.model.state_dict()), last[0])


def test_a_failed_fit_keeps_its_weights() -> None:
    def fail(trainer: Any) -> None:
        raise OSError("full")

    ends = Ends()
    trainer = build(BestWeights(), ends, At("on_epoch_end", fail, lambda t: t.state.epoch == EPOCHS))
    with pytest.raises(OSError, match="full"):
        fit(trainer)
    assert_same(dict(trainer.model.state_dict()), ends.models[-1])


@pytest.mark.parametrize("error", [OSError("the disk is full"), KeyboardInterrupt()])
@pytest.mark.parametrize("reason", [None, "early_stopping", "interrupted"])
def test_a_fit_whose_end_failed_keeps_its_weights_and_the_next_one_ends_it(
    reason: str | None, error: BaseException, tmp_path: Path
) -> None:
    def fail(trainer: Any) -> None:
        raise errors.pop()

    def stop(trainer: Any) -> None:
        if reason is not None and trainer.state.epoch == EPOCHS:
            trainer.state.stop(reason)

    errors, ends = [error], Ends()
    failing = At("on_fit_end", fail, lambda trainer: bool(errors))
    trainer = build(BestWeights(), Checkpoint(tmp_path, every_n_epochs=9), ends, At("on_epoch_end", stop), failing)
    with pytest.raises(type(error)):
        fit(trainer)
    assert trainer.state.stop_reason == ("interrupted" if isinstance(error, KeyboardInterrupt) else "error")
    assert_same(snapshot(trainer.model.state_dict()), ends.models[-1])
    for file in tmp_path.iterdir():  # as if that had failed: it is the next one's to write
        file.unlink()
    fit(trainer)
    assert (len(ends.models), trainer.state.stop_reason) == (EPOCHS, None if reason == "interrupted" else reason)
    found = newest_checkpoint([tmp_path])
    assert found is not None
    assert_same(found[1]["model"], ends.models[-1])
    best = best_epoch(trainer.state.history, "val_loss", "min")
    assert best != EPOCHS
    assert_same(snapshot(trainer.model.state_dict()), ends.models[(best or 0) - 1])


def test_ctrl_c_at_the_last_epoch_s_end_keeps_the_weights() -> None:
    def interrupt(trainer: Any) -> None:
        raise KeyboardInterrupt

    ends = Ends()
    last = At("on_epoch_end", interrupt, lambda trainer: trainer.state.epoch == EPOCHS, priority=99)
    trainer = build(BestWeights(), ends, last)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    assert_same(snapshot(trainer.model.state_dict()), ends.models[-1])


def test_a_skipped_validation_is_passed_over_and_a_wrong_name_is_not() -> None:
    skip = At("on_train_epoch_end", lambda t: t.state.skip("validation"), lambda t: t.state.epoch != 1)
    trainer, _ = scripted([BestWeights(), skip], [2.0, 1.0, 3.0])
    assert weight(trainer) == 2
    with pytest.raises(KeyError, match="no metric is called 'val_acc'"):
        scripted([BestWeights("val_acc")], [1.0])


def test_the_weights_of_a_moving_average_are_the_evaluated_ones() -> None:
    ends = Ends()
    trainer = fit(build(EMA(0.7), BestWeights(), ends))
    best = best_epoch(trainer.state.history, "val_loss", "min")
    assert best is not None
    assert_same(dict(trainer.model.state_dict()), ends.models[best - 1])
    assert trainer.validate(regression(9, seed=8))["val_loss"] == trainer.state.history[best - 1]["val_loss"]


def test_a_callback_that_serves_a_second_trainer_begins_anew() -> None:
    callback = BestWeights()
    scripted([callback], [0.1])
    trainer, _ = scripted([callback], [2.0, 1.0, 3.0])
    assert weight(trainer) == 2


def test_a_fork_ends_with_the_best_of_its_own_epochs() -> None:
    first, _ = scripted([BestWeights()], [0.9, 0.1])
    fork, _ = scripted([BestWeights()], [0.5, 0.3, 0.4], parent=first)
    assert best_epoch(fork.state.history, "val_loss", "min", after=fork.state.inherited) == weight(fork) == 4


def test_validate_teardown_and_no_epoch_touch_nothing(caplog: pytest.LogCaptureFixture) -> None:
    callback = BestWeights()
    trainer = fit(build(callback))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    trainer.test(regression())
    callback.teardown(trainer)
    assert all(not parameter.any() for parameter in trainer.model.parameters())
    with caplog.at_level(logging.WARNING):
        fit(build(BestWeights(), max_epochs=0))
    assert not caplog.records


def test_the_state_survives_a_file() -> None:
    callback, fresh = BestWeights(), BestWeights()
    fit(build(callback))
    fresh.load_state_dict(through_file(callback.state_dict()))
    assert_same(fresh.state_dict(), callback.state_dict())
    empty = BestWeights(mode="max")
    empty.load_state_dict(through_file(BestWeights(mode="max").state_dict()))
    assert empty.state_dict() == {"best": -math.inf, "epoch": 0, "model": None}


def test_a_wrong_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode is 'low': give 'min' or 'max'"):
        BestWeights(mode="low")  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", ["interrupted", "paused"])
def test_a_request_to_resume_later_that_comes_with_the_last_epoch_leaves_nothing_to_resume(reason: str) -> None:
    stop = At("on_epoch_end", lambda t: t.state.stop(reason), lambda t: t.state.epoch == 3)
    trainer, _ = scripted([BestWeights(), stop], [2.0, 1.0, 3.0])
    assert weight(trainer) == 2


def test_without_validation_data_the_error_says_what_to_do() -> None:
    with pytest.raises(KeyError, match=r"'val_loss'; recorded are .*lr: give fit validation data"):
        build(BestWeights()).fit(regression())
