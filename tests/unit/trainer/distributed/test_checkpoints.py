"""Checkpoints of several processes: resumed to the same bits by as many, and by another number too."""

from pathlib import Path

import pytest
import torch

from tests.unit.trainer.distributed.ranks import Ranks
from tests.unit.trainer.distributed.runs import interrupted, stopped_at_its_start
from trainer.callbacks import Checkpoint
from trainer.checkpoint.manager import load_checkpoint, newest_checkpoint

pytestmark = pytest.mark.full


both = pytest.mark.parametrize("strategy", ["ddp", "fsdp"])


@both
@pytest.mark.parametrize("name", ["mlp", "cnn", "accumulation", "ema", "loader", "blocks"])
def test_as_many_processes_resume_to_the_same_bits(two: Ranks, tmp_path: Path, name: str, strategy: str) -> None:
    whole = two.values(interrupted, str(tmp_path / "whole"), name, None, None, False, strategy)
    assert whole[0][2] != whole[1][2]  # each draws numbers of its own
    for stop_at in (4, 6):
        parts = str(tmp_path / f"parts-{stop_at}")
        begun = two.values(interrupted, parts, name, stop_at, None, False, strategy)
        ended = two.values(interrupted, parts, name, None, None, True, strategy)
        for rank in range(2):
            history, weights, drawn, step = whole[rank]
            assert begun[rank][3] == stop_at
            assert ended[rank][0] == history
            assert ended[rank][3] == step
            assert all(torch.equal(weight, ended[rank][1][key]) for key, weight in weights.items())
            assert begun[rank][2] + ended[rank][2] == drawn


@both
def test_a_checkpoint_that_is_written_while_training_holds_what_each_had_there(
    two: Ranks, tmp_path: Path, strategy: str
) -> None:
    whole = two.values(interrupted, str(tmp_path / "whole"), "accumulation", None, 1, False, strategy)
    two.values(interrupted, str(tmp_path / "parts"), "accumulation", 5, 1, False, strategy)
    found = newest_checkpoint([tmp_path / "parts"])
    assert found is not None
    written = tmp_path / "parts" / "ahead"
    found[0].path.rename(written)  # what was written at the end: the one before is of the batch's own moment
    ended = two.values(interrupted, str(tmp_path / "parts"), "accumulation", None, None, True, strategy)
    for rank in range(2):
        assert ended[rank][0] == whole[rank][0]
        assert all(torch.equal(weight, ended[rank][1][key]) for key, weight in whole[rank][1].items())


def test_a_run_that_stops_where_it_resumes_keeps_what_each_had_there(two: Ranks, tmp_path: Path) -> None:
    whole = two.values(interrupted, str(tmp_path / "whole"), "mlp", None)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    begun = two.values(interrupted, first, "mlp", 4)
    two.values(stopped_at_its_start, first, second)
    ended = two.values(interrupted, second, "mlp", None, None, True)
    for rank in range(2):
        assert ended[rank][0] == whole[rank][0]
        assert begun[rank][2] + ended[rank][2] == whole[rank][2]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("mlp", "ddp"), ("accumulation", "ddp"), ("mlp", "fsdp"), ("accumulation", "fsdp"), ("ema", "fsdp")],
)
def test_another_number_of_processes_resumes_near_to_it(
    two: Ranks, four: Ranks, tmp_path: Path, name: str, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = interrupted(str(tmp_path / "whole"), name, None)
    for stop_at in (2, 6):
        folder = str(tmp_path / f"parts-{stop_at}")
        two.values(interrupted, folder, name, stop_at, None, False, strategy)
        caplog.clear()
        if stop_at == 2:
            history = interrupted(folder, name, None, None, True)[0]
            assert "written by 2 processes and is resumed by 1" in caplog.text
        else:
            history = four.values(interrupted, folder, name, None, None, True, strategy)[0][0]
        for metrics, others in zip(history, whole[0], strict=True):
            given_up = name == "accumulation" and strategy != "ddp"  # an open group of batches
            near = 1.0 if given_up else 1e-6
            assert metrics["train_loss"] == pytest.approx(others["train_loss"], abs=near)
            assert metrics["val_loss"] == pytest.approx(others["val_loss"], abs=near)


def test_the_format_before_can_be_read(tmp_path: Path) -> None:
    interrupted(str(tmp_path), "mlp", 3)
    found = newest_checkpoint([tmp_path])
    assert found is not None
    before = {key: item for key, item in found[1].items() if key not in {"processes", "ranks"}} | {"version": 6}
    torch.save(before, found[0].path)
    assert load_checkpoint(found[0].path)["version"] == 6
    whole = interrupted(str(tmp_path / "whole"), "mlp", None)
    ended = interrupted(str(tmp_path), "mlp", None, None, True)
    assert ended[0] == whole[0]
    assert Checkpoint
