"""ProgressBar: on a terminal, and where there is none."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer.support import At, interrupt_at, make_trainer, regression, through_file
from trainer.callbacks import GradientAccumulation, ProgressBar, StepMetrics, progress_bar


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(10_000))
    monkeypatch.setattr(progress_bar, "monotonic", lambda: float(next(seconds)))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def test_without_a_terminal_there_is_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    stopped = make_trainer([ProgressBar(), interrupt_at(13)])
    stopped.fit(regression(40), regression())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 13
    assert lines[4].startswith("epoch 1/2   50% [##########..........] 5/10  ")
    assert "train_loss" not in lines[9]
    first = stopped.state.history[0]
    assert f"train_loss {first['train_loss']:.4g}  val_loss {first['val_loss']:.4g}" in lines[10]
    resumed = make_trainer([ProgressBar()])
    resumed.load_state_dict(through_file(stopped.state_dict()))
    resumed.fit(regression(40), regression())
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[4] for line in lines] == [f"{done}/10" for done in range(4, 11)]


@pytest.mark.parametrize("kind", ["terminal", "dumb"])
def test_a_terminal_has_one_line_that_is_cleared_at_the_end(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    if kind == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    wide = ProgressBar(["*"])
    printed = At("on_log_steps", lambda trainer, records: sys.stderr.write("here\n"), priority=80)
    trainer = make_trainer([wide, StepMetrics(tmp_path, 1, 2), printed])
    trainer.fit(regression(), regression())
    text = capsys.readouterr().err
    if kind == "dumb":
        assert "\r" not in text
        return
    drawn = text.split("\r")
    assert all(len(line) < 100 for line in drawn)
    assert drawn[-1] == "here\n"  # printed last, and nothing stays
    assert not drawn[-2].strip()
    for index, line in enumerate(drawn):
        if line.startswith("here"):  # at the beginning of a line that was cleared
            assert not drawn[index - 1].strip()
    assert any("lr 0.05" in line for line in drawn[:6])  # of steps that came over inside the first epoch


@pytest.mark.parametrize("error", [False, True])
def test_a_run_that_ends_inside_an_epoch_leaves_no_part_of_a_line(
    error: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(trainer: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    event = "on_exception" if error else "on_fit_end"
    printed = At(event, lambda trainer, *error: sys.stderr.write("here\n"), priority=80)
    ends = At("on_train_batch_end", fail, lambda trainer: trainer.state.step == 2) if error else interrupt_at(2)
    with pytest.raises(ZeroDivisionError) if error else nullcontext():
        make_trainer([ProgressBar(), printed, ends]).fit(regression(), regression())
    *_, drawn, cleared, line = capsys.readouterr().err.split("\r")
    assert (drawn[:5], cleared.strip(), line) == ("epoch", "", "here\n")


def test_an_epoch_that_has_its_length_in_steps_shows_these(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"max_epochs": None, "max_steps": 8, "validate_every": 5}
    callbacks = [ProgressBar(), GradientAccumulation(2)]
    stopped = make_trainer([*callbacks, interrupt_at(6)], **options)
    stopped.fit(regression(40), regression())
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert [(line[2], line[4]) for line in lines] == [
        *((f"{share}%", f"{done}/5") for share, done in zip(range(20, 101, 20), range(1, 6), strict=True)),
        ("20%", "1/5"),
    ]
    resumed = make_trainer([ProgressBar(), GradientAccumulation(2)], **options)
    resumed.load_state_dict(through_file(stopped.state_dict()))
    resumed.fit(regression(40), regression())
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert [line[4] for line in lines] == ["2/5", "3/5"]
