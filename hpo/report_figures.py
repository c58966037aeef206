"""The figures of `hpo report`; whatever comes from a study is escaped, because plotly.js reads text as HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import plotly.graph_objects as go
from optuna.trial import FrozenTrial

from hpo.outcome import Outcome, outcome_of
from hpo.pruning import MIDDLE_80, ComparedPrediction

# The colours are of the palette of Okabe & Ito (2008), which people who confuse red and green tell apart.
_BLUE, _ORANGE, _VERMILION, _GREEN, _GREY = "#0072b2", "#e69f00", "#d55e00", "#009e73", "#8c8c8c"
#: A loss that spans more than this factor is drawn on a logarithmic axis.
_WIDE: Final = 100.0
#: Up to here each whole number has a tick; on their own, plotly's would fall between them.
_FEW: Final = 12


@dataclass(frozen=True)
class _Kind:
    """How trials of some outcomes are drawn."""

    name: str
    color: str
    symbol: str
    dash: str = "solid"


_COMPLETE: Final = _Kind("complete", _BLUE, "circle")
_PRUNED: Final = _Kind("pruned", _ORANGE, "x")
_DIVERGED: Final = _Kind("diverged", _VERMILION, "triangle-up", "dash")
_UNDER_WAY: Final = _Kind("not ended", _GREEN, "circle-open", "dot")
_FAILED: Final = _Kind("failed", _GREY, "square", "dash")
_KIND_OF: Final = {
    Outcome.COMPLETE.value: _COMPLETE,
    Outcome.PRUNED.value: _PRUNED,
    Outcome.DIVERGED.value: _DIVERGED,
    "running": _UNDER_WAY,
    "waiting": _UNDER_WAY,
}
#: What is drawn first lies below.
_KINDS: Final = (_COMPLETE, _UNDER_WAY, _FAILED, _DIVERGED, _PRUNED)


def learning_curves(trials: Iterable[FrozenTrial], metric: str, direction: str) -> go.Figure:
    """The reported values of every trial by epoch; two traces an outcome: the curves, and their last points."""
    groups: dict[str, list[FrozenTrial]] = {kind.name: [] for kind in _KINDS}
    for trial in trials:
        if trial.intermediate_values:
            groups[_KIND_OF.get(outcome_of(trial), _FAILED).name].append(trial)
    drawn = go.Figure()
    for kind in _KINDS:
        if groups[kind.name]:
            drawn.add_traces(_curves(kind, groups[kind.name]))
    values = [
        value for group in groups.values() for trial in group for value in trial.intermediate_values.values()
    ]
    return _laid_out(drawn, "epoch", metric, logarithmic=direction == "minimize" and _is_wide(values))


def _curves(kind: _Kind, trials: Sequence[FrozenTrial]) -> list[go.Scatter]:
    """All curves of a kind as one line with gaps: a trace for each of many trials would not be drawn in time."""
    epochs: list[int | None] = []
    values: list[float | None] = []
    numbers: list[int | None] = []
    ends: list[tuple[int, float, int]] = []
    for trial in trials:
        points = [(step, _finite(value)) for step, value in sorted(trial.intermediate_values.items())]
        epochs += [*(step for step, _ in points), None]
        values += [*(value for _, value in points), None]
        numbers += [trial.number] * len(points) + [None]
        ends += [(step, value, trial.number) for step, value in points if value is not None][-1:]
    told = f"trial %{{customdata}}, {kind.name}<br>epoch %{{x}}: %{{y:.6g}}<extra></extra>"
    look = {"legendgroup": kind.name, "hovertemplate": told}
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


def best_so_far(trials: Iterable[FrozenTrial], metric: str, direction: str) -> go.Figure:
    """The values of the complete trials by number, and the best of those up to each."""
    complete = [
        (trial, trial.value)
        for trial in trials
        if outcome_of(trial) == Outcome.COMPLETE and trial.value is not None and math.isfinite(trial.value)
    ]
    numbers, values = [trial.number for trial, _ in complete], [value for _, value in complete]
    marker = {"color": _BLUE, "size": 7}
    texts = [_described(trial) for trial, _ in complete]
    drawn = go.Figure()
    drawn.add_scatter(
        x=numbers, y=values, text=texts, mode="markers", marker=marker, name="trial", hovertemplate=_TRIAL_TEXT
    )
    line = {"color": _VERMILION, "shape": "hv"}
    running = _running(values, min if direction == "minimize" else max)
    drawn.add_scatter(x=numbers, y=running, mode="lines", line=line, name="best so far", hoverinfo="skip")
    return _laid_out(drawn, "trial", metric, logarithmic=direction == "minimize" and _is_wide(values))


_TRIAL_TEXT: Final = "trial %{x}: %{y:.6g}%{text}<extra></extra>"


def _described(trial: FrozenTrial) -> str:
    pairs = (
        f"{name} = {value:.6g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in trial.params.items()
    )
    return "".join(f"<br>{html.escape(pair)}" for pair in pairs)


def _running(values: Sequence[float], pick: Callable[[float, float], float]) -> list[float]:
    best: list[float] = []
    for value in values:
        best.append(pick(best[-1], value) if best else value)
    return best


def predictions_against_outcomes(compared: Sequence[ComparedPrediction]) -> go.Figure:
    """Each prediction, with its 80 % interval, over what the trial ended with; right ones lie on the line."""
    actual, predicted = [each.actual for each in compared], [each.predicted for each in compared]
    bars = {"type": "data", "array": [MIDDLE_80 * each.std for each in compared], "color": _GREY, "thickness": 1}
    told = "trial %{customdata[0]}, predicted at epoch %{customdata[1]}<br>%{y:.6g} for %{x:.6g}<extra></extra>"
    ends = [min(actual + predicted), max(actual + predicted)]
    drawn = go.Figure()
    line = {"color": _GREY, "dash": "dash"}
    drawn.add_scatter(x=ends, y=ends, mode="lines", line=line, name="as predicted", hoverinfo="skip")
    drawn.add_scatter(
        x=actual,
        y=predicted,
        error_y=bars,
        customdata=[[each.trial, each.epoch] for each in compared],
        mode="markers",
        marker={"color": _BLUE, "size": 7},
        name="trial",
        hovertemplate=told,
    )
    return _laid_out(drawn, "ended at", "predicted", whole=False)


def _laid_out(
    drawn: go.Figure, across: str, up: str, *, logarithmic: bool = False, whole: bool = True
) -> go.Figure:
    last = max((x for trace in drawn.data for x in trace.x if x is not None), default=0)
    drawn.update_layout(
        template="plotly_white",
        margin={"l": 70, "r": 20, "t": 20, "b": 50},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        xaxis={"title": {"text": html.escape(across)}, "dtick": 1 if whole and last <= _FEW else None},
        yaxis={"title": {"text": html.escape(up)}, "type": "log" if logarithmic else "linear"},
    )
    return drawn


def _is_wide(values: Iterable[float]) -> bool:
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > _WIDE * min(finite)


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
