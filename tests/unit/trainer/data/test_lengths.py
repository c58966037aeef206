"""How many samples a batch holds, and what the numbers of an epoch are where no tensor of samples comes first."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset

from trainer import BatchOptions, Trainer
from trainer.data.lengths import batch_length, known_samples, samples_in

#: The lengths of six sequences, and their classes.
LENGTHS = (1, 1, 1, 1, 9, 9)
CLASSES = torch.tensor([0, 0, 0, 0, 1, 1])


@dataclass
class Fields:
    x: Tensor
    y: Tensor


class Opaque:
    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors


def packed(*lengths: int) -> PackedSequence:
    return pack_sequence([torch.zeros(length, 2) for length in lengths], enforce_sorted=False)


def images(count: int) -> list[Tensor]:
    return [torch.zeros(3, 4 + at, 5) for at in range(count)]


def boxes(*counts: int) -> list[dict[str, Tensor]]:
    return [{"boxes": torch.zeros(count, 4), "labels": torch.zeros(count)} for count in counts]


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (torch.zeros(3, 2), 3),
        ((torch.zeros(4), torch.zeros(4)), 4),
        ((torch.zeros(2, 3, 8, 8), torch.zeros(7, 6)), 2),
        ([torch.zeros(5)], 5),
        ({"x": torch.zeros(6, 1)}, 6),
        ({"x": torch.zeros(6, 1), "edges": torch.zeros(2, 9)}, 6),
        ({"scale": torch.tensor(2.0), "x": torch.zeros(6, 1)}, 6),
        ({"pair": (torch.zeros(7), torch.zeros(7))}, 7),
        ([[torch.zeros(7), torch.zeros(7, 2)], torch.zeros(7)], 7),
        ((["a", "b"], torch.zeros(2, 3)), 2),
        ({"name": ["a", "b", "c"], "x": torch.zeros(3)}, 3),
        (packed(2, 5, 1), 3),
        ((packed(2, 5, 1), torch.zeros(3)), 3),
        ((packed(2, 5, 1), packed(1, 1, 4)), 3),
        ((packed(2, 5), ["a", "b"]), 2),
        ((images(2), torch.zeros(2)), 2),
        ((images(4), boxes(1, 2, 5, 3)), 4),
        ((tuple(images(2)), tuple(boxes(3, 3))), 2),
        ({"images": images(2), "targets": boxes(1, 4)}, 2),
        ({"images": images(2), "name": ["a", "b"]}, 2),
        (([torch.zeros(5), torch.zeros(2)], [torch.zeros(5), torch.zeros(2)]), 2),
        ([{"x": torch.zeros(4), "y": torch.tensor(0.0)}] * 3, 3),
        (((torch.zeros(6, 4), torch.zeros(2, 6, 3)), (torch.zeros(6, 1), torch.zeros(2, 6, 3))), 6),
        ([[torch.zeros(6, 4), torch.zeros(6)], [torch.zeros(6), torch.tensor(1.0)]], 6),
        (((torch.zeros(6), torch.zeros(9, 9)), (torch.zeros(6), torch.zeros(9))), 6),
        ({"in": (torch.zeros(6, 2), torch.zeros(1, 6)), "out": (torch.zeros(6), torch.zeros(1, 6))}, 6),
        ((images(3), [torch.zeros(4 + at, 5 + at) for at in range(3)]), 3),
        (({"x": torch.zeros(4, 2)}, {"classes": torch.zeros(9)}), 4),
        (({"nodes": torch.zeros(9, 2)}, torch.zeros(4)), 4),
        ((Opaque(), torch.zeros(4)), 4),
        (Fields(torch.zeros(4, 2), torch.zeros(4)), 4),
        (Opaque(torch.zeros(4, 2), torch.zeros(4)), 4),
        (["a", "b", "c"], 3),
        ((["a", "b"], ["c", "d"]), 2),
        (np.zeros((5, 2)), 5),
        (torch.tensor(1.0), 1),
        ("text", 1),
        ((7, "text"), 1),
        ((), 1),
        (None, 1),
    ],
)
def test_the_length_of_a_batch(batch: Any, length: int) -> None:
    assert known_samples(batch) == batch_length(batch) == samples_in(batch) == length


@pytest.mark.parametrize("batch", [Opaque(), Opaque(torch.zeros(9), torch.zeros(4)), (Opaque(), Opaque())])
def test_what_does_not_tell_is_an_error_that_names_the_weight(batch: Any) -> None:
    assert known_samples(batch) is None
    assert batch_length(batch) == 1
    with pytest.raises(ValueError, match=r"is a (Opaque|tuple) that does not say .* step return 'weight'"):
        samples_in(batch)


class Sequences(Dataset[Any]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return torch.full((LENGTHS[at], 2), float(at)), CLASSES[at]


Items = list[tuple[Tensor, Tensor]]


def in_pack(items: Items) -> Any:
    return pack_sequence([x for x, _ in items], enforce_sorted=False), torch.stack([y for _, y in items])


def in_list(items: Items) -> Any:
    return [x for x, _ in items], torch.stack([y for _, y in items])


def in_fields(items: Items) -> Any:
    return Fields(torch.stack([x[0] for x, _ in items]), torch.stack([y for _, y in items]))


def in_object(items: Items) -> Any:
    return Opaque(torch.cat([x for x, _ in items]), torch.stack([y for _, y in items]))


class AlwaysFirst(nn.Module):
    """Says class 0 of every sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: Any) -> Tensor:
        count = int(x.batch_sizes[0]) if isinstance(x, PackedSequence) else len(x)
        return torch.tensor([1.0, 0.0]).expand(count, 2) + self.bias


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def trainer_of(collate: Callable[[Items], Any], size: int, **options: Any) -> Trainer:
    model = AlwaysFirst()
    batching = BatchOptions(batch_size=size, eval_batch_size=size, collate_fn=collate)
    return Trainer(model, torch.optim.SGD(model.parameters(), 0.0), device="cpu", batching=batching, **options)


@pytest.mark.parametrize("size", [2, 4, 6])
@pytest.mark.parametrize("collate", [in_pack, in_list])
def test_metrics_of_sequences_are_means_over_sequences(collate: Callable[[Items], Any], size: int) -> None:
    trainer = trainer_of(collate, size, loss=nn.CrossEntropyLoss(), metrics={"accuracy": accuracy})
    assert trainer.validate(Sequences())["val_accuracy"] == pytest.approx(4 / 6)


def step_of_fields(model: nn.Module, batch: Fields) -> Tensor:
    return nn.functional.cross_entropy(model(batch.x), batch.y)


@pytest.mark.parametrize("size", [4, 6])
def test_a_dataclass_of_tensors_counts_its_samples(size: int) -> None:
    wrong, right = torch.tensor([[1.0, 0.0]]).log_softmax(1).neg().squeeze(0).tolist()[::-1]
    loss = trainer_of(in_fields, size, step=step_of_fields).validate(Sequences())["val_loss"]
    assert loss == pytest.approx((4 * right + 2 * wrong) / 6)


def test_a_step_that_gives_a_weight_may_have_any_batch() -> None:
    def step(model: nn.Module, batch: Opaque) -> dict[str, Any]:
        targets = batch.tensors[1]
        loss = nn.functional.cross_entropy(model(targets), targets)
        return {"loss": loss, "weight": len(targets), "share": (targets == 0).float().mean()}

    found = trainer_of(in_object, 4, step=step).validate(Sequences())
    assert found["val_share"] == pytest.approx(4 / 6)
    with pytest.raises(ValueError, match="let the step return 'weight'"):
        trainer_of(in_object, 4, step=lambda model, batch: step(model, batch)["loss"]).validate(Sequences())


def test_functions_count_by_the_weight_where_the_samples_are_not_known() -> None:
    def collate(items: Items) -> tuple[Opaque, Opaque]:
        return Opaque(), Opaque(torch.stack([y for _, y in items]))

    def step(model: nn.Module, batch: tuple[Opaque, Opaque]) -> dict[str, Any]:
        (targets,) = batch[1].tensors
        outputs = model(targets)
        loss = nn.functional.cross_entropy(outputs, targets)
        return {"loss": loss, "outputs": outputs, "weight": torch.tensor(len(targets))}

    metrics = {"accuracy": lambda outputs, targets: accuracy(outputs, *targets.tensors)}
    found = trainer_of(collate, 4, step=step, metrics=metrics).validate(Sequences())
    assert found["val_accuracy"] == pytest.approx(4 / 6)
