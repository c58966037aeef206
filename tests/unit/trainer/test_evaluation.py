"""Evaluation: several validation sets, their numbers on the state, limits of what is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.metrics import mean_absolute_error, mean_squared_error
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_trainer,
    regression,
    through_file,
)
from trainer import BatchOptions, Trainer, WholeSet
from trainer.callbacks import EarlyStopping, Evaluator
from trainer.metrics.epoch import EpochMetrics

MAIN, HARD = regression(9, seed=4), regression(7, seed=5)


def mean_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().mean()


def by_hand(trainer: Trainer, data: Any) -> tuple[float, float]:
    """Loss and mean error of the model as it is, by scikit-learn."""
    trainer.model.eval()
    with torch.no_grad():
        outputs = trainer.model(data.tensors[0]).numpy()
    targets = data.tensors[1].numpy()
    return mean_squared_error(targets, outputs), mean_absolute_error(targets, outputs)


def with_error(**options: Any) -> Trainer:
    options.setdefault("metrics", {"error": mean_error, "whole": WholeSet(mean_error)})
    options.setdefault("batching", BatchOptions(batch_size=4, eval_batch_size=4))
    return make_trainer(options.pop("callbacks", ()), **options)


# ---- several sets


def test_each_set_has_its_numbers_and_the_first_counts() -> None:
    trainer = with_error()
    trainer.fit(regression(), {"main": MAIN, "hard": HARD})
    for data, prefix in ((MAIN, "val"), (HARD, "val_hard")):
        loss, error = by_hand(trainer, data)
        found = [trainer.state.metrics[f"{prefix}_{name}"] for name in ("loss", "error", "whole")]
        assert found == pytest.approx([loss, error, error], rel=1e-5)
    assert "val_main_loss" not in trainer.state.metrics
    loss, error = by_hand(trainer, HARD)
    assert trainer.test({"plain": MAIN, "hard": HARD})["test_hard_error"] == pytest.approx(error, rel=1e-5)
    assert trainer.validate({"only": HARD})["val_loss"] == pytest.approx(loss, rel=1e-5)


def test_a_second_set_can_be_followed() -> None:
    trainer = with_error(callbacks=[EarlyStopping("val_hard_error", patience=1, min_delta=0.99)], max_epochs=9)
    trainer.fit(regression(), {"main": MAIN, "hard": HARD})
    assert (trainer.state.epoch, trainer.state.stop_reason) == (2, "early_stopping")


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ({}, "the mapping of val data is empty"),
        ({"a": MAIN, "not so": HARD}, "a val set is called 'not so'"),
        ({"a": MAIN, 3: HARD}, "a val set is called 3"),
        ({"a": MAIN, "mean": HARD}, "a set is called 'mean', and val_mean_error could be a number of it"),
        ({"a": MAIN, "b": HARD, "b_c": HARD}, "a set is called 'b', and val_b_c could be a number of it"),
    ],
)
def test_names_that_say_nothing_or_two_things_are_refused(sets: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        with_error(metrics={"mean_error": mean_error}).fit(regression(), sets)


def named_step(*names: str) -> Any:
    """A step that returns 100 under each of these names."""

    def step(model: Any, batch: Any) -> dict[str, Any]:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        return {"loss": loss, **dict.fromkeys(names, loss.detach() * 0 + 100)}

    return step


def test_a_number_of_the_step_that_is_called_as_one_of_another_set_is_refused() -> None:
    sets = {"main": MAIN, "hard": HARD}
    said = "a set is called 'hard', and {}_hard_loss could be a number of it: rename it"
    trainer = make_trainer(step=named_step("hard_loss"))
    with pytest.raises(ValueError, match=said.format("val")):
        trainer.fit(regression(), sets)
    with pytest.raises(ValueError, match=said.format("val")):
        trainer.validate(sets)
    with pytest.raises(ValueError, match=said.format("test")):
        trainer.test(sets)
    evaluator = Evaluator(every_n_steps=1, max_batches=1)
    with pytest.raises(ValueError, match=said.format("val")):
        make_trainer([evaluator], step=named_step("hard_loss")).fit(regression(), sets)
    assert evaluator.history == []


def test_other_numbers_of_the_step_are_each_sets_own() -> None:
    names = ("hard", "hardest_loss", "main_loss")
    trainer = make_trainer(step=named_step(*names), max_epochs=1)
    metrics = trainer.fit(regression(), {"main": MAIN, "hard": HARD, "train": MAIN}).metrics
    for prefix, data in (("val", MAIN), ("val_hard", HARD), ("val_train", MAIN)):
        assert metrics[f"{prefix}_loss"] == pytest.approx(by_hand(trainer, data)[0], rel=1e-5)
        assert [metrics[f"{prefix}_{name}"] for name in names] == [100] * 3


@pytest.mark.parametrize("at", [2, 3, 5])
def test_a_run_with_several_sets_resumes_to_the_bit(at: int) -> None:
    sets = {"main": MAIN, "hard": HARD}
    whole = with_error()
    whole.fit(regression(), sets)
    first = with_error(callbacks=[interrupt_at(at)])
    first.fit(regression(), sets)
    second = with_error()
    second.load_state_dict(through_file(first.state_dict()))
    second.fit(regression(), sets)
    assert_same(frozen(second), frozen(whole))


def test_a_validation_that_broke_off_in_the_second_set_leaves_nothing() -> None:
    failing = [True]

    def fail(trainer: Any) -> None:
        if failing and trainer.state.evaluating == "val_hard":
            failing.clear()
            raise ZeroDivisionError

    trainer = with_error(callbacks=[At("on_validation_batch_end", fail)], max_epochs=1)
    sets = {"main": MAIN, "hard": HARD}
    with pytest.raises(ZeroDivisionError):
        trainer.fit(regression(), sets)
    trainer.fit(regression(), sets)
    assert trainer.state.metrics["val_hard_loss"] == pytest.approx(by_hand(trainer, HARD)[0], rel=1e-5)
    assert trainer.state.metrics["val_loss"] == pytest.approx(by_hand(trainer, MAIN)[0], rel=1e-5)


# ---- the numbers on the state


def test_the_numbers_are_on_the_state_when_an_evaluation_ends() -> None:
    seen: list[tuple[str, dict[str, float]]] = []

    def look(trainer: Any) -> None:
        seen.append((trainer.state.evaluating, dict(trainer.state.evaluated)))

    trainer = with_error(callbacks=[At("on_validation_end", look), At("on_test_end", look)], max_epochs=1)
    trainer.fit(regression(), {"main": MAIN, "hard": HARD})
    tested = trainer.test(HARD)
    assert [name for name, _ in seen] == ["val", "val_hard", "test"]
    recorded = trainer.state.metrics
    assert seen[0][1] == {name: recorded[name] for name in ("val_loss", "val_error", "val_whole")}
    assert seen[1][1] == {name: recorded[name] for name in recorded if name.startswith("val_hard_")}
    assert seen[2][1] == tested


def test_numbers_are_brought_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers: list[int] = []
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        transfers.append(tensor.numel())
        return tolist(tensor)

    trainer = with_error(max_epochs=1, metrics={"error": mean_error})
    monkeypatch.setattr(Tensor, "tolist", counted)
    trainer.fit(regression(), MAIN)
    assert transfers == [8]  # total and weight of four numbers, at the end of the validation


def test_what_comes_after_a_number_was_read_is_in_the_next_reading() -> None:
    metrics = EpochMetrics(torch.device("cpu"))
    for value in (1.0, 2.0, 6.0):
        metrics.record("loss", value)
        metrics.compute()
    assert metrics.compute() == {"loss": 3.0}
    metrics.reset()
    metrics.record("loss", 5.0)
    assert metrics.compute() == {"loss": 5.0}


# ---- how much is used


class Seen:
    """A callback's memory of the first value of each batch, by event."""

    def __init__(self) -> None:
        self.train: list[float] = []
        self.val: list[float] = []

    def callbacks(self) -> list[At]:
        def note(found: list[float]) -> Any:
            return lambda trainer: found.append(float(trainer.state.batch[0][0, 0]))

        return [
            At("on_train_batch_start", note(self.train)),
            At("on_validation_batch_start", note(self.val)),
        ]


@pytest.mark.parametrize(
    "data", [regression(12), DataLoader(regression(12), 4, shuffle=True)], ids=["memory", "loader"]
)
@pytest.mark.parametrize(("limit", "steps"), [(2, 2), (0.4, 1), (0.7, 2), (9, 3), (None, 3)])
def test_limits_bound_each_pass(data: Any, limit: Any, steps: int) -> None:
    seen = Seen()
    options = BatchOptions(batch_size=4, eval_batch_size=4, limit_train_batches=limit, limit_val_batches=limit)
    trainer = with_error(callbacks=seen.callbacks(), batching=options)
    state = trainer.fit(data, regression(12))
    assert (state.step, state.total_steps, state.batches_per_epoch) == (2 * steps, 2 * steps, steps)
    assert len(seen.val) == 2 * steps
    assert len(set(seen.train)) > steps or steps == 1  # a shuffled pass has other batches each time


def test_the_test_set_has_a_limit_of_its_own() -> None:
    trainer = with_error(batching=BatchOptions(eval_batch_size=4, limit_test_batches=1), max_epochs=0)
    expected = by_hand(trainer, torch.utils.data.TensorDataset(*MAIN[:4]))[0]
    assert trainer.test(MAIN)["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.validate(MAIN)["val_loss"] == pytest.approx(by_hand(trainer, MAIN)[0], rel=1e-5)


def test_a_few_batches_are_trained_again_and_again_and_validated() -> None:
    seen = Seen()
    data = DataLoader(regression(40), 4, shuffle=True)
    options = BatchOptions(overfit_batches=2)
    trainer = with_error(callbacks=seen.callbacks(), batching=options, max_epochs=4)
    trainer.fit(data, MAIN)
    assert seen.train == seen.train[:2] * 4
    assert seen.val == seen.train
    assert trainer.state.total_steps == 8


@pytest.mark.parametrize("options", [{"limit_train_batches": 2, "limit_val_batches": 1}, {"overfit_batches": 2}])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_run_on_a_part_resumes_to_the_bit(options: dict[str, Any], at: int) -> None:
    def build(*callbacks: At) -> Trainer:
        return with_error(callbacks=callbacks, batching=BatchOptions(batch_size=4, **options))

    whole, first, second = build(), build(interrupt_at(at)), build()
    whole.fit(regression(), MAIN)
    first.fit(regression(), MAIN)
    second.load_state_dict(through_file(first.state_dict()))
    second.fit(regression(), MAIN)
    assert_same(frozen(second), frozen(whole))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit_train_batches": 0}, "limit_train_batches is 0"),
        ({"limit_val_batches": 1.5}, "limit_val_batches is 1.5"),
        ({"limit_test_batches": True}, "limit_test_batches is True"),
        ({"overfit_batches": 0.5}, "overfit_batches is 0.5"),
    ],
)
def test_a_limit_that_is_none_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BatchOptions(**options)


def test_a_fraction_of_an_unknown_length_is_refused() -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            while True:
                yield regression(1)[0]

    options = BatchOptions(limit_train_batches=0.5)
    with pytest.raises(ValueError, match=r"limit_train_batches is 0\.5, but the data has no length"):
        with_error(batching=options).fit(Endless())
    options = BatchOptions(batch_size=4, limit_train_batches=2)
    assert with_error(batching=options).fit(Endless()).step == 4
