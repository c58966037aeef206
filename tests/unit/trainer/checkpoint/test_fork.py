"""A fork trains on where another run's epoch has ended, with hyperparameters and a seed of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    one_batch,
    regression,
    scripted_trainer,
    through_file,
)
from trainer import BatchOptions, Trainer
from trainer.callbacks import EMA, Checkpoint, EarlyStopping
from trainer.checkpoint.files import list_checkpoints
from trainer.lr_schedulers import Warmup
from trainer.state import best_epoch

EPOCHS, FORKED, STEPS = 6, 2, 3
SCHEDULES: dict[str, Callable[[Optimizer, float], LRScheduler]] = {
    "cosine": lambda optimizer, _: CosineAnnealingLR(optimizer, EPOCHS),
    "exponential": lambda optimizer, _: ExponentialLR(optimizer, 0.7),
    "steps": lambda optimizer, _: StepLR(optimizer, 2, 0.5),
    "lambda": lambda optimizer, _: LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "one cycle": lambda optimizer, rate: OneCycleLR(optimizer, rate, total_steps=EPOCHS + 1),
    "warm-up": lambda optimizer, _: Warmup(optimizer, CosineAnnealingLR(optimizer, 4), 3),
    "sequence": lambda optimizer, _: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, 1.0, 3), ExponentialLR(optimizer, 0.5)], [3]
    ),
    "chain": lambda optimizer, _: ChainedScheduler(
        [LinearLR(optimizer, 0.5, 1.0, 4), ExponentialLR(optimizer, 0.9)], optimizer
    ),
    "plateau": lambda optimizer, _: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0),
}


def made(
    rate: float = 0.05, *, schedule: str = "cosine", epochs: int = EPOCHS, callbacks: Any = (), **options: Any
) -> Trainer:
    model = make_model()
    given = {"momentum": 0.9, "weight_decay": 0.0, **options.pop("optimizer", {})}
    optimizer = SGD(model.parameters(), lr=rate, **given)
    scheduler = SCHEDULES[schedule](optimizer, rate)
    return make_trainer(
        callbacks, model=model, optimizer=optimizer, scheduler=scheduler, max_epochs=epochs, **options
    )


def fitted(trainer: Trainer) -> Trainer:
    trainer.fit(regression(), regression(9, seed=8))
    return trainer


def parent(**options: Any) -> dict[str, Any]:
    """The checkpoint of a run of two epochs."""
    return through_file(fitted(made(epochs=FORKED, **options)).state_dict())


def rates(trainer: Trainer) -> list[float]:
    return [metrics["lr"] for metrics in trainer.state.history]


def test_its_first_epoch_is_that_of_torch_alone_with_the_new_values() -> None:
    """One batch an epoch and nothing random: the order of the samples changes no more than the last bits."""
    data, held_out = regression(), regression(9, seed=8)

    def trainer(rate: float, decay: float, epochs: int) -> Trainer:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        optimizer = AdamW(model.parameters(), lr=rate, weight_decay=decay, betas=(0.8, 0.99))
        batching = BatchOptions(batch_size=12)
        return make_trainer(model=model, optimizer=optimizer, max_epochs=epochs, batching=batching)

    first = trainer(0.05, 0.1, 3)
    first.fit(data, held_out)
    fork = trainer(0.02, 0.3, 4)
    fork.load_state_dict(through_file(first.state_dict()), fork=True)
    fork.fit(data, held_out)

    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    model.load_state_dict(first.model.state_dict())
    optimizer = AdamW(model.parameters(), lr=1.0)
    optimizer.load_state_dict(first.optimizer.state_dict())
    optimizer.param_groups[0] |= {"lr": 0.02, "weight_decay": 0.3, "fused": None}
    loss = nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1])
    loss.backward()
    optimizer.step()
    for one, other in zip(fork.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        value = nn.functional.mse_loss(model(held_out.tensors[0]), held_out.tensors[1])
    assert fork.state.history[-1]["val_loss"] == pytest.approx(float(value), rel=1e-5)
    assert fork.state.history[-1]["lr"] == 0.02


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_equal_values_it_is_the_other_run_that_trains_on(schedule: str) -> None:
    resumed, fork = made(schedule=schedule), made(schedule=schedule)
    resumed.load_state_dict(parent(schedule=schedule))
    fork.load_state_dict(parent(schedule=schedule), fork=True)
    one, other = frozen(fitted(resumed)), frozen(fitted(fork))
    assert (one["state"].pop("inherited"), other["state"].pop("inherited")) == (0, FORKED)
    assert_same(one, other)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_its_learning_rate_is_where_its_own_schedule_would_be(schedule: str) -> None:
    alone = rates(fitted(made(0.02, schedule=schedule)))
    fork = made(0.02, schedule=schedule)
    fork.load_state_dict(parent(schedule=schedule), fork=True)
    assert rates(fitted(fork))[FORKED:] == pytest.approx(alone[FORKED:], rel=1e-12)
    assert rates(fork)[:FORKED] == rates(fitted(made(0.05, schedule=schedule)))[:FORKED]


def test_what_differs_is_its_own_and_the_rest_stays_as_it_is_by_now() -> None:
    checkpoint = parent()
    checkpoint["optimizer"]["param_groups"][0] |= {"momentum": 0.7, "dampening": 0.1}  # as a callback may
    fork = made(optimizer={"weight_decay": 0.01})
    fork.load_state_dict(checkpoint, fork=True)
    (group,) = fork.optimizer.param_groups
    assert (group["weight_decay"], group["momentum"], group["dampening"]) == (0.01, 0.7, 0.1)
    buffers = checkpoint["optimizer"]["state"]
    for index, parameter in enumerate(group["params"]):
        assert torch.equal(fork.optimizer.state[parameter]["momentum_buffer"], buffers[index]["momentum_buffer"])


def test_a_rate_without_a_schedule_is_the_new_one_to_the_bit() -> None:
    for rate in (0.012, 1e-5, 0.3, 0.05):
        first = fitted(make_trainer())
        model = make_model()
        fork = make_trainer(model=model, optimizer=SGD(model.parameters(), lr=rate))
        fork.load_state_dict(through_file(first.state_dict()), fork=True)
        assert fork.optimizer.param_groups[0]["lr"] == rate


def test_it_draws_from_its_own_seed() -> None:
    def losses(seed: int) -> list[float]:
        fork = made(seed=seed)
        fork.load_state_dict(parent(), fork=True)
        assert fork.seed == seed
        return [metrics["train_loss"] for metrics in fitted(fork).state.history]

    one, other = losses(1), losses(2)
    assert one == losses(1)
    assert one[:FORKED] == other[:FORKED]
    assert one[FORKED] != other[FORKED]


def test_another_batch_size_holds_from_its_first_epoch() -> None:
    fork = made(batching=BatchOptions(batch_size=6))
    fork.load_state_dict(parent(), fork=True)
    fitted(fork)
    assert fork.state.step == FORKED * STEPS + (EPOCHS - FORKED) * 2


def test_a_size_that_a_hook_of_the_parent_set_is_not_the_forks() -> None:
    set_by_hand = At("on_epoch_end", lambda trainer: trainer.set_batch_size(3))
    checkpoint = parent(callbacks=[set_by_hand])
    assert checkpoint["state"]["batch_size"] == 3
    fork = made(batching=BatchOptions(batch_size=6))
    fork.load_state_dict(checkpoint, fork=True)
    assert fitted(fork).batching.batch_size == 6


def test_it_resumes_to_the_bit_from_any_batch() -> None:
    def fork(*callbacks: Any) -> Trainer:
        trainer = made(0.02, seed=5, callbacks=[EMA(0.9), EarlyStopping(patience=9), *callbacks])
        trainer.load_state_dict(parent(callbacks=[EMA(0.9), EarlyStopping(patience=9)]), fork=True)
        return fitted(trainer)

    expected = frozen(fork())
    for step in range(FORKED * STEPS + 1, EPOCHS * STEPS):
        stopped = fork(interrupt_at(step))
        resumed = made(0.02, seed=5, callbacks=[EMA(0.9), EarlyStopping(patience=9)])
        resumed.load_state_dict(through_file(stopped.state_dict()))
        assert_same(frozen(fitted(resumed)), expected)


def test_the_other_runs_epochs_are_not_among_its_best(tmp_path: Path) -> None:
    losses = [0.9, 0.1, 0.5, 0.3, 0.4, 0.6]
    first = scripted_trainer([], losses[:2])
    first.fit(one_batch(), one_batch())
    fork = scripted_trainer([Checkpoint(tmp_path, keep_last=1, max_overhead=1)], losses[2:], max_epochs=6)
    fork.load_state_dict(through_file(first.state_dict()), fork=True)
    state = fork.fit(one_batch(), one_batch())
    assert [metrics["val_loss"] for metrics in state.history] == losses
    assert best_epoch(state.history, "val_loss", "min", after=state.inherited) == 4
    assert [file.epoch for file in list_checkpoints([tmp_path])] == [4, 6]


def test_a_checkpoint_that_can_not_be_forked_is_refused() -> None:
    inside = fitted(made(callbacks=[interrupt_at(4)])).state_dict()
    with pytest.raises(ValueError, match="inside an epoch"):
        made().load_state_dict(inside, fork=True)
    model = make_model()
    other = make_trainer(model=model, optimizer=AdamW(model.parameters()))
    with pytest.raises(ValueError, match="another kind of optimizer"):
        other.load_state_dict(parent(), fork=True)


def test_the_checkpoint_that_is_loaded_is_left_alone() -> None:
    checkpoint, again = parent(), parent()
    fork = made(0.02, seed=9)
    fork.load_state_dict(checkpoint, fork=True)
    fitted(fork)
    assert_same({**checkpoint, "rng": 0}, {**again, "rng": 0})
