"""BatchSizeSchedule: which pass has which batches, and what becomes of the learning rate."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    quick,
    regression,
    through_file,
)
from trainer import BatchOptions, Trainer
from trainer.callbacks import Checkpoint
from trainer.callbacks.batch_size_schedule import BatchSizeSchedule
from trainer.callbacks.gradient_accumulation import GradientAccumulation
from trainer.data.plan import Plan
from trainer.lr_schedulers import Warmup

SAMPLES = 12
SIZES = {0: 2, 1: 4, 3: 6}  # 6, 3, 3, 2 batches a pass


class Items(Dataset[Any]):
    """The data as any data set, which goes through a DataLoader."""

    def __init__(self) -> None:
        self.data = regression(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from regression(SAMPLES)


def watch(seen: list[Any], value: Callable[[Any], Any]) -> At:
    return At("on_after_optimizer_step", lambda trainer: seen.append(value(trainer)))


def rates(trainer: Any) -> list[float]:
    return [float(group["lr"]) for group in trainer.optimizer.param_groups]


def build(
    *callbacks: Any,
    scheduler: Callable[[Optimizer], Any] | None = None,
    interval: str = "epoch",
    seed: int = 7,
    **options: Any,
) -> Trainer:
    model = make_model(seed)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.08}, {"params": parameters[2:], "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.08, momentum=0.9)
    options.setdefault("max_epochs", 4)
    return make_trainer(
        callbacks,
        model=model,
        optimizer=optimizer,
        scheduler=None if scheduler is None else scheduler(optimizer),
        scheduler_interval=interval,
        seed=3,
        **options,
    )


# ---- sizes


@pytest.mark.parametrize("data", [regression(SAMPLES), Items()])
def test_each_pass_has_its_size(data: Any) -> None:
    seen: list[tuple[int, int]] = []
    trainer = build(
        BatchSizeSchedule(SIZES),
        watch(seen, lambda trainer: (trainer.state.data_epoch, len(trainer.state.batch[0]))),
    )
    trainer.fit(data, regression(5))
    assert seen == [(0, 2)] * 6 + [(1, 4)] * 3 + [(2, 4)] * 3 + [(3, 6)] * 2
    assert trainer.state.batches_per_epoch == 2


@quick(25)
@given(st.dictionaries(st.integers(1, 4), st.integers(1, SAMPLES), max_size=3), st.integers(1, SAMPLES))
def test_every_sample_is_seen_once_a_pass_in_batches_of_its_size(later: dict[int, int], first: int) -> None:
    sizes = {**later, 0: first}
    seen: dict[int, list[int]] = {}
    watcher = At(
        "on_train_batch_end",
        lambda trainer: seen.setdefault(trainer.state.data_epoch, []).append(len(trainer.state.batch[0])),
    )
    trainer = make_trainer([BatchSizeSchedule(sizes), watcher], model=torch.nn.Linear(4, 1), max_epochs=5)
    trainer.fit(regression(SAMPLES))
    for data_epoch, found in seen.items():
        size = sizes[max(start for start in sizes if start <= data_epoch)]
        assert sum(found) == SAMPLES
        assert found[:-1] == [size] * (SAMPLES // size - (SAMPLES % size == 0))
    assert len(seen) == 5


def test_a_pass_that_is_cut_short_counts_as_one() -> None:
    seen: list[int] = []
    stop = At("on_train_batch_end", lambda trainer: trainer.state.stop_epoch())
    build(BatchSizeSchedule(SIZES), stop, watch(seen, lambda trainer: len(trainer.state.batch[0]))).fit(
        regression(SAMPLES)
    )
    assert seen == [2, 4, 4, 6]


def test_data_in_batches_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="comes in batches of its own"):
        build(BatchSizeSchedule(SIZES)).fit(DataLoader(Items(), 4))


@pytest.mark.parametrize("every", [2, 0.5])
def test_epochs_that_are_no_passes_are_refused(every: float) -> None:
    trainer = build(BatchSizeSchedule(SIZES), validate_every=every)
    with pytest.raises(ValueError, match=f"validate_every is {every}: a batch size by passes can only change"):
        trainer.fit(regression(SAMPLES))
    assert trainer.state.step == 0


# ---- learning rates

SCHEDULERS: dict[str, tuple[str, Callable[[Optimizer], Any] | None]] = {
    "none": ("epoch", None),
    "step": ("epoch", lambda optimizer: StepLR(optimizer, 2, 0.5)),
    "cosine": ("epoch", lambda optimizer: CosineAnnealingLR(optimizer, 5)),
    "lambda": ("epoch", lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step)),
    "cosine by step": ("step", lambda optimizer: CosineAnnealingLR(optimizer, 20)),
    "lambda by step": ("step", lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step)),
    "one cycle": ("step", lambda optimizer: OneCycleLR(optimizer, [0.08, 0.02], total_steps=30)),
    "warm-up": ("step", lambda optimizer: Warmup(optimizer, CosineAnnealingLR(optimizer, 15), 8)),
    "plateau": ("epoch", lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=0.99)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("scaling", ["none", "linear", "sqrt"])
def test_rates_are_the_schedulers_times_the_ratio_to_the_first_size(name: str, scaling: Any) -> None:
    interval, scheduler = SCHEDULERS[name]
    found: list[tuple[int, list[float]]] = []
    expected: list[list[float]] = []
    build(
        BatchSizeSchedule(SIZES, scaling),
        watch(found, lambda trainer: (len(trainer.state.batch[0]), rates(trainer))),
        scheduler=scheduler,
        interval=interval,
    ).fit(regression(SAMPLES), regression(5))
    if name == "plateau":  # which follows the losses, and these are others with other learning rates
        assert found[0][1] == [0.08, 0.02]
        factor = {"none": 1, "linear": 2, "sqrt": math.sqrt(2)}[scaling]
        assert any(pair == pytest.approx([0.08 * factor, 0.02 * factor]) for size, pair in found if size == 4)
        return
    build(
        BatchSizeSchedule(SIZES),
        watch(expected, rates),
        scheduler=scheduler,
        interval=interval,
    ).fit(regression(SAMPLES), regression(5))
    assert len(found) == len(expected) == 14
    for (size, pair), plain in zip(found, expected, strict=True):
        factor = {"none": 1.0, "linear": size / 2, "sqrt": math.sqrt(size / 2)}[scaling]
        assert pair == pytest.approx([factor * rate for rate in plain], rel=1e-9)


def test_the_recorded_rate_is_the_one_of_the_epoch() -> None:
    trainer = build(BatchSizeSchedule(SIZES, "linear"))
    trainer.fit(regression(SAMPLES))
    assert [metrics["lr"] for metrics in trainer.state.history] == pytest.approx([0.08, 0.16, 0.16, 0.24])


def test_sizes_may_shrink_and_come_back() -> None:
    trainer = build(BatchSizeSchedule({0: 4, 1: 2, 2: 4}, "linear"))
    trainer.fit(regression(SAMPLES))
    assert [metrics["lr"] for metrics in trainer.state.history] == [0.08, 0.04, 0.08, 0.08]


def test_rates_are_scaled_by_the_sizes_of_the_schedule_not_the_trainers() -> None:
    seen: list[tuple[int, float]] = []
    trainer = build(
        BatchSizeSchedule({0: 6}, "linear"),
        watch(seen, lambda trainer: (len(trainer.state.batch[0]), rates(trainer)[0])),
    )
    trainer.fit(regression(SAMPLES))
    assert set(seen) == {(6, 0.08)}


def test_a_run_that_meets_the_schedule_late_is_scaled_once() -> None:
    plain = build(max_epochs=1)
    plain.fit(regression(SAMPLES))
    late = build(BatchSizeSchedule(SIZES, "linear"), max_epochs=3)
    late.load_state_dict(through_file(plain.state_dict()))
    late.fit(regression(SAMPLES))
    assert [metrics["lr"] for metrics in late.state.history] == pytest.approx([0.08, 0.16, 0.16])


def test_accumulation_counts_the_batches_of_each_size() -> None:
    trainer = build(BatchSizeSchedule(SIZES), GradientAccumulation(2))
    totals: list[Any] = []
    trainer.callbacks.register("on_fit_start", lambda trainer: totals.append(trainer.state.total_steps))
    trainer.fit(regression(SAMPLES))
    assert totals == [4 * 3]
    assert trainer.state.step == 3 + 2 + 2 + 1


# ---- resuming


def fit(name: str, *callbacks: Any, checkpoint: dict[str, Any] | None = None, data: Any = None) -> Trainer:
    interval, scheduler = SCHEDULERS[name]
    trainer = build(
        BatchSizeSchedule(SIZES, "sqrt"),
        *callbacks,
        scheduler=scheduler,
        interval=interval,
        seed=99 if checkpoint else 7,
    )
    if checkpoint is not None:
        trainer.load_state_dict(checkpoint)
    trainer.fit(data or regression(SAMPLES), regression(5, seed=8))
    return trainer


@pytest.mark.parametrize("name", ["none", "cosine", "one cycle", "warm-up", "plateau"])
def test_a_run_goes_on_to_the_same_bits_from_any_batch(name: str) -> None:
    whole = frozen(fit(name))
    for step in range(1, 15) if name in {"none", "warm-up"} else (3, 6, 7, 9, 12, 13):
        stopped = fit(name, interrupt_at(step))
        assert stopped.state.step == step
        assert_same(frozen(fit(name, checkpoint=through_file(stopped.state_dict()))), whole)


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_run_goes_on_to_the_same_bits_from_the_end_of_an_epoch(epoch: int) -> None:
    end = At(
        "on_epoch_end",
        lambda trainer: trainer.state.stop("interrupted"),
        lambda trainer: trainer.state.epoch == epoch,
    )
    stopped = fit("cosine", end, data=Items())
    assert stopped.state.epoch == epoch
    resumed = fit("cosine", checkpoint=through_file(stopped.state_dict()), data=Items())
    assert_same(frozen(resumed), frozen(fit("cosine", data=Items())))


def test_the_same_trainer_goes_on_and_may_be_made_longer(tmp_path: Any) -> None:
    callback = BatchSizeSchedule(SIZES, "sqrt")
    trainer = build(
        callback, interrupt_at(2, 7, 9), Checkpoint(tmp_path), scheduler=SCHEDULERS["cosine"][1], max_epochs=2
    )
    for _ in range(3):
        trainer.fit(regression(SAMPLES), regression(5, seed=8))
    trainer.plan = Plan(max_epochs=4)
    trainer.fit(regression(SAMPLES), regression(5, seed=8))
    assert trainer.state.step == 14
    assert_same(frozen(trainer)["model"], frozen(fit("cosine"))["model"])
    assert trainer.validate(regression(5))["val_loss"] > 0
    callback.teardown(trainer)
    callback.teardown(trainer)


# ---- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": {}}, "give the one to begin with under 0"),
        ({"sizes": {1: 4}}, r"sizes is \{1: 4\}: give the one to begin with under 0"),
        ({"sizes": {0: 0}}, "sizes has 0: 0: give counts from 0 on, and numbers of at least 1"),
        ({"sizes": {0: 4, -1: 8}}, "sizes has -1: 8"),
        ({"sizes": {0: 4}, "lr_scaling": "root"}, "lr_scaling is 'root': give 'none', 'linear' or 'sqrt'"),
    ],
)
def test_it_refuses_what_is_no_schedule(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSizeSchedule(**arguments)


def test_text_will_do_for_numbers() -> None:
    assert BatchSizeSchedule({"10": 64, "0": 32}).sizes == {0: 32, 10: 64}


@pytest.mark.parametrize("sizes", [{"zero": 32}, {"0": 32.5}, {0: 32, "1.5": 64}, {0: "many"}])
def test_what_is_no_whole_number_is_named(sizes: Any) -> None:
    with pytest.raises(ValueError, match="is not a whole number"):
        BatchSizeSchedule(sizes)


# ---- by steps

STEPS = {0: 2, 3: 4, 5: 5}  # a pass of 12 samples: 2 2 2 4 2, then 4 (the 5th step is the last of the pass) …


def by_step(*callbacks: Any, data: Any = None, checkpoint: Any = None, **options: Any) -> tuple[Any, list[Tensor]]:
    seen: list[Tensor] = []
    look = At("on_before_forward", lambda trainer: seen.append(trainer.state.batch[1].flatten()))
    schedule = BatchSizeSchedule(STEPS, "sqrt", unit="step")
    trainer = make_trainer([schedule, look, *callbacks], **options)
    if checkpoint is not None:
        trainer.load_state_dict(through_file(checkpoint))
    trainer.fit(data or regression(SAMPLES), regression(SAMPLES))
    return trainer, seen


@pytest.mark.parametrize("data", [regression(SAMPLES), Items()], ids=["memory", "loader"])
def test_the_size_changes_inside_a_pass_and_each_sample_comes_once_in_its_order(data: Any) -> None:
    trainer, seen = by_step(data=data)
    assert [len(batch) for batch in seen] == [2, 2, 2, 4, 2, 5, 5, 2]
    plain: list[Tensor] = []
    look = At("on_before_forward", lambda trainer: plain.append(trainer.state.batch[1].flatten()))
    make_trainer([look]).fit(data)
    assert torch.equal(torch.cat(seen), torch.cat(plain))
    assert rates(trainer) == pytest.approx([0.05 * math.sqrt(5 / 2)])
    assert (trainer.state.step, trainer.state.total_steps) == (8, 8)


@pytest.mark.parametrize("options", [{}, {"max_epochs": 3, "validate_every": 2}], ids=["passes", "steps"])
@pytest.mark.parametrize("data", [regression(SAMPLES), Items()], ids=["memory", "loader"])
def test_a_run_by_steps_resumes_to_the_bit(data: Any, options: dict[str, Any]) -> None:
    whole = by_step(data=data, **options)[0]
    for at in range(1, 8):
        stopped = by_step(interrupt_at(at), data=data, **options)[0]
        resumed = by_step(data=data, checkpoint=stopped.state_dict(), **options)[0]
        assert_same(frozen(resumed), frozen(whole))


def test_the_step_of_what_is_left_to_accumulate_may_change_the_size() -> None:
    def accumulating(*callbacks: Any, checkpoint: Any = None) -> tuple[Any, list[int]]:
        seen: list[int] = []
        look = At("on_before_forward", lambda trainer: seen.append(len(trainer.state.batch[0])))
        schedule = BatchSizeSchedule({0: 2, 2: 4}, "linear", unit="step")
        trainer = make_trainer([schedule, GradientAccumulation(5), look, *callbacks])
        if checkpoint is not None:
            trainer.load_state_dict(through_file(checkpoint))
        trainer.fit(regression(SAMPLES))
        return trainer, seen

    whole, seen = accumulating()
    assert seen == [2] * 6 + [4] * 3  # the second step comes after the last batch of the first pass
    assert [metrics["lr"] for metrics in whole.state.history] == [0.05, 0.1]
    stopped, _ = accumulating(At("on_epoch_end", lambda trainer: trainer.state.stop("interrupted")))
    assert_same(frozen(accumulating(checkpoint=stopped.state_dict())[0]), frozen(whole))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"validate_every": 0.5}, "a fraction of a pass is no fixed number of batches"),
        ({"batching": BatchOptions(limit_train_batches=2)}, "that a limit cuts"),
        ({"data": DataLoader(regression(SAMPLES), 4)}, "comes in batches of its own"),
        ({"data": Endless()}, "the batch size of iterable data can't change inside a pass"),
    ],
)
def test_where_the_size_can_not_change_inside_a_pass(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        by_step(**options)


def test_batches_that_are_trained_on_again_and_again_are_validated_in_their_new_size() -> None:
    model = torch.nn.Linear(4, 1)
    trainer = make_trainer(
        [BatchSizeSchedule({0: 2, 1: 5, 2: 3})],
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        batching=BatchOptions(batch_size=2, overfit_batches=1),
        max_epochs=3,
    )
    history = trainer.fit(regression(), regression()).history
    assert [epoch["val_loss"] for epoch in history] == [epoch["train_loss"] for epoch in history]
    assert len({epoch["train_loss"] for epoch in history}) == 3
