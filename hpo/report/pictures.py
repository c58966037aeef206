"""Writes the report's figures as PNG files with Optuna's matplotlib plots, without a browser."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import optuna
from optuna.exceptions import ExperimentalWarning

from hpo.errors import InputError, StudyError
from hpo.report.data import StudyReport
from hpo.report.drawable import snapshot
from hpo.report.figures import WORK_COLORS, time_unit
from hpo.report.looks import BLUE, GREY, name_lines, thinned
from hpo.report.search_figures import (
    FEWEST_POINTS,
    contour_pair,
    front_arguments,
    pareto_pairs,
    places_of,
    target_of,
)
from hpo.report.search_sections import MOST_AXES, MOST_CELLS, MOST_LINES

_DPI: Final = 150
_SIZE: Final = (9.0, 5.0)
#: The widths in inches of a slice, and of an axis of parallel coordinates.
_SLICE_WIDTH: Final = 3.0
_AXIS_WIDTH: Final = 1.6
#: The characters of a line below a slice, and at an axis of parallel coordinates.
_TITLE: Final = 18
_LABEL: Final = 14
#: At most this many curves are named in a legend.
_MOST_NAMED: Final = 12


def write_pictures(report: StudyReport, folder: Path) -> list[Path]:
    """Write a PNG file of each figure that the study has data for; creates the folder.

    Returns:
        The files: ``history.png``, ``curves.png``, ``importances.png``, ``parallel.png``, ``slices.png``,
        ``contour.png`` and ``timeline.png``. With several objectives there is one for each metric where it shows
        one (``history-val_loss.png``), and a ``front-….png`` for each pair of metrics.

    Raises:
        StudyError: matplotlib is not installed.
        InputError: The folder can't be written to.
    """
    pyplot = _pyplot()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _quiet(), pyplot.rc_context():  # Optuna changes the style of all later figures
            written: list[Path] = []
            for name in _drawn(report, pyplot):
                written.append(_saved(pyplot, _free(folder / _file(name), written)))
            return written
    except OSError as error:
        problem = f"can't be written: {error.strerror or error}"
        fix = "name a folder that you may write to, with `--png DIR`"
        raise InputError(problem, path="--png", value=str(folder), fix=fix) from error
    finally:
        pyplot.close("all")


def _pyplot() -> Any:
    """matplotlib's pyplot, set to draw into files only."""
    try:
        import matplotlib as mpl
        from matplotlib import pyplot
    except ImportError as error:
        fix = "pip install 'hpo-service[plots]'"
        raise StudyError(f"matplotlib draws the pictures, and is not installed\n  fix: {fix}") from error
    mpl.use("Agg")
    return pyplot


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress known warnings: Optuna's matplotlib plots are experimental, and a single value is not a range."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", category=ExperimentalWarning, message=r"optuna\.visualization\.matplotlib"
        )
        warnings.filterwarnings("ignore", message=r"Attempting to set identical low and high [xy]lims")
        yield


def _file(name: str) -> str:
    """A figure's file name, without the slashes of a metric such as `val/loss`."""
    return f"{name.replace('/', '-')}.png"


def _free(path: Path, written: Sequence[Path]) -> Path:
    """The path, with a number if another figure has it: a metric may also be named `val-loss`."""
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if each not in written)


def _saved(pyplot: Any, path: Path) -> Path:
    """Write the figure that was drawn last."""
    pyplot.gcf().savefig(path, dpi=_DPI, bbox_inches="tight")
    pyplot.close("all")
    return path


def _drawn(report: StudyReport, pyplot: Any) -> Iterator[str]:
    """Draw one figure after the other, and yield each one's name."""
    if report.curves:
        _curves(report, pyplot)
        yield "curves"
    if report.timeline.seconds:
        _timeline(report, pyplot)
        yield "timeline"
    if report.importances.shares:
        _importances(report, pyplot)
        yield "importances"
    if report.complete:
        for metric in report.goals:
            for name in _of_metric(report, metric, pyplot):
                yield f"{name}-{metric}" if report.several else name
    if report.several and report.ranked:
        yield from _fronts(report, pyplot)


def _of_metric(report: StudyReport, metric: str, pyplot: Any) -> Iterator[str]:
    """Optuna's plots of one metric."""
    from matplotlib.category import StrCategoryFormatter
    from optuna.visualization import matplotlib as plots

    target: dict[str, Any] = {"target": target_of(report.goals, metric), "target_name": _text(metric)}
    plots.plot_optimization_history(_plain(report, report.complete), **target)
    pyplot.gcf().set_size_inches(*_SIZE)
    yield "history"
    if not report.params:
        return
    axes = report.params[:MOST_AXES]
    some = thinned(report.by_rank, MOST_LINES)
    shown = [_text(name) for name in axes if any(name in trial.params for trial in some)]
    plots.plot_parallel_coordinate(_plain(report, some), params=shown, **target)
    pyplot.gcf().set_size_inches(max(_SIZE[0], _AXIS_WIDTH * len(shown)), _SIZE[1])
    _clear_parallel(pyplot.gcf().axes, [_text(metric), *sorted(shown)])
    yield "parallel"
    plots.plot_slice(_plain(report, report.complete), params=[_text(name) for name in axes], **target)
    pyplot.gcf().set_size_inches(max(_SIZE[0], _SLICE_WIDTH * len(axes)), _SIZE[1])
    for each in pyplot.gcf().axes:
        each.set_xlabel(_broken(each.get_xlabel(), _TITLE))
        if isinstance(each.xaxis.get_major_formatter(), StrCategoryFormatter) or each.get_xscale() == "log":
            each.tick_params(axis="x", which="both", rotation=90)
    yield "slices"
    some = thinned(report.by_rank, MOST_CELLS)
    pair = contour_pair(some, report.params)
    if pair is not None and places_of(some, pair) >= FEWEST_POINTS:
        plots.plot_contour(_plain(report, some), params=[_text(name) for name in pair], **target)
        pyplot.gcf().set_size_inches(*_SIZE)
        yield "contour"


def _clear_parallel(axes: Sequence[Any], names: Sequence[str]) -> None:
    """Make Optuna's parallel coordinates readable with many axes: full names, one grid, separate labels.

    Args:
        axes: The first axis, which has the names, the colour bar's axis, and one axis for each parameter.
        names: The names of the metric and the parameters, in Optuna's order.
    """
    from matplotlib.ticker import FixedLocator

    first, _, *others = axes
    first.set_xticks(range(len(names)), [_broken(name, _LABEL) for name in names], rotation=0)
    first.tick_params(axis="x", labelsize=8, pad=18)  # below choices of up to three lines
    for each in others:
        each.grid(visible=False)
        if isinstance(each.yaxis.get_major_locator(), FixedLocator):
            choices = [label.get_text() for label in each.get_yticklabels()]
            each.set_yticks(each.get_yticks(), [_broken(choice, _LABEL) for choice in choices])
        each.tick_params(axis="y", which="both", labelsize=8)
        for label in each.get_yticklabels(which="both"):
            label.set_bbox({"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5})


def _fronts(report: StudyReport, pyplot: Any) -> Iterator[str]:
    from optuna.visualization import matplotlib as plots

    study = _plain(report, report.complete)
    for pair in pareto_pairs(report.goals):
        plots.plot_pareto_front(study, **front_arguments(report.goals, pair, _text))
        pyplot.gcf().set_size_inches(*_SIZE)
        yield f"front-{'-'.join(pair)}"


def _curves(report: StudyReport, pyplot: Any) -> None:
    from optuna.visualization import matplotlib as plots

    curves = thinned(report.curves, MOST_LINES)
    axes = plots.plot_intermediate_values(snapshot(curves, report.goals, curves=True))
    axes.set(xlabel="epoch", ylabel=_text(report.metric))
    axes.locator_params(axis="x", integer=True)  # there is no epoch 2.5
    if len(report.curves) > _MOST_NAMED and (legend := axes.get_legend()) is not None:
        legend.remove()
    pyplot.gcf().set_size_inches(*_SIZE)


def _importances(report: StudyReport, pyplot: Any) -> None:
    shares = dict(reversed(report.importances.shares.items()))
    _, axes = pyplot.subplots(figsize=(_SIZE[0], 1 + 0.4 * len(shares)))
    bars = axes.barh([_text(name) for name in shares], list(shares.values()), color=BLUE)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set(title="Importance of the parameters", xlabel="importance (sum 1)")


def _timeline(report: StudyReport, pyplot: Any) -> None:
    timeline = report.timeline
    unit, name = time_unit(timeline.seconds)
    _, axes = pyplot.subplots(figsize=(_SIZE[0], 1.2 + 0.4 * len(timeline.lanes)))
    for lane in reversed(timeline.lanes):
        starts = [timeline.at(work.start) / unit for work in lane.work]
        lengths = [timeline.at(work.end) / unit - start for work, start in zip(lane.work, starts, strict=True)]
        colors = [WORK_COLORS.get(work.outcome, GREY) for work in lane.work]
        axes.barh(_text(lane.name), lengths, left=starts, color=colors)
    seen = dict.fromkeys(work.outcome for work in report.work)
    keys = [pyplot.Rectangle((0, 0), 1, 1, color=WORK_COLORS.get(outcome, GREY)) for outcome in seen]
    axes.legend(keys, list(seen), loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
    axes.set(xlabel=f"{name} that the study has run")


def _plain(report: StudyReport, trials: list[Any]) -> optuna.Study:
    return snapshot(trials, report.goals, _text)


def _broken(text: str, width: int) -> str:
    """A long text on several lines; a text with an escaped dollar stays whole."""
    return text if "$" in text else "\n".join(name_lines(text, width))


def _text(text: str) -> str:
    """A text escaped for matplotlib, where a dollar would start a formula."""
    return text.replace("$", r"\$")
