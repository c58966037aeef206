"""WeightMerging: files that are the mean of their steps, also of a resumed run, and training untouched."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    regression,
    through_file,
)
from trainer import Trainer, load_weights
from trainer.callbacks import WeightMerging
from trainer.checkpoint.manager import CheckpointWriteError


def build(*callbacks: Any, **options: Any) -> Trainer:
    """Twelve steps in two epochs."""
    return make_trainer(callbacks, **options)


def fit(trainer: Trainer) -> Trainer:
    trainer.fit(regression(24), regression())
    return trainer


def files(folder: Path) -> dict[int, dict[str, Any]]:
    found = [torch.load(path, weights_only=True) for path in sorted(folder.glob("merged-step-*.pt"))]
    return {content["step"]: content for content in found}


def test_each_file_is_the_mean_of_its_steps_and_training_is_as_without(tmp_path: Path) -> None:
    """Stretches of five steps that end every fourth, so that they overlap, and one more; against float64 sums."""
    seen: list[dict[str, Tensor]] = []

    def note(trainer: Any) -> None:
        seen.append({name: value.double().clone() for name, value in trainer.model.state_dict().items()})

    merging = WeightMerging(tmp_path, last_steps=5, every_n_steps=4, at_steps=[7])
    merged = fit(build(merging, At("on_after_optimizer_step", note)))
    assert min(merging.state_dict()["counts"]) > 12  # nothing of a merge that is saved
    found = files(tmp_path)
    assert {step: content["steps"] for step, content in found.items()} == {4: 4, 7: 5, 8: 5, 12: 5}
    for step, content in found.items():
        window = seen[max(0, step - 5) : step]
        for name, value in content["model"].items():
            mean = torch.stack([weights[name] for weights in window]).mean(dim=0)
            expected = window[-1][name] if name.endswith("num_batches_tracked") else mean
            torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-7)
    plain = frozen(fit(build()))
    assert_same(frozen(merged)["model"], plain["model"])
    assert_same(frozen(merged)["optimizer"], plain["optimizer"])


@pytest.mark.parametrize("step", [2, 5, 8])
def test_a_resumed_run_saves_the_same_files_to_the_bit(tmp_path: Path, step: int) -> None:
    def merging(name: str) -> WeightMerging:
        return WeightMerging(tmp_path / name, last_steps=5, every_n_steps=4)

    fit(build(merging("whole")))
    stopped = fit(build(merging("run"), interrupt_at(step)))
    resumed = build(merging("run"))
    resumed.load_state_dict(through_file(stopped.state_dict()))
    fit(resumed)
    assert_same(files(tmp_path / "run"), files(tmp_path / "whole"))


def test_taken_on_inside_a_stretch_it_says_of_how_many_steps_the_merge_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = fit(build(interrupt_at(6)))
    resumed = build(WeightMerging(tmp_path, last_steps=4, every_n_steps=8))
    resumed.load_state_dict(through_file(stopped.state_dict()))
    with caplog.at_level(logging.WARNING):
        fit(resumed)
    assert files(tmp_path)[8]["steps"] == 2
    assert "the merge at step 8 is the mean of the last 2 steps" in caplog.text


class Tied(nn.Module):
    """One weight under two names, in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.other = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.other.weight = self.one.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.other(self.one(inputs.bfloat16())).float().mean(dim=1, keepdim=True)  # type: ignore[no-any-return]


def test_tied_and_short_weights_are_loaded_as_they_were(tmp_path: Path) -> None:
    fit(build(WeightMerging(tmp_path, last_steps=3, at_steps=[3]), model=Tied(), max_epochs=1))
    content = files(tmp_path)[3]["model"]
    assert content["one.weight"].dtype == torch.bfloat16
    assert torch.equal(content["one.weight"], content["other.weight"])
    model = Tied()
    load_weights(model, tmp_path / "merged-step-00000003.pt")
    assert torch.equal(model.one.weight, content["one.weight"])


def test_a_state_of_another_model_and_a_place_that_takes_no_files_are_refused(tmp_path: Path) -> None:
    merging = WeightMerging(tmp_path, last_steps=9, every_n_steps=9)
    stopped = fit(build(merging, interrupt_at(2)))
    other = WeightMerging(tmp_path, last_steps=9, every_n_steps=9)
    other.load_state_dict(merging.state_dict())
    trainer = build(other, model=nn.Linear(4, 1))
    trainer.state.step = stopped.state.step
    with pytest.raises(ValueError, match="the saved merge and the model differ in"):
        fit(trainer)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteError, match=r"merged weights .* can't be written"):
        fit(build(WeightMerging(tmp_path / "file", every_n_steps=1), model=make_model()))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"last_steps": 0, "every_n_steps": 3}, "last_steps is 0: give a whole number of at least 1"),
        ({"every_n_steps": True}, "every_n_steps is True"),
        ({"at_steps": [2, -1]}, "a step in at_steps is -1"),
        ({}, "nothing says when to merge: give every_n_steps or at_steps"),
    ],
)
def test_arguments_without_sense_are_refused(tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        WeightMerging(tmp_path, **arguments)


def test_a_resumed_run_with_other_steps_saves_the_merges_of_these_alone(tmp_path: Path) -> None:
    stopped = fit(build(WeightMerging(tmp_path, 5, every_n_steps=8, at_steps=[7, 9]), interrupt_at(6)))
    resumed = build(WeightMerging(tmp_path, 5, every_n_steps=10, at_steps=[7]))
    resumed.load_state_dict(through_file(stopped.state_dict()))
    fit(resumed)
    assert {step: content["steps"] for step, content in files(tmp_path).items()} == {7: 5, 10: 4}
