"""Draws a running study for a terminal, from plain data and without any state.

`StudyView` has everything that the picture shows; `picture` turns it into a renderable of rich, which can also be
written to a file (``Console(record=True).export_svg()``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpo.storage.grants import Granted, granted_after
from hpo.study.thinning import evenly
from hpo.wording import parameter, reason_of_grant, shown

_BARS: Final = "▁▂▃▄▅▆▇█"
_ASCII_BARS: Final = "_.-=+*%#"
_CURVE: Final = 16
_NOTICES: Final = 3
_FRONT: Final = 3
_COLOURS: Final[Mapping[str, str]] = {"complete": "green", "pruned": "yellow", "diverged": "magenta"}
_SIGN: Final[Mapping[str, str]] = {"minimize": "↓", "maximize": "↑"}
#: The columns of the workers' table, and the terminal width from which each is shown.
_COLUMNS: Final[Mapping[str, int]] = {
    "worker": 56,
    "trial": 0,
    "device": 72,
    "epoch": 0,
    "value": 0,
    "predicted": 84,
    "time": 66,
    "curve": 48,
}


@dataclass(frozen=True)
class GrantView:
    """A scheduler's grant for a trial.

    Attributes:
        after: The epoch after which it starts or resumes; 0 for a new trial.
        until: The epoch after which it pauses; None: it trains to its end.
        why: The reason in words; see `hpo.wording.reason_of_grant`.
    """

    after: int
    until: int | None
    why: str

    @classmethod
    def of(cls, grants: Sequence[Granted]) -> GrantView | None:
        """The last grant of a trial; None without a scheduler."""
        if not grants:
            return None
        return cls(granted_after(grants), grants[-1]["until"], reason_of_grant(grants[-1]["why"]))


@dataclass(frozen=True)
class WorkerView:
    """A worker and its current trial.

    Attributes:
        worker: Its name.
        device: Its device.
        trial: The trial's number; None while the worker has none.
        epoch: Epochs that the trial has finished.
        max_epochs: The epochs of a whole trial; None if not known.
        value: The metric after the latest epoch that was validated.
        predicted: The predicted final loss, if there is one.
        curve: The metric after each epoch so far; None for an epoch without a value.
        seconds: The seconds that this attempt has taken.
        resumed: Epochs that earlier attempts had finished; None if not known.
        granted: The trial's last grant; None without a scheduler.
    """

    worker: str
    device: str
    trial: int | None = None
    epoch: int = 0
    max_epochs: int | None = None
    value: float | None = None
    predicted: float | None = None
    curve: tuple[float | None, ...] = ()
    seconds: float = 0.0
    resumed: int | None = 0
    granted: GrantView | None = None


@dataclass(frozen=True)
class StudyView:
    """The state of a study at one time.

    Attributes:
        study: Its name.
        goals: Each metric that is optimised, with ``minimize`` or ``maximize``.
        progress: Its progress, see `hpo.wording.progress`.
        outcomes: The number of ended trials by outcome.
        waiting: Trials that wait to start or resume.
        paused: Trials that are paused.
        best: The best trial, or the Pareto front: of each its ``trial``, ``value`` and ``params``; with several
            objectives ``values``.
        front: How many trials the Pareto front has; 0 for a study with one objective.
        workers: What each worker does.
        seconds: The seconds that this run has taken; None if the view is not of a run.
        left_s: An estimate of the seconds left, see `seconds_left`.
        notices: The newest warnings, the latest last.
    """

    study: str
    goals: Mapping[str, str]
    progress: tuple[int, int, str]
    outcomes: Mapping[str, int] = field(default_factory=dict)
    waiting: int = 0
    paused: int = 0
    best: Sequence[Mapping[str, Any]] = ()
    front: int = 0
    workers: Sequence[WorkerView] = ()
    seconds: float | None = None
    left_s: float | None = None
    notices: Sequence[str] = ()

    @property
    def so_far(self) -> str:
        """The progress as text: ``12/40 trials``."""
        done, of, unit = self.progress
        return f"{done}/{of} {unit}"


def seconds_left(unstarted: int, ended_s: Sequence[float], workers: Sequence[WorkerView]) -> float | None:
    """Estimate how long a study will still take.

    A running trial takes the time of its remaining epochs at the pace of this attempt. A trial that has not
    started (or waits to resume) takes the mean time of the ended ones, in which pruned and failed trials count as
    short as they were. Running trials count in that mean with their expected length; otherwise the first trials to
    end, the short ones, would decide it alone. The sum is divided among the workers, but a trial is not divided.
    As running trials may still be pruned, the estimate is too long rather than too short, mostly at the start.

    Args:
        unstarted: The number of trials that no worker has yet.
        ended_s: The seconds of each trial that has ended.
        workers: The workers; a trial's length counts if ``max_epochs`` is known and an epoch is done.

    Returns:
        Seconds; None if there is nothing to estimate from, or no worker is busy.
    """
    running = [worker for worker in workers if worker.trial is not None]
    heading = [_heading_for(worker) for worker in running]
    known = [*ended_s, *(total for total in heading if total is not None)]
    if not known or not workers:
        return None
    mean = sum(known) / len(known)
    rests = [
        max(0.0, (mean if total is None else total) - worker.seconds)
        for worker, total in zip(running, heading, strict=True)
    ]
    return max([(sum(rests) + unstarted * mean) / len(workers), *rests])


def _heading_for(worker: WorkerView) -> float | None:
    """The seconds of this attempt if the trial continues to its end at its pace so far."""
    if worker.resumed is None or worker.max_epochs is None or worker.epoch <= worker.resumed:
        return None
    own = worker.epoch - worker.resumed
    return worker.seconds / own * (worker.max_epochs - worker.resumed)


def sparkline(values: Sequence[float | None], width: int = _CURVE, *, ascii_only: bool = False) -> str:
    """A curve as one line of bars, scaled from its least value to its greatest.

    A curve longer than the line is thinned out, but keeps its last value. A value that is not finite is an ``x``;
    an epoch without a value is left out.
    """
    points = evenly([value for value in values if value is not None], width)
    finite = [value for value in points if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    bars = _ASCII_BARS if ascii_only else _BARS
    return "".join(_bar(value, low, high, bars) for value in points)


def _bar(value: float, low: float, high: float, bars: str) -> str:
    if not math.isfinite(value):
        return "x"
    # Halves, as the difference of two large numbers may overflow.
    share = (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.0
    return bars[round(share * (len(bars) - 1))]


def shown_seconds(seconds: float) -> str:
    """A duration as on a clock: ``0:07``, ``12:34``, ``1:02:03``, ``2 d 01:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(frozen=True)
class Picture:
    """A view as a renderable of rich, in the terminal's width and at most in its height."""

    view: StudyView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the view; see rich's console protocol."""
        height = options.height or console.height
        yield picture(self.view, options.max_width, height, ascii_only=options.ascii_only)


def picture(view: StudyView, width: int, height: int, *, ascii_only: bool = False) -> RenderableType:
    """The picture of a study for a terminal of this size."""
    above: list[RenderableType] = [_progress(view, width), _counts(view), *_best(view)]
    notices = _notices(view)
    room = max(1, height - len(above) - len(notices) - 3)  # header, line about omitted workers, cursor
    shown = list(view.workers)[:room]
    parts = [*above]
    if shown:
        parts.append(_workers(view, shown, width, ascii_only=ascii_only))
    if granted := [row for row in shown if row.granted is not None][: max(0, room - len(shown) - 1)]:
        parts.append(_grants(granted))
    if len(shown) < len(view.workers):
        parts.append(_line(f"and {len(view.workers) - len(shown)} workers more", style="dim"))
    return Group(*(parts + notices)[: max(1, height - 1)])


def _line(*parts: str | tuple[str, str], style: str = "") -> Text:
    return Text.assemble(*parts, style=style, no_wrap=True, overflow="ellipsis")


def _progress(view: StudyView, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=False)
    head = [Text(view.study, style="bold"), Text(view.so_far)]
    so_far = [] if view.seconds is None else [f"{shown_seconds(view.seconds)} so far"]
    left = [] if view.left_s is None else [f"about {shown_seconds(view.left_s)} left"]
    times = ", ".join([*so_far, *left])
    done, of, _ = view.progress
    bar = ProgressBar(total=max(1, of), completed=done, width=max(4, min(30, width - 60)))
    for _ in range(4):
        table.add_column(no_wrap=True, overflow="ellipsis")
    if width < 76:
        return _line((view.study, "bold"), f"  {view.so_far}  {times}")
    table.add_row(*head, bar, Text(times))
    return table


def _counts(view: StudyView) -> Text:
    unfinished = {"paused": view.paused, "waiting": view.waiting}
    parts = [
        (f"{count} {name.replace('_', ' ')}", _COLOURS.get(name, "red"))
        for name, count in view.outcomes.items()
        if count
    ]
    parts += [(f"{count} {name}", "dim") for name, count in unfinished.items() if count]
    if not parts:
        return _line("no trial has ended yet", style="dim")
    line = Text("  ", no_wrap=True, overflow="ellipsis").join(Text(*part) for part in parts)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _best(view: StudyView) -> list[RenderableType]:
    """The best trial with its parameters; with several objectives the first trials of the front, one a line."""
    lines: list[RenderableType] = []
    for entry in view.best[: _FRONT if view.front else 1]:
        values = entry.get("values") or {next(iter(view.goals)): entry["value"]}
        numbers = ", ".join(f"{name} {shown(value, 5)}" for name, value in values.items())
        params = "  ".join(f"{name}={parameter(value, 4)}" for name, value in entry["params"].items())
        lines.append(_line(("best ", "bold"), (f"trial {entry['trial']}, {numbers}", "green"), f"  {params}"))
    if view.front > len(lines):
        lines.append(_line(f"and {view.front - len(lines)} trials more on the Pareto front", style="dim"))
    return lines


def _workers(view: StudyView, rows: Iterable[WorkerView], width: int, *, ascii_only: bool) -> Table:
    columns = [name for name, least in _COLUMNS.items() if width >= least]
    if not any(worker.predicted is not None for worker in view.workers):
        columns = [name for name in columns if name != "predicted"]
    metric, direction = next(iter(view.goals.items()))
    titles = {"value": metric if ascii_only else f"{metric} {_SIGN[direction]}"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for name in columns:
        left = name in {"worker", "device", "curve"}
        title = Text(titles.get(name, name))  # a str would be read as markup
        table.add_column(title, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        cells = _cells(row, ascii_only=ascii_only)
        table.add_row(*(cells[name] for name in columns), style="" if row.trial is not None else "dim")
    return table


def _grants(rows: Iterable[WorkerView]) -> Table:
    """The table of the trials' grants, below the workers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for name in ("trial", "after", "to", "why"):
        table.add_column(name, justify="left" if name == "why" else "right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        assert row.granted is not None
        goal = "end" if row.granted.until is None else str(row.granted.until)
        table.add_row(str(row.trial), str(row.granted.after), goal, Text(row.granted.why))
    return table


def _cells(row: WorkerView, *, ascii_only: bool) -> dict[str, Text]:
    idle = row.trial is None
    epoch = str(row.epoch) if row.max_epochs is None else f"{row.epoch}/{row.max_epochs}"
    return {
        "worker": Text(row.worker),
        "trial": Text("-" if idle else str(row.trial)),
        "device": Text(row.device),
        "epoch": Text("" if idle else epoch),
        "value": Text("" if idle else shown(row.value, 5)),
        "predicted": Text("" if idle or row.predicted is None else shown(row.predicted, 5)),
        "time": Text("" if idle else shown_seconds(row.seconds)),
        "curve": Text(sparkline(row.curve, ascii_only=ascii_only), style="cyan"),
    }


def _notices(view: StudyView) -> list[RenderableType]:
    return [_line(("! ", "bold yellow"), text.partition("\n")[0]) for text in list(view.notices)[-_NOTICES:]]
