"""SequenceLengthSchedule: which step trains on which lengths, and what becomes of the rest of a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.unit.trainer.support import At, assert_same, frozen, interrupt_at, make_trainer, through_file
from trainer import Trainer
from trainer.callbacks import GradientAccumulation, SequenceLengthSchedule

LENGTHS = {0: 2, 2: 3, 4: 9}


def sequences() -> TensorDataset:
    """Tokens [samples, 6], targets alike, and a number a sample."""
    tokens = torch.arange(72).reshape(12, 6) % 5
    return TensorDataset(tokens, (tokens + 1) % 5, torch.arange(12.0))


def step(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    loss: Tensor = nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    return loss


def train(*callbacks: Any, checkpoint: Any = None, data: Any = None) -> tuple[Trainer, list[Any]]:
    seen: list[Any] = []
    look = At(
        "on_before_forward", lambda trainer: seen.append([tuple(item.shape) for item in trainer.state.batch])
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4), nn.Dropout(0.2), nn.Linear(4, 5))
    trainer = make_trainer([*callbacks, look], model=model, step=step)
    if checkpoint is not None:
        trainer.load_state_dict(through_file(checkpoint))
    trainer.fit(data or sequences(), data or sequences())
    return trainer, seen


def test_sequences_grow_with_the_steps_and_validation_sees_them_whole() -> None:
    sizes: list[int] = []
    look = At("on_validation_batch_end", lambda trainer: sizes.append(trainer.state.batch[0].shape[1]))
    _, seen = train(SequenceLengthSchedule(LENGTHS), look)  # 2 passes of 3 batches of 4
    assert [shapes[0] for shapes in seen] == [(4, 2), (4, 2), (4, 3), (4, 3), (4, 6), (4, 6)]
    assert all(shapes[1:] == [shapes[0], (4,)] for shapes in seen)
    assert set(sizes) == {6}


def test_what_is_left_becomes_samples() -> None:
    tokens = sequences().tensors[0]
    batches: list[Tensor] = []
    keep = At("on_before_forward", lambda trainer: batches.append(trainer.state.batch[0]))
    _, seen = train(
        SequenceLengthSchedule({"0": 2, "3": 4}, how="split"), keep, data=TensorDataset(tokens, tokens)
    )
    assert [shapes[0] for shapes in seen] == [(12, 2)] * 3 + [(4, 4)] * 3
    pieces = {tuple(row) for batch in batches[:3] for row in batch.tolist()}
    assert pieces == {tuple(row[at : at + 2]) for row in tokens.tolist() for at in (0, 2, 4)}


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_run_resumes_to_the_bit(at: int) -> None:
    def callbacks() -> list[Any]:
        return [SequenceLengthSchedule(LENGTHS), GradientAccumulation(1)]

    whole, _ = train(*callbacks())
    stopped, _ = train(*callbacks(), interrupt_at(at))
    resumed, _ = train(*callbacks(), checkpoint=stopped.state_dict())
    assert_same(frozen(resumed), frozen(whole))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SequenceLengthSchedule({1: 4}), "give the one to begin with under 0"),
        (lambda: SequenceLengthSchedule({0: 0}), "lengths has 0: 0"),
        (lambda: SequenceLengthSchedule({"0": 4, "soon": 8}), "'soon' is not a whole number"),
        (lambda: SequenceLengthSchedule({0: 4}, how="cut"), "how is 'cut'"),  # type: ignore[arg-type]
        (lambda: SequenceLengthSchedule({0: 4}, dim=0), "dim is 0"),
        (lambda: train(SequenceLengthSchedule({0: 4}, dim=3)), "no tensor of the batch has a dimension 3"),
        (lambda: train(SequenceLengthSchedule({0: 4}, how="split")), "use how='truncate'"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
