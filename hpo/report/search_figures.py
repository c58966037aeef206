"""Draws the figures of the search with Optuna's plots, in the page's style."""

from __future__ import annotations

import html
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import optuna
import plotly.graph_objects as go
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization import plot_contour, plot_parallel_coordinate, plot_pareto_front, plot_slice

from hpo.config.schema_study import Direction
from hpo.report.drawable import drawn_text
from hpo.report.looks import (
    BLUE,
    GREY,
    SCALE,
    VERMILION,
    broken,
    color_at,
    described,
    is_logarithmic,
    laid_out,
    rounded,
)
from hpo.study.ranking import is_feasible

#: Yellow is good, dark blue bad; it fills the whole figure, so it looks the same on any background.
_FILLED: Final = "Viridis"
_TRIAL_TEXT: Final = "trial %{customdata}<br>%{x:.6g}, %{y:.6g}%{text}<extra></extra>"
#: An axis title with this many characters is broken: it does not fit beside a slice.
_TITLE: Final = 24
#: The width in pixels that an axis needs for its heading.
AXIS_WIDTH: Final = 84


def importance_bars(shares: dict[str, float]) -> go.Figure:
    """The importance of each parameter as bars, the largest on top."""
    names, values = list(shares)[::-1], list(shares.values())[::-1]
    drawn = go.Figure(
        go.Bar(
            x=[rounded(value) for value in values],
            y=[broken(name) for name in names],
            text=[f"{value:.2f}" if value >= 0.01 else "< 0.01" for value in values],
            textposition="outside",
            cliponaxis=False,
            marker={"color": BLUE},
            orientation="h",
            hovertemplate="%{y}: %{x:.3f}<extra></extra>",
        )
    )
    laid_out(drawn, "importance (sum 1)", "")
    return drawn.update_xaxes(range=[0, 1.12 * max(values)])


def target_of(goals: Mapping[str, Direction], metric: str) -> Callable[[FrozenTrial], float] | None:
    """The ``target`` argument for Optuna's plots of one metric."""
    place = list(goals).index(metric)
    return None if len(goals) == 1 else lambda trial: float(trial.values[place])


def parallel_coordinates(
    study: optuna.Study, goals: Mapping[str, Direction], metric: str, params: Sequence[str]
) -> go.Figure:
    """Every trial as a line through its parameters and its value, the best ones on top.

    Args:
        study: A snapshot with escaped names.
        goals: Metrics and directions.
        metric: The metric.
        params: The parameters to show, by their names in the study file.
    """
    drawn = plot_parallel_coordinate(
        study,
        params=[drawn_text(name) for name in params],
        target=target_of(goals, metric),
        target_name=drawn_text(metric),
    )
    minimize = goals[metric] == "minimize"
    lines = [trace for trace in drawn.data if trace.mode == "lines" and trace.customdata is not None]
    for trace in lines:
        place = 1 - trace.y[0] if minimize else trace.y[0]  # the metric's axis is the first one
        trace.line.update(color=color_at(place), width=1 + 1.5 * place**3)
        trace.update(opacity=0.3 + 0.6 * place**3, y=[rounded(y) for y in trace.y])
    for trace in drawn.data:
        if trace.mode == "markers":
            _name_the_ends(trace, minimize=minimize)
        elif trace.customdata is None:
            trace.line.color = GREY
            trace.name = "within the bounds" if trace.name == "Feasible" else "outside the bounds"
    others = [trace for trace in drawn.data if trace not in lines]
    drawn.data = []
    drawn.add_traces([*sorted(lines, key=lambda trace: trace.opacity), *others])
    laid_out(drawn, "", "")
    drawn.update_layout(plot_bgcolor=None, margin={"l": 50, "r": 12, "t": 24, "b": 70})
    drawn.update_annotations(font={"size": 10, "color": None})
    # In Optuna's order; Optuna cuts long names off.
    names = [broken(metric), *map(broken, sorted(params, key=drawn_text))]
    return drawn.update_xaxes(tickangle=0, ticktext=names, fixedrange=True)


def _name_the_ends(trace: go.Scatter, *, minimize: bool) -> None:
    """The colour bar of the lines, from bad to good."""
    trace.marker.update(colorscale=list(SCALE), reversescale=minimize)
    trace.marker.colorbar.update(thickness=10, title={"side": "right"})


def slices(study: optuna.Study, goals: Mapping[str, Direction], metric: str, param: str) -> go.Figure:
    """A metric's values over one parameter, coloured from the first trials to the last.

    Args:
        study: A snapshot with escaped names.
        goals: Metrics and directions.
        metric: The metric.
        param: The parameter, by its name in the study file.
    """
    name = drawn_text(param)
    drawn = plot_slice(study, params=[name], target=target_of(goals, metric), target_name=drawn_text(metric))
    place = list(goals).index(metric)
    complete = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    trials = [trial for trial in complete if name in trial.params]
    texts = _choice_texts(trials, name)
    # For a categorical parameter Optuna leaves out trials outside the bounds, and shows choices as code.
    drawn.data = []
    if texts:
        drawn.update_xaxes(categoryarray=list(texts.values()))
    for beyond in (False, True):
        if some := [trial for trial in trials if is_feasible(trial) != beyond]:
            drawn.add_trace(_slice_points(some, name, place, texts, beyond=beyond))
    values = [trial.values[place] for trial in trials]
    laid_out(drawn, param, metric, logarithmic=is_logarithmic(values, goals[metric]))
    found = {trial.params[name] for trial in trials} if not texts else set()
    if len(found) == 1:  # an axis around a single value would show numbers that the parameter can't have
        (only,) = found
        drawn.update_xaxes(tickmode="array", tickvals=[only], ticktext=[f"{only:.6g}"])
    drawn.update_xaxes(title_text=broken(param, _TITLE)).update_yaxes(title_text=broken(metric, _TITLE))
    return drawn.update_layout(margin={"l": 50, "r": 8, "t": 8, "b": 44})


def _choice_texts(trials: Sequence[FrozenTrial], name: str) -> dict[str, str]:
    """The axis labels of choices, by their Python literals; empty for numbers.

    They are as in tables, ``relu``; choices that would look the same keep their literals, ``2`` and ``'2'``.
    """
    kinds = [trial.distributions[name] for trial in trials]
    choices = [choice for kind in kinds if isinstance(kind, CategoricalDistribution) for choice in kind.choices]
    if not choices:
        return {}
    texts = {repr(value): str(value) for value in (*choices, *(trial.params[name] for trial in trials))}
    often = Counter(texts.values())
    # An empty text would be invisible, so it keeps its literal, too.
    return {code: text if often[text] == 1 and text.strip() else code for code, text in texts.items()}


def _slice_points(
    trials: Sequence[FrozenTrial], name: str, place: int, texts: Mapping[str, str], *, beyond: bool
) -> go.Scatter:
    """Points of trials over their values of a parameter; ``texts`` are the labels of its choices."""
    numbers = [trial.number for trial in trials]
    values = [trial.params[name] for trial in trials]
    within = {"color": numbers, "colorscale": list(SCALE), "showscale": False, "line": {"width": 0}}
    note = "outside the bounds" if beyond else ""
    return go.Scatter(
        x=[texts[repr(value)] for value in values] if texts else values,
        y=[rounded(trial.values[place]) for trial in trials],
        customdata=numbers,
        mode="markers",
        showlegend=False,
        hovertemplate=f"trial %{{customdata}}<br>%{{x}}: %{{y:.6g}}<extra>{note}</extra>",
        marker={"size": 6, **({"color": GREY, "symbol": "diamond-open"} if beyond else within)},
    )


#: With fewer points of two parameters, the values between them would be invented.
FEWEST_POINTS: Final = 20


def places_of(trials: Iterable[FrozenTrial], pair: tuple[str, str]) -> int:
    """The number of different points that trials have in two parameters."""
    return len(
        {tuple(str(trial.params[name]) for name in pair) for trial in trials if set(pair) <= set(trial.params)}
    )


def contour_pair(trials: Sequence[FrozenTrial], params: Iterable[str]) -> tuple[str, str] | None:
    """The first two parameters (the most important first) that occur together with two values each, or None."""
    for first, second in itertools.combinations(params, 2):
        found = [
            (str(trial.params[first]), str(trial.params[second]))
            for trial in trials
            if first in trial.params and second in trial.params
        ]
        if all(len(set(values)) > 1 for values in zip(*found, strict=True)) and found:
            return first, second
    return None


def contour(study: optuna.Study, goals: Mapping[str, Direction], metric: str, pair: tuple[str, str]) -> go.Figure:
    """A metric over two parameters, filled in between the trials.

    Args:
        study: A snapshot with escaped names.
        goals: Metrics and directions.
        metric: The metric.
        pair: The parameters, by their names in the study file.
    """
    drawn = plot_contour(
        study,
        params=[drawn_text(name) for name in pair],
        target=target_of(goals, metric),
        target_name=drawn_text(metric),
    )
    drawn.update_traces(
        selector={"type": "contour"},
        colorscale=_FILLED,
        reversescale=goals[metric] == "minimize",
        colorbar={"thickness": 10, "title": {"side": "right"}},
        line={"width": 0.5},
        z=_halved(drawn.data[0].z),
    )
    for trace in drawn.data[1:]:
        beyond = trace.name == "Infeasible Trial"
        trace.update(hovertemplate="%{x}<br>%{y}<extra></extra>", name="outside the bounds" if beyond else "trial")
        trace.marker.update(color=GREY if beyond else "white", size=7, line={"width": 1, "color": "black"})
    across, up = (html.unescape(axis.title.text) for axis in (drawn.layout.xaxis, drawn.layout.yaxis))
    return laid_out(drawn, across, up)


def _halved(values: np.ndarray) -> np.ndarray:
    """The values as 32-bit floats, which look the same; unchanged if one is too large."""
    with np.errstate(over="ignore"):
        found = values.astype("float32")
    return found if np.array_equal(np.isinf(found), np.isinf(values)) else values


def pareto_pairs(goals: Mapping[str, Direction]) -> list[tuple[str, str]]:
    """The pairs of goals for which a front is drawn: all pairs."""
    return list(itertools.combinations(goals, 2))


def pareto_front(
    study: optuna.Study, trials: Iterable[FrozenTrial], goals: Mapping[str, Direction], pair: tuple[str, str]
) -> go.Figure:
    """The trials by two goals, and those on the front of all goals.

    Args:
        study: A snapshot with escaped names.
        trials: The trials of the snapshot.
        goals: Metrics and directions.
        pair: The two metrics.
    """
    drawn = plot_pareto_front(study, **front_arguments(goals, pair, drawn_text))
    by_number = {trial.number: trial for trial in trials}
    for trace in drawn.data:
        best, beyond = "Best Trial" in trace.hovertemplate, "Infeasible" in trace.hovertemplate
        numbers = [json.loads(text.replace("<br>", "\n"))["number"] for text in trace.text]
        # Optuna's marker has a colour for each trial, and a colour bar.
        trace.marker = None
        trace.update(
            text=[described(by_number[number]) for number in numbers],
            customdata=numbers,
            hovertemplate=_TRIAL_TEXT,
            name="Pareto front" if best else "outside the bounds" if beyond else "other trials",
            showlegend=bool(trace.x),
            marker=_front_marker(best=best, beyond=beyond),
        )
    laid_out(drawn, *pair)
    return drawn.update_layout(showlegend=True)


def _front_marker(*, best: bool, beyond: bool) -> dict[str, Any]:
    if beyond:
        return {"color": GREY, "symbol": "diamond-open", "size": 7}
    return {"color": VERMILION if best else BLUE, "size": 9 if best else 7, "line": {"width": 0}}


def front_arguments(
    goals: Mapping[str, Direction], pair: tuple[str, str], text: Callable[[str], str]
) -> dict[str, Any]:
    """The arguments with which Optuna's plot of the front shows two goals."""
    places = [list(goals).index(metric) for metric in pair]
    return {
        "targets": lambda trial: [trial.values[place] for place in places],
        "target_names": [text(metric) for metric in pair],
    }
