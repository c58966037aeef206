"""The picture of a running study, as lines of text."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from rich.console import Console

from hpo.console.live import GrantView, Picture, StudyView, WorkerView, seconds_left, shown_seconds, sparkline

WORKERS = (
    WorkerView("worker-1", "cuda:0", 7, 3, 20, 0.51234, 0.25, (2.0, 1.0, 0.51234), 12.0),
    WorkerView("worker-2", "cuda:1"),
)
VIEW = StudyView(
    "digits",
    {"val_loss": "minimize"},
    (9, 40, "trials"),
    {"complete": 5, "pruned": 2, "diverged": 1, "out_of_memory": 1, "error": 0},
    waiting=2,
    best=({"trial": 3, "value": 0.125, "params": {"optimizer.lr": 0.001234567, "model.hidden": 32}},),
    workers=WORKERS,
    seconds=75.0,
    left_s=3600.0,
    notices=("an old one", "first", "second\nwith more to it", "third"),
)


def drawn(view: StudyView, width: int = 120, height: int = 40, encoding: str = "utf-8") -> list[str]:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    console.print(Picture(view))
    out.flush()
    text = out.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def test_everything_that_is_known_is_shown() -> None:
    lines = drawn(VIEW)
    assert lines[0].startswith("digits  9/40 trials  ━")
    assert lines[0].endswith("1:15 so far, about 1:00:00 left")
    assert lines[1] == "5 complete  2 pruned  1 diverged  1 out of memory  2 waiting"
    assert lines[2] == "best trial 3, val_loss 0.125  optimizer.lr=0.001235  model.hidden=32"
    assert lines[3].split() == [
        "worker",
        "trial",
        "device",
        "epoch",
        "val_loss",
        "↓",
        "predicted",
        "time",
        "curve",
    ]
    assert lines[4].split() == ["worker-1", "7", "cuda:0", "3/20", "0.51234", "0.25", "0:12", "█▃▁"]
    assert lines[5].split() == ["worker-2", "-", "cuda:1"]
    assert lines[6:] == ["! first", "! second", "! third"]


def test_a_study_that_is_given_epochs_shows_how_many_are_trained() -> None:
    view = replace(VIEW, progress=(250, 1000, "epochs"))
    assert drawn(view)[0].startswith("digits  250/1000 epochs  ━")
    assert drawn(view, width=60)[0].startswith("digits  250/1000 epochs  1:15 so far")


GRANTED = replace(
    VIEW,
    workers=(
        replace(WORKERS[0], granted=GrantView(3, 9, "model, ends at 0.0768 (0.0551 to 0.115), best 0.0561")),
        WORKERS[1],
        WorkerView("worker-3", "cuda:1", 12, granted=GrantView(0, None, "whole")),
    ),
)


def test_what_each_trial_was_granted_stands_below_the_workers() -> None:
    lines = drawn(GRANTED, width=80)
    assert lines[3].startswith("worker")
    assert [line.split(maxsplit=3) for line in lines[7:10]] == [
        ["trial", "after", "to", "why"],
        ["7", "3", "9", "model, ends at 0.0768 (0.0551 to 0.115), best 0.0561"],
        ["12", "0", "end", "whole"],
    ]


@pytest.mark.parametrize("metric", ["recall[red]", "recall[/b]", "recall@[k]"])
def test_no_text_is_taken_for_markup(metric: str) -> None:
    view = replace(VIEW, goals={metric: "maximize"}, notices=[f"{metric} is new"])
    best = {"trial": 3, "value": 0.125, "params": {f"optimizer.{metric}": metric}}
    lines = drawn(replace(view, best=(best,)))
    assert f"{metric} 0.125  optimizer.{metric}={metric}" in lines[2]
    assert f"{metric} ↑" in lines[3]
    assert lines[-1] == f"! {metric} is new"


@pytest.mark.parametrize(("height", "grants"), [(15, 2), (14, 1), (13, 0), (12, 0)])
def test_a_low_terminal_shows_workers_before_grants(height: int, grants: int) -> None:
    lines = drawn(GRANTED, height=height)
    assert len(lines) <= height - 1
    assert sum("worker-" in line for line in lines) == 3
    assert sum("model, ends" in line or "whole" in line for line in lines) == grants


def test_a_study_that_has_just_begun() -> None:
    lines = drawn(
        StudyView(
            "new", {"val_accuracy": "maximize"}, (0, 3, "trials"), workers=(WorkerView("worker-1", "cpu", 0),)
        )
    )
    assert lines[0].startswith("new  0/3 trials")
    assert "left" not in lines[0]
    assert lines[1] == "no trial has ended yet"
    assert "val_accuracy ↑" in lines[2]
    assert "predicted" not in lines[2]
    assert lines[3].split() == ["worker-1", "0", "cpu", "0", "-", "0:00"]


@pytest.mark.parametrize("width", [20, 40, 50, 60, 76, 90, 200])
def test_no_line_is_wider_than_the_terminal_and_none_is_broken(width: int) -> None:
    lines = drawn(VIEW, width)
    assert all(len(line) <= width for line in lines)
    assert len(lines) == 9
    assert " 7 " in f" {lines[4]} "
    assert ("worker-1" in lines[4]) == (width >= 56)
    assert ("cuda:0" in lines[4]) == (width >= 72)
    assert ("█▃▁" in lines[4]) == (width >= 48)


@pytest.mark.parametrize("height", [2, 5, 8, 10, 16])
def test_a_low_terminal_shows_fewer_workers(height: int) -> None:
    view = replace(VIEW, workers=[replace(WORKERS[0], worker=f"worker-{n}") for n in range(12)])
    lines = drawn(view, 120, height)
    assert len(lines) <= height
    assert lines[0].startswith("digits  9/40")
    shown = sum(line.startswith("worker-") for line in lines)
    assert shown < 12
    if height > 8:
        assert f"and {12 - shown} workers more" in lines
        assert lines[-1] == "! third"


def test_a_pareto_front_is_shown_by_its_first_trials() -> None:
    front = [
        {"trial": n, "value": 0.1 * n, "values": {"val_loss": 0.1 * n, "size": 10.0}, "params": {"n": n}}
        for n in range(1, 6)
    ]
    lines = drawn(replace(VIEW, goals={"val_loss": "minimize", "size": "minimize"}, best=front, front=5))
    assert lines[2] == "best trial 1, val_loss 0.1, size 10  n=1"
    assert lines[5] == "and 2 trials more on the Pareto front"


def test_a_terminal_without_unicode_gets_none() -> None:
    text = "\n".join(drawn(VIEW, encoding="ascii"))
    assert "#-_" in text or "#._" in text


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ((), ""),
        ((1.0,), "▁"),
        ((3.0, 3.0), "▁▁"),
        ((0.0, 0.5, 1.0), "▁▅█"),
        ((1.0, math.nan, 0.0, math.inf), "█x▁x"),
        ((math.nan,), "x"),
        ((None, 1.0, None, 2.0), "▁█"),
        ((-1.7e308, 1.7e308), "▁█"),
        (tuple(map(float, range(100))), "▁▂▃▄▅▆▇█"),
    ],
)
def test_a_curve_is_a_line_of_bars(values: tuple[float | None, ...], line: str) -> None:
    assert sparkline(values, 8) == line


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3723, "1:02:03"), (90061, "1 d 01:01:01")],
)
def test_times_are_shown_as_clocks_do(seconds: float, shown: str) -> None:
    assert shown_seconds(seconds) == shown


def at(seconds: float, epoch: int, *, of: int | None = 10, resumed: int | None = 0) -> WorkerView:
    return WorkerView("w", "cpu", 0, epoch, of, seconds=seconds, resumed=resumed)


IDLE = WorkerView("w", "cpu")
CASES: Mapping[str, tuple[int, list[float], list[WorkerView], float | None]] = {
    "nothing to go by": (5, [], [at(3.0, 0)], None),
    "no worker is busy": (5, [10.0], [], None),
    "all done": (0, [10.0], [IDLE], 0.0),
    "one worker": (3, [10.0, 20.0], [IDLE], 45.0),
    "shared by two": (3, [10.0, 20.0], [IDLE, IDLE], 22.5),
    "the first trial by its own pace": (0, [], [at(4.0, 2)], 16.0),
    "it speaks for those to come": (1, [], [at(4.0, 2)], 36.0),
    "short ones that ended do not speak alone": (1, [2.0], [at(5.0, 5)], 5.0 + 6.0),
    "a trial is not divided": (0, [10.0], [at(10.0, 1), IDLE, IDLE], 90.0),
    "epochs of earlier attempts took no time of this one": (0, [], [at(4.0, 6, resumed=4)], 8.0),
    "without a known end the mean is left": (0, [10.0], [at(4.0, 3, of=None)], 6.0),
    "longer than the mean already": (0, [10.0], [at(40.0, 3, of=None)], 0.0),
    "unknown share of this attempt": (0, [10.0], [at(4.0, 9, resumed=None)], 6.0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_time_left(case: str) -> None:
    unstarted, ended, workers, left = CASES[case]
    assert seconds_left(unstarted, ended, workers) == (None if left is None else pytest.approx(left))
