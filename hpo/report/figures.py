"""Draws the figures of a study's course; text of the study is escaped, because plotly.js reads text as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import optuna
import plotly.graph_objects as go
from optuna.trial import FrozenTrial
from optuna.visualization import plot_optimization_history

from hpo.config.schema_study import Direction
from hpo.report.drawable import drawn_text
from hpo.report.looks import (
    BLUE,
    GREEN,
    GREY,
    MAGENTA,
    ORANGE,
    VERMILION,
    described,
    is_logarithmic,
    laid_out,
    rounded,
)
from hpo.report.search_figures import target_of
from hpo.report.timeline import Timeline
from hpo.storage.pausing import PAUSED
from hpo.study.outcome import UNFINISHED, Outcome, outcome_of
from hpo.study.pruning_summary import MIDDLE_80, ComparedPrediction
from hpo.study.ranking import is_feasible

#: At most this many points of a curve are drawn.
MOST_POINTS: Final = 200
_BAR: Final = 0.7


@dataclass(frozen=True)
class _Kind:
    """How trials of some outcomes are drawn."""

    name: str
    color: str
    symbol: str
    dash: str = "solid"


_COMPLETE: Final = _Kind("complete", BLUE, "circle")
_BEYOND: Final = _Kind("outside the bounds", GREY, "diamond-open")
_PRUNED: Final = _Kind("pruned", ORANGE, "x")
_DIVERGED: Final = _Kind("diverged", VERMILION, "triangle-up", "dash")
_UNDER_WAY: Final = _Kind("not ended", GREEN, "circle-open", "dot")
_FAILED: Final = _Kind("failed", GREY, "square", "dash")
_KIND_OF: Final = {
    Outcome.COMPLETE.value: _COMPLETE,
    Outcome.PRUNED.value: _PRUNED,
    Outcome.DIVERGED.value: _DIVERGED,
    **dict.fromkeys(UNFINISHED, _UNDER_WAY),
}
#: In drawing order: later ones are on top.
_KINDS: Final = (_BEYOND, _COMPLETE, _UNDER_WAY, _FAILED, _DIVERGED, _PRUNED)


def _kind(trial: FrozenTrial) -> _Kind:
    kind = _KIND_OF.get(outcome_of(trial), _FAILED)
    return _BEYOND if kind == _COMPLETE and not is_feasible(trial) else kind


def learning_curves(
    trials: Iterable[FrozenTrial], metric: str, direction: str, best: Sequence[FrozenTrial] = ()
) -> go.Figure:
    """The reported values of every trial by epoch; two traces for each outcome: the curves, and their last points.

    Args:
        trials: The trials.
        metric: The metric that they reported.
        direction: Its direction.
        best: The trials that are highlighted.
    """
    trials = list(trials)
    groups: dict[str, list[FrozenTrial]] = {kind.name: [] for kind in _KINDS}
    for trial in trials:
        if trial.intermediate_values:
            groups[_kind(trial).name].append(trial)
    drawn = go.Figure()
    for kind in _KINDS:
        if groups[kind.name]:
            drawn.add_traces(_curves(kind, groups[kind.name]))
    drawn.add_traces([_best_curve(trial) for trial in best if trial.intermediate_values])
    logarithmic = is_curve_logarithmic(trials, direction)
    return laid_out(drawn, "epoch", metric, logarithmic=logarithmic, whole=True)


def is_curve_logarithmic(trials: Iterable[FrozenTrial], direction: str) -> bool:
    """Whether the curves of these trials are easier to read on a logarithmic axis."""
    return is_logarithmic((value for trial in trials for value in trial.intermediate_values.values()), direction)


def _best_curve(trial: FrozenTrial) -> go.Scatter:
    """The curve of the best trial, above all others."""
    points = curve_points(trial.intermediate_values)
    return go.Scatter(
        x=[step for step, _ in points],
        y=[value for _, value in points],
        mode="lines" if len(points) > 1 else "lines+markers",  # a line needs two points
        meta="best",
        line={"color": MAGENTA, "width": 3.5},
        marker={"size": 9},
        name=f"the best: trial {trial.number}",
        hovertemplate=f"trial {trial.number}, the best<br>epoch %{{x}}: %{{y:.6g}}<extra></extra>",
    )


def _curves(kind: _Kind, trials: Sequence[FrozenTrial]) -> list[go.Scatter]:
    """All curves of a kind as one line with gaps: a trace for each of many trials would not be drawn in time."""
    epochs: list[int | None] = []
    values: list[float | None] = []
    numbers: list[int | None] = []
    ends: list[tuple[int, float, int]] = []
    for trial in trials:
        points = curve_points(trial.intermediate_values)
        epochs += [*(step for step, _ in points), None]
        values += [*(value for _, value in points), None]
        numbers += [trial.number] * len(points) + [None]
        ends += [(step, value, trial.number) for step, value in points if value is not None][-1:]
    label = f"trial %{{customdata}}, {kind.name}<br>epoch %{{x}}: %{{y:.6g}}<extra></extra>"
    look = {"legendgroup": kind.name, "hovertemplate": label}
    line = {"color": kind.color, "width": 1.2, "dash": kind.dash}
    name = f"{kind.name} ({len(trials)})"
    opacity = min(0.7, max(0.2, 30 / len(trials)))
    marker = {"color": kind.color, "symbol": kind.symbol, "size": 7}
    last = {"x": [end[0] for end in ends], "y": [end[1] for end in ends], "customdata": [end[2] for end in ends]}
    return [
        go.Scatter(
            x=epochs,
            y=values,
            customdata=numbers,
            mode="lines",
            line=line,
            opacity=opacity,
            showlegend=False,
            **look,
        ),
        go.Scatter(**last, mode="markers", marker=marker, name=name, **look),
    ]


def curve_points(reported: Mapping[int, float]) -> list[tuple[int, float | None]]:
    """A curve's points by step; a long curve is thinned out, but keeps its last point."""
    points = sorted(reported.items())
    every = -(-len(points) // MOST_POINTS)
    kept = [point for place, point in enumerate(points) if (len(points) - 1 - place) % every == 0]
    return [(step, rounded(value)) for step, value in kept]


def history(
    study: optuna.Study, trials: Iterable[FrozenTrial], goals: Mapping[str, Direction], metric: str
) -> go.Figure:
    """Optuna's plot of a metric's values by trial; for a single goal, with the best value so far.

    Args:
        study: A snapshot of the trials.
        trials: The complete trials.
        goals: Metrics and directions.
        metric: The metric.
    """
    target = target_of(goals, metric)
    drawn = plot_optimization_history(study, target=target, target_name=drawn_text(metric))
    by_number = {trial.number: trial for trial in trials}
    looks = {"markers": {"color": BLUE, "size": 7}, "lines": {"color": VERMILION, "shape": "hv"}}
    values: list[float] = []
    for trace in drawn.data:
        if trace.mode == "lines":
            trace.update(line=looks["lines"], name="best so far", hoverinfo="skip")
            continue
        beyond = trace.name == "Infeasible Trial"
        values += trace.y
        trace.update(
            text=[described(by_number[number]) for number in trace.x],
            hovertemplate=_TRIAL_TEXT,
            marker={"color": GREY, "symbol": "diamond-open", "size": 7} if beyond else looks["markers"],
            name=_BEYOND.name if beyond else "trial",
            showlegend=bool(trace.x),
        )
    return laid_out(drawn, "trial", metric, logarithmic=is_logarithmic(values, goals[metric]), whole=True)


_TRIAL_TEXT: Final = "trial %{x}: %{y:.6g}%{text}<extra></extra>"


def predictions_against_outcomes(compared: Sequence[ComparedPrediction]) -> go.Figure:
    """Each prediction, with its 80 % interval, over the trial's final value; exact ones are on the line.

    If no value is negative, as with a loss, intervals are cut off at 0.
    """
    actual, predicted = [each.actual for each in compared], [each.predicted for each in compared]
    wide = [MIDDLE_80 * each.std for each in compared]
    down = wide if min(actual + predicted) < 0 else list(map(min, wide, predicted))
    bars = {"type": "data", "array": wide, "arrayminus": down, "color": GREY, "thickness": 1}
    label = "trial %{customdata[0]}, predicted at epoch %{customdata[1]}<br>%{y:.6g} for %{x:.6g}<extra></extra>"
    ends = [min(actual + predicted), max(actual + predicted)]
    drawn = go.Figure()
    line = {"color": GREY, "dash": "dash"}
    drawn.add_scatter(x=ends, y=ends, mode="lines", line=line, name="as predicted", hoverinfo="skip")
    drawn.add_scatter(
        x=actual,
        y=predicted,
        error_y=bars,
        customdata=[[each.trial, each.epoch] for each in compared],
        mode="markers",
        marker={"color": BLUE, "size": 7},
        name="trial",
        hovertemplate=label,
    )
    return laid_out(drawn, "ended at", "predicted")


#: The colours of attempts by outcome.
WORK_COLORS: Final = {
    **{name: kind.color for name, kind in _KIND_OF.items()},
    "requeued": "#cc79a7",
    "lost": "#56708a",
}
_ATTEMPT_TEXT: Final = (
    "trial %{customdata[0]}, attempt %{customdata[1]}: %{customdata[2]}<br>from %{customdata[3]}<extra></extra>"
)


def work_by_worker(timeline: Timeline) -> go.Figure:
    """Each attempt as a bar in its worker's line, over the time that the study has run."""
    unit, name = time_unit(timeline.seconds)
    groups: dict[str, dict[str, list[Any]]] = {}
    for lane in timeline.lanes:
        for work in lane.work:
            group = groups.setdefault(work.outcome, {"y": [], "base": [], "x": [], "customdata": []})
            start = timeline.at(work.start)
            group["y"].append(drawn_text(lane.name))
            group["base"].append(rounded(start / unit))
            group["x"].append(rounded((timeline.at(work.end) - start) / unit))
            since = f"{datetime.fromtimestamp(work.start, UTC):%Y-%m-%d %H:%M:%S} UTC"
            ended = f"{PAUSED} {work.reason}" if work.outcome == PAUSED and work.reason else work.outcome
            group["customdata"].append([work.trial, work.attempt, drawn_text(ended), since])
    drawn = go.Figure()
    for outcome, group in groups.items():
        drawn.add_bar(
            **group,
            orientation="h",
            width=_BAR,
            marker={"color": WORK_COLORS.get(outcome, GREY), "line": {"width": 0}},
            name=drawn_text(outcome.replace("_", " ")),
            hovertemplate=_ATTEMPT_TEXT,
        )
    laid_out(drawn, f"{name} that the study has run", "")
    order = [drawn_text(lane.name) for lane in reversed(timeline.lanes)]
    drawn.update_layout(barmode="overlay", showlegend=True)
    drawn.update_yaxes(type="category", categoryorder="array", categoryarray=order)
    return drawn


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit that so many seconds are best shown in: its length in seconds, and its name."""
    units = ((3600.0, "hours"), (60.0, "minutes"))
    return next((unit for unit in units if seconds >= 3 * unit[0]), (1.0, "seconds"))
