"""Predictions: the model's outputs for data, joined or written, from a trainer that is fitting or not."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from schedulefree import SGDScheduleFree
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.unit.trainer.support import At, Recorder, assert_same, frozen, make_model, make_trainer, regression
from trainer import BatchOptions, Trainer
from trainer.callbacks import OptimizerMode

DATA = regression(9, seed=4)
INPUTS = DATA.tensors[0]


def by_hand(trainer: Trainer) -> Tensor:
    trainer.model.eval()
    with torch.no_grad():
        outputs: Tensor = trainer.model(INPUTS)
    return outputs


def build(*callbacks: Any, **options: Any) -> Trainer:
    options.setdefault("batching", BatchOptions(batch_size=4, eval_batch_size=4))
    return make_trainer(callbacks, **options)


@pytest.mark.parametrize(
    "data",
    [DATA, (INPUTS,), list(INPUTS), DataLoader(DATA, 2)],
    ids=["with targets", "without", "a plain data set", "a loader"],
)
def test_outputs_come_in_the_order_of_the_data(data: Any) -> None:
    if isinstance(data, list):
        data = DataLoader(data, 4)  # batches that are tensors
    trainer = build()
    trainer.fit(regression(), DATA)
    torch.testing.assert_close(trainer.predict(data), by_hand(trainer))
    assert trainer.model.training is False  # as by_hand left it


class Drawn(DistributedSampler[Any]):
    """A sampler of one process, which shuffles unless told not to."""

    def __init__(self, shuffle: bool = True) -> None:
        super().__init__(DATA, num_replicas=1, rank=0, shuffle=shuffle)


class OwnBatches(BatchSampler):
    """A batch sampler that says that it shuffles, as those of other libraries do."""

    shuffle = True


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, 2, shuffle=True),
        DataLoader(DATA, 2, sampler=WeightedRandomSampler([1.0] * 9, 9)),
        DataLoader(DATA, 2, sampler=SubsetRandomSampler(range(9))),
        DataLoader(DATA, 2, sampler=Drawn()),
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 2, drop_last=False)),
        DataLoader(DATA, batch_sampler=OwnBatches(range(9), 2, drop_last=False)),
    ],
    ids=["shuffle", "weighted", "subset", "distributed", "batch sampler", "own batch sampler"],
)
def test_a_loader_that_shuffles_is_refused(loader: DataLoader[Any], tmp_path: Path) -> None:
    trainer = build()
    with pytest.raises(ValueError, match=r"could not be matched to the data: hand over `loader\.dataset`"):
        trainer.predict(loader, tmp_path / "all.csv")
    assert not list(tmp_path.iterdir())
    in_order = by_hand(trainer)
    torch.testing.assert_close(trainer.predict(loader.dataset), in_order)
    torch.testing.assert_close(trainer.predict(DataLoader(DATA, 2, sampler=Drawn(shuffle=False))), in_order)


def test_a_fit_goes_on_as_if_nothing_had_been_predicted() -> None:
    plain, log = build(), []
    plain.fit(regression(), DATA)

    def predict(trainer: Any) -> None:
        assert trainer.predict(DATA).shape == (9, 1)
        assert trainer.model.training

    trainer = build(At("on_train_batch_end", predict), Recorder(log))
    trainer.fit(regression(), DATA)
    assert_same(frozen(trainer), frozen(plain))
    one = ["on_predict_start", *["on_predict_batch_start", "on_predict_batch_end"] * 3, "on_predict_end"]
    assert [event for event in log if "predict" in event] == one * 6
    log.clear()
    trainer.predict(DATA)
    assert log == ["setup", *one, "teardown"]


class Two:
    """A step that returns two outputs, and predicts one where it is asked to."""

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        outputs = model(batch[0])
        return {"loss": (outputs - batch[1]).square().mean(), "outputs": {"mean": outputs, "twice": 2 * outputs}}


class Own(Two):
    def predict(self, model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0])
        return 3 * outputs


def test_a_step_of_ones_own_predicts_its_outputs_or_what_it_says() -> None:
    trainer = build(step=Two())
    found = trainer.predict(DATA)
    torch.testing.assert_close(found["twice"], 2 * by_hand(trainer))
    assert list(found) == ["mean", "twice"]
    trainer = build(step=Own())
    torch.testing.assert_close(trainer.predict((INPUTS,)), 3 * by_hand(trainer))


def test_files_hold_what_is_returned(tmp_path: Path) -> None:
    trainer = build()
    expected = trainer.predict(DATA)
    assert trainer.predict(DATA, tmp_path / "new" / "all.pt") is None
    assert torch.equal(torch.load(tmp_path / "new" / "all.pt", weights_only=True), expected)
    trainer.predict(DATA, tmp_path / "all.csv")
    header, *rows = list(csv.reader((tmp_path / "all.csv").read_text().splitlines()))
    assert header == ["output"]
    assert torch.equal(torch.tensor([[float(cell) for cell in row] for row in rows]), expected)
    wide = build(model=nn.Linear(4, 3))
    wide.predict((INPUTS,), tmp_path / "all.csv")
    assert (tmp_path / "all.csv").read_text().startswith("output_0,output_1,output_2")
    assert {path.name for path in tmp_path.iterdir()} == {"new", "all.csv"}


def test_predictions_are_of_the_weights_that_are_validated() -> None:
    model = make_model()
    optimizer = SGDScheduleFree(model.parameters(), lr=0.05)
    validated: list[Tensor] = []
    look = At("on_validation_batch_end", lambda trainer: validated.append(trainer.state.outputs), priority=60)
    predicted: list[Tensor] = []
    between = At("on_train_epoch_end", lambda trainer: predicted.append(trainer.predict(DATA)), priority=60)
    trainer = build(OptimizerMode(), look, between, model=model, optimizer=optimizer, max_epochs=1)
    trainer.fit(regression(), DATA)
    assert torch.equal(predicted[0], torch.cat(validated))
    inside: list[tuple[Tensor, Tensor]] = []

    def both(trainer: Any) -> None:
        validated.clear()
        trainer.validate(DATA)
        inside.append((trainer.predict(DATA), torch.cat(validated)))

    trainer = build(OptimizerMode(), look, At("on_train_batch_end", both), model=model, optimizer=optimizer)
    trainer.fit(regression())
    assert all(torch.equal(one, other) for one, other in inside)


@pytest.mark.parametrize(
    ("predict", "error", "said"),
    [
        (lambda trainer, folder: trainer.predict(DATA, folder / "all.txt"), ValueError, "written to .pt"),
        (lambda trainer, folder: trainer.predict(DataLoader([(1.0, 2.0, 3.0)])), TypeError, "not inputs or"),
        (lambda trainer, folder: trainer.predict(DataLoader(INPUTS[:0])), ValueError, "gave no batch"),
        (
            lambda trainer, folder: build(step=Two()).predict(DATA, folder / "all.csv"),
            TypeError,
            "is a dict, and a .csv has a row",
        ),
        (
            lambda trainer, folder: build(step=lambda model, batch: model(batch[0]).mean()).predict(DATA),
            TypeError,
            "is a NoneType without a tensor",
        ),
    ],
)
def test_what_can_not_be_predicted_is_refused(predict: Any, error: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=said):
        predict(build(), tmp_path)
    assert list(tmp_path.iterdir()) == []


class Padded(nn.Module):
    """Outputs as wide as the batch is long, as where texts are padded to the longest of their batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs).expand(-1, len(inputs))


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        (None, ValueError, r"^predict can't join its batches: Sizes .*; let the step return outputs that differ"),
        (
            "o.pt",
            ValueError,
            r"^predict can't join its batches: Sizes .*; let the step return outputs that differ",
        ),
        ("o.csv", TypeError, "has 4 numbers for each sample of the first batch, and 1 for those of a later one"),
    ],
)
def test_outputs_whose_width_differs_by_batch_are_refused(
    name: str | None, error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        build(model=Padded()).predict(DATA, name and tmp_path / name)
    assert not list(tmp_path.iterdir())
