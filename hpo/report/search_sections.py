"""The sections of the page on the search; each takes the report and returns its HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import optuna
import plotly.graph_objects as go
from markupsafe import Markup
from optuna.trial import FrozenTrial

from hpo.report.data import StudyReport
from hpo.report.drawable import drawn_text, snapshot
from hpo.report.looks import broken, sampled, thinned
from hpo.report.markup import Section, by_metric, figure, note, tiles
from hpo.report.search_figures import (
    AXIS_WIDTH,
    FEWEST_POINTS,
    contour,
    contour_pair,
    importance_bars,
    parallel_coordinates,
    pareto_front,
    pareto_pairs,
    places_of,
    slices,
)
from hpo.report.sections import ONE_OF_FORKS
from hpo.wording import count_of

# As many as a browser draws quickly, and an eye can distinguish.
MOST_LINES: Final = 100
MOST_CELLS: Final = 150
MOST_AXES: Final = 12
_TILE_HEIGHT: Final = 260
_BAR_HEIGHT: Final = 34
_LINE_HEIGHT: Final = 17


def front_section(report: StudyReport) -> Section | None:
    """The Pareto front of several objectives, by pairs; None for a single objective."""
    if not report.several:
        return None
    if not report.ranked:
        return Section("front", "Pareto front", note("No complete trial meets the constraints yet."))
    kept = report.complete_sample
    drawn = [
        (f"{first} and {second}", pareto_front(report.escaped, kept, report.goals, (first, second)))
        for first, second in pareto_pairs(report.goals)
    ]
    remark = "A trial is on the front if no other trial is better in one objective without being worse in another."
    remark += sampled(kept, report.complete)
    return Section("front", "Pareto front", _several_figures("front", drawn) + note(remark))


def importance_section(report: StudyReport) -> Section:
    """The importance of each parameter."""
    found, title = report.importances, "Importance of the parameters"
    of_forks = ONE_OF_FORKS if report.forks else ""
    if found.missing is not None:
        return Section("importance", title, note(f"None: {found.missing}.{of_forks}"))
    lines = max(broken(name).count("<br>") + 1 for name in found.shares)
    height = 90 + max(_BAR_HEIGHT, _LINE_HEIGHT * lines) * len(found.shares)
    drawn = figure("importance", importance_bars(found.shares), "importance by parameter", height=height)
    best = "near the Pareto front" if report.several else f"among the best tenth by {report.metric}"
    remark = (
        f"How much each parameter determines whether a trial ends {best} (PED-ANOVA, Optuna's default).{of_forks}"
    )
    return Section("importance", title, drawn + note(" ".join((remark, *found.remarks, report.partial))))


def parallel_section(report: StudyReport) -> Section:
    """Every trial as a line through its parameters."""
    title, complete = "Parallel coordinates", report.by_rank
    params = report.params
    if not params:
        return Section("parallel", title, note(_NOTHING))
    kept, axes = thinned(complete, MOST_LINES), params[:MOST_AXES]
    axes = [name for name in axes if any(name in trial.params for trial in kept)]
    study = _escaped(kept, report)
    drawn = by_metric(
        (
            metric,
            figure(
                f"parallel-{place}",
                parallel_coordinates(study, report.goals, metric, axes),
                f"{metric} and the parameters of each trial",
                width=AXIS_WIDTH * (len(axes) + 2),
            ),
        )
        for place, metric in enumerate(report.goals)
    )
    notes = [
        "Each line is a trial, with the best on top." + _what_none_means(kept, axes) + sampled(kept, complete)
    ]
    if len(axes) < len(params):
        notes.append(f"The {len(axes)} most important of {len(params)} parameters are shown.")
    return Section("parallel", title, drawn + note(" ".join(notes)))


def _what_none_means(trials: Sequence[FrozenTrial], axes: Sequence[str]) -> str:
    """The page's remark on `None`, which may also be a choice; empty if every trial has all parameters.

    Optuna shows a choice as `None (value)` if some trials lack the parameter.
    """
    whole = [name for name in axes if all(name in trial.params for trial in trials)]
    if len(whole) == len(axes):
        return ""
    chosen = [name for name in whole if any(str(trial.params[name]) == "None" for trial in trials)]
    but = f"; of {', '.join(f'`{name}`' for name in chosen)} it is a choice" if chosen else ""
    return f" `None` means that a trial does not have the parameter{but}."


def slice_section(report: StudyReport) -> Section:
    """Values over each parameter."""
    title = "Slices"
    params = report.params
    if not params:
        return Section("slices", title, note(_NOTHING))
    made = {
        metric: tiles(
            figure(
                f"slice-{place}-{index}",
                slices(report.escaped, report.goals, metric, name),
                f"{metric} over {name}",
                height=_TILE_HEIGHT,
            )
            for index, name in enumerate(params)
        )
        for place, metric in enumerate(report.goals)
    }
    remark = "Each point is a complete trial: grey for the first ones, blue for the middle, orange for the latest."
    remark += sampled(report.complete_sample, report.complete)
    return Section("slices", title, by_metric(made.items()) + note(f"{remark} {report.partial}"))


def contour_section(report: StudyReport) -> Section:
    """The two most important parameters together."""
    title, complete = "The two most important parameters", report.by_rank
    kept = thinned(complete, MOST_CELLS)
    pair = contour_pair(kept, report.params)
    if pair is None:
        return Section(
            "contour", title, note("It takes two parameters with several values each in complete trials.")
        )
    found = places_of(kept, pair)
    if found < FEWEST_POINTS:
        why = f"Left out: a surface over {count_of(found, 'point')} would be mostly interpolated; it takes "
        names = " and ".join(f"`{name}`" for name in pair)
        return Section("contour", title, note(f"{why}{FEWEST_POINTS} points of {names}. The slices show them."))
    study = _escaped(kept, report)
    drawn = [(metric, contour(study, report.goals, metric, pair)) for metric in report.goals]
    remark = "Points are trials; the values between them are interpolated. Yellow is better."
    remark += sampled(kept, complete, done="used")
    return Section("contour", title, _several_figures("contour", drawn) + note(remark))


_NOTHING: Final = "No trial is complete yet."


def _escaped(trials: Sequence[FrozenTrial], report: StudyReport) -> optuna.Study:
    return snapshot(trials, report.goals, drawn_text)


def _several_figures(name: str, drawn: Iterable[tuple[str, go.Figure]]) -> Markup:
    """A figure for each metric, with the metric as a heading if there are several."""
    return by_metric(
        (metric, figure(f"{name}-{place}", each, f"{name} of {metric}"))
        for place, (metric, each) in enumerate(drawn)
    )
