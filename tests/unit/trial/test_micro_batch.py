"""A batch in parts takes the same steps, wherever in a run the parts became smaller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from hpo.final.starting import start_from
from hpo.trial.builder import Builder
from hpo.trial.micro_batch import MicroBatches, cut, finer
from hpo.trial.place import RunPlace
from tests.support.studies import Studies
from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import GradientAccumulation
from trainer.checkpoint.manager import newest_checkpoint

OVERRIDES = (
    *("model.dropout=0.0", "loader.batch_size=24", "trainer.max_epochs=3"),
    *("optimizer._target_=torch.optim.SGD", "lr_scheduler=null"),
)


def config_of(batch: int, devices: int = 1, **callbacks: Any) -> dict[str, Any]:
    loader = {"batch_size": batch, "eval_batch_size": 256, "drop_last": False}
    return {"loader": loader, "callbacks": callbacks, "trainer": {"validate_every": None, "devices": devices}}


@given(st.integers(1, 200), st.integers(1, 8))
def test_parts_are_equal_and_shrink_to_single_samples_of_each_device(batch: int, devices: int) -> None:
    parts: int | None = 1
    seen = [1]
    while (parts := finer(config_of(batch, devices), seen[-1])) is not None:
        assert batch % parts == 0
        assert parts % seen[-1] == 0
        assert parts >= 2 * seen[-1]
        made = cut(config_of(batch), parts)
        assert made["loader"]["eval_batch_size"] == max(1, 256 // parts)
        assert made["loader"]["batch_size"] * made["callbacks"]["gradient_accumulation"]["batches"] == batch
        assert made["loader"]["batch_size"] >= devices
        seen.append(parts)
    if devices == 1:
        assert seen[-1] == batch


@pytest.mark.parametrize(
    "config",
    [
        config_of(1),
        config_of(8, batch_size_schedule={"sizes": {}}),
        config_of(8) | {"loader": {"batch_size": 8, "drop_last": True}},
        config_of(8) | {"trainer": {"validate_every": 0.5, "devices": 1}},
    ],
    ids=["one sample", "sizes that change", "a dropped rest", "a part of a pass"],
)
def test_what_can_not_be_cut_is_said_to_be_so(config: dict[str, Any]) -> None:
    assert finer(config, 1) is None


@pytest.mark.parametrize(
    ("batch", "parts"),
    [(16, 2), (24, 2), (20, None), (36, 2)],
    ids=["even", "a rest of two halves", "a rest of less", "a rest of two halves, uneven"],
)
def test_epochs_of_steps_need_as_many_parts_of_the_last_batch_of_a_pass(batch: int, parts: int | None) -> None:
    config = config_of(batch) | {"trainer": {"validate_every": 2, "devices": 1}}
    assert finer(config, 1, 64) == parts
    assert finer(config, 1) is None
    assert finer(config_of(batch), 1, 64) == 2


@pytest.mark.parametrize("batch", [16, 24])
def test_a_run_of_steps_that_is_cut_has_the_epochs_of_one_that_is_not(
    studies: Studies, tmp_path: Path, batch: int
) -> None:
    more = ("trainer.validate_every=2", f"loader.batch_size={batch}")
    (whole, data), (parted, _) = (trainer_of(studies, tmp_path / str(parts), parts, *more) for parts in (1, 2))
    losses = [
        [metrics["val_loss"] for metrics in trainer.fit(data["train"], data["val"]).history]
        for trainer in (whole, parted)
    ]
    assert parted.state.step == whole.state.step
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_accumulation_that_was_asked_for_goes_on_top() -> None:
    made = cut(config_of(8, gradient_accumulation={"batches": 3}, batch_size_schedule=False), 2)
    assert made["callbacks"]["gradient_accumulation"] == {"batches": 6}
    assert finer(config_of(8, batch_size_schedule=False), 1) == 2


def trainer_of(studies: Studies, folder: Path, parts: int, *overrides: str) -> tuple[Trainer, Any]:
    builder = Builder(studies.spec(*OVERRIDES, *overrides))
    config = builder.spec.resolve({"optimizer.lr": 0.05, "model.hidden": 4})
    data = builder.data(config)
    place = RunPlace(folder, "trial")
    bridge = [MicroBatches(parts)]
    made = builder.trainer(cut(config, parts), place, seed=1, device=torch.device("cpu"), bridge=bridge)
    return made, data


@pytest.mark.parametrize(
    ("parts", "more"),
    [
        (3, ()),
        (2, ("trainer.validate_every=2",)),
        (3, ("callbacks={gradient_accumulation: {batches: 2}}",)),
    ],
)
def test_a_run_that_is_cut_half_way_takes_the_steps_of_one_that_is_not(
    studies: Studies, tmp_path: Path, parts: int, more: tuple[str, ...]
) -> None:
    whole, data = trainer_of(studies, tmp_path / "whole", 1, *more)
    whole.fit(data["train"], data["val"])
    first, _ = trainer_of(studies, tmp_path / "cut", 1, "trainer.max_epochs=2", *more)
    first.fit(data["train"], data["val"])
    second, _ = trainer_of(studies, tmp_path / "cut", parts, *more)
    found = newest_checkpoint([tmp_path / "cut" / "checkpoints"])
    assert found is not None
    second.load_state_dict(found[1])
    second.fit(data["train"], data["val"])
    assert (second.state.step, second.state.epoch) == (whole.state.step, whole.state.epoch)
    ours, theirs = second.state.metrics["val_loss"], whole.state.metrics["val_loss"]
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours != whole.state.history[-2]["val_loss"]


def plain_trainer(parts: int, steps: int, *callbacks: Callback) -> Trainer:
    """Batches of 8 in their order, epochs of two steps."""
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.MSELoss(),
        max_steps=steps,
        validate_every=2,
        callbacks=[MicroBatches(parts), GradientAccumulation(parts), *callbacks],
        batching=BatchOptions(batch_size=8 // parts, shuffle=False),
        device="cpu",
    )


def by_hand(inputs: torch.Tensor, targets: torch.Tensor, steps: int) -> torch.Tensor:
    """Weights and bias after so many steps of batches of 8, in their order again and again."""
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)
    weights = torch.zeros(inputs.shape[1], 1)
    for step in range(steps):
        x, y = (part[step % 3 * 8 :][:8] for part in (inputs, targets))
        weights -= 0.1 * 2 / 8 * x.T @ (x @ weights - y)
    return weights.squeeze(1)


class Half(Callback):
    """Ends each epoch inside a batch that is cut into two parts."""

    def on_train_batch_end(self, trainer: Any) -> None:
        if trainer.state.batch_index == 3:
            trainer.state.stop_epoch()


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("begin", ["fork", "final"])
def test_what_begins_with_a_checkpoint_of_a_cut_trial_goes_on_with_the_next_whole_batch(
    parts: int, begin: str
) -> None:
    inputs, targets = (torch.randn(24, n, generator=torch.Generator().manual_seed(n)) for n in (4, 1))
    trial = plain_trainer(parts, 2)
    trial.fit((inputs, targets), (inputs, targets))
    checkpoint = trial.state_dict()
    trial.fire("on_save_checkpoint", checkpoint)
    later = plain_trainer(1, 6)
    if begin == "fork":
        later.load_state_dict(checkpoint, fork=True)
    else:
        start_from(later, checkpoint, of="trial 3")
    assert later.state.data_batch == 2
    later.fit((inputs, targets), (inputs, targets))
    assert (later.state.step, later.state.epoch) == (6, 3)
    found = torch.cat([later.model.weight[0], later.model.bias]).detach()
    torch.testing.assert_close(found, by_hand(inputs, targets, 6))


def test_a_batch_of_which_a_part_was_trained_is_trained_again_by_a_fork() -> None:
    data = torch.randn(24, 4), torch.randn(24, 1)
    trial = plain_trainer(2, 2, Half())
    trial.fit(data, data)
    checkpoint = trial.state_dict()
    trial.fire("on_save_checkpoint", checkpoint)
    assert checkpoint["state"]["data_batch"] == 3
    fork = plain_trainer(1, 6)
    fork.load_state_dict(checkpoint, fork=True)
    assert fork.state.data_batch == 1


class Smaller(Callback):
    """Changes the size of batches by hand, stops where it is to, and writes down the samples of each batch."""

    def __init__(self, stop: int | None = None, size: int = 4) -> None:
        self.stop = stop
        self.size = size
        self.seen: list[float] = []

    def on_before_forward(self, trainer: Any) -> None:
        self.seen += trainer.state.batch[1].flatten().tolist()

    def on_train_batch_end(self, trainer: Any) -> None:
        if trainer.state.step == 1 and trainer.batching.batch_size == 8:
            trainer.set_batch_size(self.size, now=True)
        if trainer.state.step == self.stop:
            trainer.state.stop("interrupted", now=True)


def test_a_run_in_parts_goes_on_with_the_next_sample_of_a_pass_whose_size_changed() -> None:
    data = torch.randn(24, 4), torch.arange(24.0)[:, None]
    first, rest = Smaller(stop=2), Smaller()
    trial = plain_trainer(1, 5, first)
    trial.fit(data, data)
    assert (trial.state.cut_batches, trial.state.data_batch) == (1, 2)
    checkpoint = trial.state_dict()
    trial.fire("on_save_checkpoint", checkpoint)
    again = plain_trainer(2, 5, rest)
    again.load_state_dict(checkpoint)
    again.fit(data, data)
    assert (again.batching.batch_size, again.state.step) == (2, 5)
    assert first.seen + rest.seen == list(range(24))


class Rows(Dataset[Any]):
    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[index] for tensor in self.tensors)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_batches_of_a_size_that_parts_do_not_divide_are_not_trained_again(rows: bool, stop: int) -> None:
    data: Any = (torch.randn(24, 4), torch.arange(24.0)[:, None])
    data = Rows(*data) if rows else data
    first, rest = Smaller(stop, size=5), Smaller()
    trial = plain_trainer(1, 4, first)
    trial.fit(data, data)
    checkpoint = trial.state_dict()
    trial.fire("on_save_checkpoint", checkpoint)
    again = plain_trainer(2, 9, rest)
    again.load_state_dict(checkpoint)
    again.fit(data, data)
    assert first.seen == list(range([8, 13, 18][stop - 1]))
    assert (first.seen + rest.seen)[:24] == list(range(24))


def test_iterable_data_resume_in_parts_after_batches_of_a_size_that_these_do_not_divide() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter((torch.zeros(4), torch.tensor([float(number)])) for number in range(24))

    def shrink(trainer: Any) -> None:
        trainer.set_batch_size(5)

    first, rest = Smaller(stop=3, size=8), Smaller()
    trial = plain_trainer(1, 9, first)
    trial.callbacks.register("on_fit_start", shrink)
    trial.fit(Stream(), Stream())
    checkpoint = trial.state_dict()
    trial.fire("on_save_checkpoint", checkpoint)
    again = plain_trainer(2, 9, rest)
    again.load_state_dict(checkpoint)
    again.fit(Stream(), Stream())
    assert first.seen == list(range(15))
    assert rest.seen[0] in {14, 15}  # in whole batches of 2
