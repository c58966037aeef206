"""A run stopped anywhere and resumed is, to the last bit, the run that was never stopped."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau
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
    splus,
    through_file,
)
from trainer import Trainer
from trainer.callbacks import (
    EMA,
    Checkpoint,
    EarlyStopping,
    GradientAccumulation,
    GradientMonitor,
    LossPrediction,
    NaNDetection,
    OptimizerMode,
    OverfitDetection,
)
from trainer.checkpoint.manager import newest_checkpoint
from trainer.data.random_state import seed_all

EPOCHS, BATCHES = 3, 4
SAMPLES = 4 * BATCHES - 1
STEPS = EPOCHS * BATCHES


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Draws from each of the three global generators, at each sample."""

    def __init__(self) -> None:
        self.data = regression(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.data[index]
        shift = random.random() + float(np.random.rand())
        return inputs + 0.1 * shift + 0.1 * torch.rand(4), target


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream that draws its own order and noise."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = regression(SAMPLES)
        for index in np.random.permutation(SAMPLES):
            inputs, target = data[int(index)]
            yield inputs + 0.1 * random.gauss(), target


SOURCES: dict[str, Callable[[], Any]] = {
    "tensors": lambda: regression(SAMPLES),
    "shuffling loader": lambda: DataLoader(regression(SAMPLES), 4, shuffle=True),
    "loader with a generator": lambda: DataLoader(
        regression(SAMPLES), 4, shuffle=True, generator=torch.Generator().manual_seed(9)
    ),
    "augmented": Augmented,
    "stream": Stream,
}
SCHEDULERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "none": ("epoch", lambda optimizer: None),
    "cosine": ("epoch", lambda optimizer: CosineAnnealingLR(optimizer, EPOCHS)),
    "multi-step": ("epoch", lambda optimizer: MultiStepLR(optimizer, [1, 2])),
    "one cycle": ("step", lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=STEPS)),
    "plateau": ("epoch", lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    "schedule-free": lambda parameters: AdamWScheduleFree(parameters, lr=0.02, warmup_steps=3),
    "splus": lambda parameters: splus(parameters, lr=0.02),
}


#: With weights of their own for training and evaluation, for which an average of ours is refused.
TWO_SETS = {"schedule-free", "splus"}


@dataclass(frozen=True)
class Run:
    """One way to train."""

    source: str = "tensors"
    scheduler: str = "none"
    optimizer: str = "adamw"
    seed: int = 5
    accumulate: int = 1
    ema: bool = False
    precision: Any = "fp32"
    validate_every: float | None = None

    def build(self, *callbacks: Any, model_seed: int = 7) -> Trainer:
        # Constructing one trainer or several, wherever the generators stand, must make no difference.
        seed_all(model_seed)
        model = make_model(model_seed)
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        interval, scheduler = SCHEDULERS[self.scheduler]
        extra = [GradientAccumulation(self.accumulate)] if self.accumulate > 1 else []
        if self.ema and self.optimizer not in TWO_SETS:
            extra.append(EMA(0.7))
        return make_trainer(
            [
                NaNDetection(),
                OptimizerMode(),
                GradientMonitor(),
                LossPrediction(min_epochs=2),
                OverfitDetection(0, 1),
                EarlyStopping(patience=50),
                *extra,
                *callbacks,
            ],
            model=model,
            optimizer=optimizer,
            scheduler=scheduler(optimizer),
            scheduler_interval=interval,
            metrics={"mae": nn.functional.l1_loss},
            max_epochs=EPOCHS,
            seed=self.seed,
            precision=self.precision,
            validate_every=None if SOURCES[self.source] is Stream else self.validate_every,
        )

    def fit(self, trainer: Trainer) -> Trainer:
        trainer.fit(SOURCES[self.source](), regression(9, seed=8))
        return trainer


@cache
def uninterrupted(run: Run) -> dict[str, Any]:
    return frozen(run.fit(run.build()))


def resumed(run: Run, checkpoint: dict[str, Any], *callbacks: Any) -> Trainer:
    """A new trainer, with other weights and generators elsewhere, that resumes from the checkpoint."""
    trainer = run.build(*callbacks, model_seed=99)
    trainer.load_state_dict(checkpoint)
    return run.fit(trainer)


def stop_after_batches(*batches: int) -> At:
    """Stops the run right after these batches, counted over all epochs."""
    return At(
        "on_train_batch_end",
        lambda trainer: trainer.state.stop("interrupted", now=True),
        lambda trainer: trainer.state.data_epoch * BATCHES + trainer.state.data_batch in batches,
    )


def stop_before_epochs(*epochs: int) -> At:
    """Stops the run once before the first batch of each of these epochs."""
    left = set(epochs)

    def stop(trainer: Any) -> None:
        left.remove(trainer.state.epoch)
        trainer.state.stop("interrupted", now=True)

    return At("on_train_epoch_start", stop, lambda trainer: trainer.state.epoch in left)


@quick(25)
@given(
    run=st.builds(
        Run,
        source=st.sampled_from(list(SOURCES)),
        scheduler=st.sampled_from(list(SCHEDULERS)),
        optimizer=st.sampled_from(list(OPTIMIZERS)),
        accumulate=st.integers(1, 3),
        ema=st.booleans(),
        precision=st.sampled_from(["fp32", "fp32", "bf16", "fp16"]),
        validate_every=st.sampled_from([None, None, 0.5, 3]),
    ),
    stops=st.lists(st.integers(1, STEPS), max_size=3, unique=True),
    ends=st.sets(st.integers(1, EPOCHS)),
)
def test_any_run_stopped_anywhere_goes_on_to_the_same_bits(run: Run, stops: list[int], ends: set[int]) -> None:
    interruptions = stop_after_batches(*stops)
    epoch_ends = At(
        "on_epoch_end",
        lambda trainer: trainer.state.stop("interrupted"),
        lambda trainer: trainer.state.epoch in ends,
    )
    trainer = run.fit(run.build(interruptions, epoch_ends))
    for _ in range(len(stops) + len(ends)):
        trainer = resumed(run, through_file(trainer.state_dict()), interruptions, epoch_ends)
    assert trainer.state.data_epoch == EPOCHS
    assert_same(frozen(trainer), uninterrupted(run))


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_every_batch_is_a_place_to_stop(step: int) -> None:
    run = Run("augmented", "one cycle")
    stopped = run.fit(run.build(interrupt_at(step)))
    assert (stopped.state.step, stopped.state.stop_reason) == (step, "interrupted")
    assert_same(frozen(resumed(run, through_file(stopped.state_dict()))), uninterrupted(run))


@pytest.mark.parametrize("epoch", range(EPOCHS))
@pytest.mark.parametrize(
    "run",
    [
        Run("augmented", "one cycle", ema=True),
        Run("stream", "plateau", "schedule-free"),
        Run("shuffling loader", optimizer="splus", accumulate=3, validate_every=0.5),
        Run(precision="fp16", validate_every=3),
    ],
    ids=lambda run: run.source,
)
def test_the_moment_before_an_epochs_first_batch_is_a_place_to_stop(run: Run, epoch: int) -> None:
    def build(*callbacks: Any) -> Trainer:
        return run.build(At("on_train_epoch_start", lambda trainer: torch.rand(3)), *callbacks)

    whole, stop = run.fit(build()), stop_before_epochs(epoch)
    stopped = run.fit(build(stop))
    assert (stopped.state.epoch, stopped.state.batch_index, len(stopped.state.history)) == (epoch, 0, epoch)
    assert stopped.state.history == whole.state.history[:epoch]
    assert stopped.recorder.compute() == {}
    again = build()
    again.load_state_dict(through_file(stopped.state_dict()))
    seed_all(1)
    for trainer in (again, stopped):
        assert_same(frozen(run.fit(trainer)), frozen(whole))


def test_a_stop_before_an_epochs_first_batch_is_on_disk(tmp_path: Path) -> None:
    run = Run("augmented")
    run.fit(run.build(Checkpoint(tmp_path, max_overhead=1), stop_before_epochs(1)))
    newest = newest_checkpoint([tmp_path])
    assert newest is not None
    assert (newest[0].epoch, newest[0].batch) == (1, 0)
    assert_same(frozen(resumed(run, newest[1])), uninterrupted(run))


def test_a_stop_before_a_pass_that_is_skipped_leaves_the_pass() -> None:
    def skip() -> At:
        return At("on_train_epoch_start", lambda t: t.state.skip("epoch"), lambda t: t.state.epoch == 1)

    run = Run("augmented", "cosine")
    whole, stopped = run.fit(run.build(skip())), run.fit(run.build(skip(), stop_before_epochs(1)))
    assert stopped.state.data_epoch == 1
    assert_same(frozen(resumed(run, through_file(stopped.state_dict()), skip())), frozen(whole))


@pytest.mark.parametrize(
    ("source", "scheduler"),
    [*((source, "plateau") for source in SOURCES), *(("augmented", scheduler) for scheduler in SCHEDULERS)],
)
def test_every_source_and_scheduler_resumes_inside_an_epoch(source: str, scheduler: str) -> None:
    run = Run(source, scheduler, "sgd")
    stopped = run.fit(run.build(interrupt_at(6)))
    assert_same(frozen(resumed(run, through_file(stopped.state_dict()))), uninterrupted(run))


@pytest.mark.parametrize("optimizer", ["schedule-free", "splus"])
@pytest.mark.parametrize("step", [2, BATCHES, BATCHES + 1, STEPS])
def test_optimizers_with_two_sets_of_weights_resume_in_their_mode(optimizer: str, step: int) -> None:
    run = Run("shuffling loader", "none", optimizer)
    stopped = run.fit(run.build(interrupt_at(step)))
    assert_same(frozen(resumed(run, through_file(stopped.state_dict()))), uninterrupted(run))


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_trainer_goes_on_after_an_interruption(source: str) -> None:
    run = Run(source, "one cycle")
    trainer = run.build(interrupt_at(2, 7))
    for elsewhere in range(3):
        run.fit(trainer)
        seed_all(elsewhere)
    assert_same(frozen(trainer), uninterrupted(run))


def test_random_numbers_drawn_after_an_interruption_do_not_matter_to_the_checkpoint() -> None:
    run = Run("augmented")
    stopped = run.fit(run.build(interrupt_at(6)))
    seed_all(1)
    checkpoint = through_file(stopped.state_dict())
    assert_same(frozen(resumed(run, checkpoint)), uninterrupted(run))


def test_a_checkpoint_that_was_loaded_and_saved_again_is_as_good() -> None:
    run = Run("augmented")
    stopped = run.fit(run.build(interrupt_at(6)))
    between = run.build(model_seed=42)
    between.load_state_dict(through_file(stopped.state_dict()))
    seed_all(1)
    assert_same(frozen(resumed(run, through_file(between.state_dict()))), uninterrupted(run))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_run_that_crashed_goes_on_from_its_newest_file(scheduler: str, tmp_path: Path) -> None:
    def crash(trainer: Any) -> None:
        raise RuntimeError("crash")

    run = Run("augmented", scheduler, "schedule-free" if scheduler == "none" else "adamw")
    crashing = run.build(
        Checkpoint(tmp_path, max_overhead=1),
        At("on_train_batch_end", crash, lambda trainer: trainer.state.step == 2 * BATCHES + 2),
    )
    with pytest.raises(RuntimeError, match="crash"):
        run.fit(crashing)
    newest = newest_checkpoint([tmp_path])
    assert newest is not None
    assert (newest[0].epoch, newest[0].batch) == (2, 0)
    assert_same(frozen(resumed(run, newest[1])), uninterrupted(run))


def test_an_interruption_inside_an_epoch_is_on_disk_and_goes_on(tmp_path: Path) -> None:
    run = Run("stream", "plateau")
    run.fit(run.build(Checkpoint(tmp_path, max_overhead=1), interrupt_at(BATCHES + 3)))
    newest = newest_checkpoint([tmp_path])
    assert newest is not None
    assert (newest[0].epoch, newest[0].batch) == (1, 3)
    trainer = resumed(run, newest[1], Checkpoint(tmp_path, max_overhead=1))
    assert_same(frozen(trainer), uninterrupted(run))
    assert not list(tmp_path.glob("*batch*"))


def test_the_scheduler_is_not_off_by_one_step_after_a_resume() -> None:
    rates: list[float] = []
    run = Run(scheduler="cosine")
    watch = At("on_epoch_end", lambda trainer: rates.append(trainer.state.metrics["lr"]))
    trainer = run.fit(run.build(watch, interrupt_at(BATCHES + 2)))
    resumed(run, through_file(trainer.state_dict()), watch)
    expected = [item["lr"] for item in uninterrupted(run)["state"]["history"]]
    assert rates == expected
    assert len(set(expected)) == EPOCHS


def test_other_seeds_give_other_runs() -> None:
    one, other = uninterrupted(Run(seed=1)), uninterrupted(Run(seed=2))
    assert one["state"]["history"] != other["state"]["history"]


def test_the_generators_before_a_run_do_not_matter() -> None:
    run = Run("augmented")
    trainer = run.build()
    seed_all(12345)
    assert_same(frozen(run.fit(trainer)), uninterrupted(run))


def test_watching_callbacks_do_not_change_what_is_learnt() -> None:
    model = make_model()
    plain = make_trainer(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.02), max_epochs=EPOCHS, seed=5
    )
    plain.fit(regression(SAMPLES), regression(9, seed=8))
    assert_same(frozen(plain)["model"], uninterrupted(Run())["model"])


class Tempered(nn.Module):
    """A loss with a parameter that is trained, one that is not, a running count and a weight that is given."""

    weight: Tensor
    batches: Tensor

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.network = nn.Linear(1, 1)
        self.register_buffer("weight", torch.tensor(weight))
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.batches += 1
        error = nn.functional.mse_loss(outputs, targets) * self.weight
        return error * self.temperature.exp() - self.temperature + self.batches / 100


def tempered(loss: Tempered, *callbacks: Any) -> Trainer:
    model = make_model()
    optimizer = torch.optim.AdamW([*model.parameters(), loss.temperature], lr=0.02)
    return make_trainer(callbacks, model=model, optimizer=optimizer, loss=loss, max_epochs=EPOCHS)


def test_a_loss_that_is_trained_goes_on_to_the_same_bits() -> None:
    whole, again = tempered(Tempered()), tempered(Tempered())
    stopped = tempered(Tempered(), interrupt_at(BATCHES + 2))
    for trainer in (whole, stopped):
        trainer.fit(regression(SAMPLES), regression(9, seed=8))
    again.load_state_dict(through_file(stopped.state_dict()))
    again.fit(regression(SAMPLES), regression(9, seed=8))
    assert_same(frozen(again), frozen(whole))
    assert frozen(whole)["step"].keys() == {"temperature", "batches"}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own
@pytest.mark.parametrize("compiled_again", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_trained_loss_may_be_compiled_or_not_when_its_run_resumes(compiled: bool, compiled_again: bool) -> None:
    def loss(is_compiled: bool) -> Any:
        return torch.compile(Tempered(), backend="eager") if is_compiled else Tempered()

    whole, stopped, again = (
        tempered(loss(False)),
        tempered(loss(compiled), interrupt_at(2)),
        tempered(loss(compiled_again)),
    )
    for trainer in (whole, stopped):
        trainer.fit(regression(SAMPLES))
    again.load_state_dict(through_file(stopped.state_dict()))
    again.fit(regression(SAMPLES))
    assert_same(frozen(again), frozen(whole))


def test_a_compiled_loss_of_an_older_checkpoint_is_restored() -> None:
    stopped, again = tempered(Tempered(), interrupt_at(2)), tempered(Tempered())
    stopped.fit(regression(SAMPLES))
    checkpoint = through_file(stopped.state_dict())
    named = {f"_orig_mod.{name}": value for name, value in checkpoint["step"].items()}
    again.load_state_dict({**checkpoint, "step": named})
    assert_same(frozen(again)["step"], frozen(stopped)["step"])


def test_what_a_loss_was_built_with_is_no_part_of_a_checkpoint() -> None:
    stopped, loss = tempered(Tempered(), interrupt_at(2)), Tempered(weight=5.0)
    stopped.fit(regression(SAMPLES))
    tempered(loss).load_state_dict(through_file(stopped.state_dict()))
    assert (loss.weight.item(), loss.batches.item()) == (5.0, 2.0)


@pytest.mark.parametrize(
    ("threads", "said"), [(3, ["the checkpoint was written with 3 threads and is resumed"]), (1, [])]
)
@pytest.mark.parametrize("fork", [False, True])
def test_another_number_of_threads_is_a_warning(
    threads: int, said: list[str], fork: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(max_epochs=1)
    trainer.fit(regression())
    checkpoint = {**trainer.state_dict(), "threads": threads}
    make_trainer().load_state_dict(checkpoint, fork=fork)
    assert [text.partition(" with 1,")[0] for text in caplog.messages] == ([] if fork else said)
