"""What a run leaves behind: random state as it was, no worker processes, counts with which the next resumes."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.unit.trainer.support import At, assert_same, frozen, make_model, make_trainer, regression
from trainer import BatchOptions, Trainer
from trainer.callbacks import EMA, GradientAccumulation, LRFinder
from trainer.data.plan import Plan


class BoomError(Exception):
    pass


def boom(*_: Any) -> None:
    raise BoomError


def fail_once(event: str, batch: int = 2, epoch: int = 0) -> At:
    """Fails in one batch, or one epoch, the first time that it comes there."""
    left = [BoomError]

    def fail(*_: Any) -> None:
        raise left.pop()

    def here(trainer: Any) -> bool:
        state = trainer.state
        return bool(left) and state.epoch == epoch and (batch < 0 or state.batch_index == batch)

    return At(event, fail, here, priority=60)


# ---- random state


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(np.random.standard_normal()), float(torch.rand(()))]


def seeded(action: Callable[[], Any]) -> list[float]:
    random.seed(1)
    np.random.seed(2)
    np.random.standard_normal()  # NumPy keeps the second of the pair that it drew
    torch.manual_seed(3)
    action()
    return draws()


@pytest.mark.parametrize("loader", [False, True], ids=["memory", "loader"])
@pytest.mark.parametrize("event", [None, "setup", "on_before_backward", "on_validation_batch_end", "on_fit_end"])
def test_a_fit_leaves_the_random_state_as_it_found_it(event: str | None, loader: bool) -> None:
    def fit() -> None:
        data = DataLoader(regression(12), batch_size=4, shuffle=True) if loader else regression(12)
        trainer = make_trainer([] if event is None else [At(event, boom)])
        if event is None:
            trainer.fit(data, regression(4))
        else:
            with pytest.raises(BoomError):
                trainer.fit(data, regression(4))

    assert seeded(fit) == seeded(lambda: None)


@pytest.mark.parametrize("method", ["validate", "test"])
def test_an_evaluation_leaves_it_too(method: str) -> None:
    class Noisy(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) + torch.rand(()) + random.random() + np.random.rand()

    trainer = make_trainer(model=Noisy(4, 1))
    assert seeded(lambda: getattr(trainer, method)(regression(4))) == seeded(lambda: None)
    # Inside a fit it does not change the training around it.
    whole = make_trainer(max_epochs=3)
    whole.fit(regression(12))
    looking = make_trainer(
        [At("on_train_batch_end", lambda trainer: getattr(trainer, method)(noisy))], max_epochs=3
    )
    noisy = DataLoader(Randomly(), batch_size=4)
    looking.fit(regression(12))
    assert_same(frozen(looking)["model"], frozen(whole)["model"])


class Randomly(Dataset[tuple[Tensor, Tensor]]):
    """Draws each of its samples."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(4), torch.rand(1)


def test_a_search_for_the_learning_rate_leaves_it() -> None:
    assert seeded(lambda: make_trainer([LRFinder(steps=8)]).fit(regression(64))) == seeded(lambda: None)


# ---- counts after an error


INSIDE = [
    "on_train_batch_start",
    "on_before_forward",
    "on_after_forward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
    "on_before_scheduler_step",
    "on_after_scheduler_step",
]
BEFORE_THE_LOSS = INSIDE[:3]
BEFORE_THE_STEP = INSIDE[3:6]


def stepping(*callbacks: Any, **options: Any) -> Trainer:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    options.setdefault("scheduler_interval", "step")
    return make_trainer(callbacks, model=model, optimizer=optimizer, scheduler=schedule, **options)


@pytest.mark.parametrize("event", INSIDE)
@pytest.mark.parametrize("loader", [False, True], ids=["memory", "loader"])
def test_after_an_error_in_a_batch_every_batch_is_recorded_once(event: str, loader: bool) -> None:
    seen: list[Tensor] = []
    data: Any = regression(20)
    data = DataLoader(data, batch_size=4, shuffle=True) if loader else data
    watch = At("on_after_forward", lambda trainer: seen.append(trainer.state.batch[0]), priority=99)
    trainer = stepping(fail_once(event), watch, max_epochs=2)
    with pytest.raises(BoomError):
        trainer.fit(data)
    passed = event not in BEFORE_THE_LOSS
    stepped = passed and event not in BEFORE_THE_STEP
    state = trainer.state
    assert (state.batch_index, state.data_batch, state.step) == (2 + passed, 2 + passed, 2 + stepped)
    weight = sum(trainer.recorder.state_dict()["sums"]["train_loss"]["weights"].tolist())
    assert weight == 4 * (2 + passed)
    trainer.fit(data)
    steps = 10 if stepped or not passed else 9
    assert (state.epoch, state.data_epoch, state.batch_index, state.data_batch) == (2, 2, 0, 0)
    assert (state.step, trainer.scheduler.last_epoch) == (steps, steps)
    assert len(state.history) == 2
    assert len(seen) == 10
    assert len({tuple(batch.flatten().tolist()) for batch in seen[:5]}) == 5


@pytest.mark.parametrize("event", ["on_train_batch_end", "on_after_optimizer_step", "on_after_scheduler_step"])
def test_after_an_error_behind_the_step_the_run_ends_with_the_bits_of_one_without(event: str) -> None:
    whole, failing = stepping(max_epochs=3), stepping(fail_once(event, batch=1, epoch=1), max_epochs=3)
    whole.fit(regression(12), regression(4))
    with pytest.raises(BoomError):
        failing.fit(regression(12), regression(4))
    failing.fit(regression(12), regression(4))
    assert_same(frozen(failing), frozen(whole))


@pytest.mark.parametrize(
    "event",
    [
        "on_train_epoch_start",
        "on_train_epoch_end",
        "on_validation_start",
        "on_validation_batch_end",
        "on_epoch_end",
    ],
)
def test_after_an_error_at_an_epochs_end_the_history_has_each_epoch_once(event: str) -> None:
    epoch = 2 if event == "on_epoch_end" else 1
    whole, failing = make_trainer(max_epochs=3), make_trainer([fail_once(event, -1, epoch)], max_epochs=3)
    whole.fit(regression(12), regression(8))
    with pytest.raises(BoomError):
        failing.fit(regression(12), regression(8))
    failing.fit(regression(12), regression(8))
    assert_same(frozen(failing), frozen(whole))


@pytest.mark.parametrize("event", ["on_before_scheduler_step", "on_after_scheduler_step"])
def test_after_an_error_around_an_epochs_schedule_the_schedule_counts_the_epoch(event: str) -> None:
    options: Any = {"scheduler_interval": "epoch", "max_epochs": 3}
    whole, failing = stepping(**options), stepping(fail_once(event, -1, 1), **options)
    whole.fit(regression(12), regression(8))
    with pytest.raises(BoomError):
        failing.fit(regression(12), regression(8))
    failing.fit(regression(12), regression(8))
    assert_same(frozen(failing), frozen(whole))


def test_an_epoch_whose_metrics_can_not_be_computed_is_not_counted() -> None:
    class Fails:
        left = 1

        def update(self, outputs: Any, targets: Any) -> None: ...

        def reset(self) -> None: ...

        def compute(self) -> float:
            Fails.left -= 1
            if Fails.left == 0:
                raise BoomError
            return 0.5

    trainer = make_trainer(metrics={"odd": Fails()}, max_epochs=2)
    with pytest.raises(BoomError):
        trainer.fit(regression(12))
    assert (trainer.state.epoch, trainer.state.history) == (0, [])
    state = trainer.fit(regression(12))
    assert (state.epoch, state.step, len(state.history)) == (2, 6, 2)


@pytest.mark.parametrize("event", INSIDE)
@pytest.mark.parametrize("batch", [0, 1, 2, 3])
def test_accumulated_groups_are_whole_after_an_error(event: str, batch: int) -> None:
    """Counted by what each batch adds: the gradient of the one weight is 1, and the group's mean is 1 too."""
    seen: list[float] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(torch.ones(1, 1)).sum()
        return loss

    model = nn.Linear(1, 1, bias=False)
    note = At(
        "on_before_optimizer_step", lambda trainer: seen.append(trainer.model.weight.grad.item()), priority=10
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = make_trainer(
        [fail_once(event, batch), GradientAccumulation(3), note],
        model=model,
        optimizer=optimizer,
        scheduler=schedule,
        scheduler_interval="step",
        step=step,
        max_epochs=2,
    )
    try:
        trainer.fit(regression(36))
        assert event in INSIDE[5:], "only in the third batch there is a step"
        assert batch != 2
    except BoomError:
        trainer.fit(regression(36))
    assert seen == pytest.approx([1.0] * len(seen))
    assert (trainer.state.epoch, trainer.state.data_epoch) == (2, 2)
    assert trainer.state.step == trainer.scheduler.last_epoch in (5, 6)


def test_an_error_in_the_forward_pass_keeps_the_open_group() -> None:
    def run(*callbacks: Any) -> Trainer:
        return make_trainer([GradientAccumulation(3), *callbacks], model=nn.Linear(4, 1), max_epochs=1)

    torch.manual_seed(0)
    whole = run()
    torch.manual_seed(0)
    failing = run(fail_once("on_before_forward", 1))
    whole.fit(regression(24))
    with pytest.raises(BoomError):
        failing.fit(regression(24))
    failing.fit(regression(24))
    assert_same(frozen(failing)["model"], frozen(whole)["model"])


def test_weights_are_averaged_once_for_each_step_after_an_error() -> None:
    average = EMA(0.5)
    trainer = make_trainer([average, fail_once("on_before_backward")], max_epochs=2)
    with pytest.raises(BoomError):
        trainer.fit(regression(20))
    trainer.fit(regression(20))
    assert average.state_dict()["updates"] == trainer.state.step == 9


def test_a_run_that_fails_before_its_first_batch_goes_on_inside_the_epoch_with_the_same_bits() -> None:
    whole, stopped = make_trainer(), make_trainer()
    whole.fit(regression(12), regression(4))
    handle = stopped.callbacks.register(
        "on_train_batch_end", lambda trainer: trainer.state.stop("interrupted", now=True)
    )
    stopped.fit(regression(12), regression(4))
    handle.remove()
    with stopped.callbacks.register("on_fit_start", boom), pytest.raises(BoomError):
        stopped.fit(regression(12), regression(4))
    stopped.fit(regression(12), regression(4))
    assert_same(frozen(stopped), frozen(whole))


# ---- worker processes


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)), torch.zeros(1)


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.rand(4), torch.zeros(1)


def children() -> list[int]:
    return [process.pid for process in psutil.Process().children(recursive=True)]


ENDS: dict[str, tuple[str, Callable[..., Any], type[BaseException] | None]] = {
    "an error": ("on_before_backward", boom, BoomError),
    "an error in validation": ("on_validation_batch_end", boom, BoomError),
    "an interruption": ("on_after_forward", lambda _: (_ for _ in ()).throw(KeyboardInterrupt), KeyboardInterrupt),
    "a stop": ("on_train_batch_end", lambda trainer: trainer.state.stop("enough", now=True), None),
    "an epoch's stop": ("on_train_batch_end", lambda trainer: trainer.state.stop_epoch(), None),
    "its end": ("setup", lambda _: None, None),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("data", ["dataset", "loader", "persistent", "endless"])
def test_no_worker_process_outlives_the_fit(end: str, data: str) -> None:
    def loader() -> Any:
        source: Any = Endless() if data == "endless" else Samples()
        return DataLoader(source, batch_size=4, num_workers=1, persistent_workers=data == "persistent")

    event, action, error = ENDS[end]
    before = children()
    batching = BatchOptions(batch_size=4, num_workers=1)
    limit = {"max_epochs": None, "max_steps": 4, "validate_every": 2} if data == "endless" else {"max_epochs": 1}
    trainer = make_trainer(batching=batching, **limit)
    handle = trainer.callbacks.add(At(event, action))
    train = Samples() if data == "dataset" else loader()
    val = Samples() if data in ("dataset", "endless") else loader()
    kept = None if error is None else failing_fit(trainer, error, train, val)
    if error is None:
        trainer.fit(train, val)
    assert set(children()) <= set(before)
    del kept
    handle.remove()
    trainer.plan = Plan(max_epochs=None, max_steps=trainer.state.step + 2, validate_every=2)
    trainer.fit(train, val)  # the same loaders work again
    assert set(children()) <= set(before)


def failing_fit(trainer: Trainer, error: type[BaseException], *data: Any) -> pytest.ExceptionInfo[BaseException]:
    """The error, and with it the frames in which batches were asked for."""
    with pytest.raises(error) as raised:
        trainer.fit(*data)
    return raised


def test_no_worker_process_outlives_a_test() -> None:
    before = children()
    trainer = make_trainer([At("on_test_batch_end", boom)])
    with pytest.raises(BoomError):
        trainer.test(DataLoader(Samples(), batch_size=4, num_workers=2, persistent_workers=True))
    assert set(children()) <= set(before)


def test_persistent_workers_live_through_the_epochs_of_a_fit() -> None:
    seen: list[tuple[int, ...]] = []
    loader: Any = DataLoader(Samples(), batch_size=4, num_workers=2, persistent_workers=True)
    watch = At("on_train_batch_end", lambda trainer: seen.append(tuple(children())))
    make_trainer([watch], max_epochs=2).fit(loader)
    assert len(set(seen)) == 1


class Holding(nn.Module):
    """Keeps a weak reference to its latest activations, and may fail in its forward or its backward pass."""

    def __init__(self, fails_in: str | None) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.fails_in = fails_in
        self.activations: Any = lambda: None

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.inner(inputs).expand(-1, 8).tanh()
        self.activations = weakref.ref(values)
        if self.fails_in == "forward":
            raise BoomError
        outputs = values.mean(1, keepdim=True)
        if self.fails_in == "backward":
            outputs.register_hook(boom)
        return outputs


@pytest.mark.parametrize("also_at_the_end", [False, True])
@pytest.mark.parametrize("fails_in", ["forward", "backward", None])
def test_nothing_of_the_last_batch_stays_in_memory(
    fails_in: str | None, also_at_the_end: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "trainer.runner")  # a record that is kept would hold its error
    model = Holding(fails_in)
    ends = [At(event, boom) for event in ("on_exception", "on_fit_end", "teardown")] if also_at_the_end else []
    trainer = make_trainer(ends, model=model, max_epochs=1)
    gc.collect()
    gc.disable()
    try:
        failed = False
        try:
            trainer.fit(regression())
        except BoomError:
            failed = True
        assert failed == bool(fails_in or ends)
        assert model.activations() is None
        assert trainer.state.batch is trainer.state.outputs is trainer.state.loss is None
    finally:
        gc.enable()
