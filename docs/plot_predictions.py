"""Draws the pictures of docs/pruning.md from a folder of learning curves.

    python docs/plot_predictions.py FOLDER

FOLDER holds a file NAME.npz a task, with an array `valid` [configurations, epochs], a loss; the pictures in the
repository are of what `benchmarks/make_curves.py FOLDER` writes. It makes, beside itself:

- predictions.svg: six curves with their prediction after each epoch, one a task. A curve's error is that of its
  prediction after a quarter of the run, in standard deviations. Typical: of the three tasks in the middle by
  median error, the curve of median error. Failing: of the three others whose largest errors are greatest, the
  curve of the largest error. Curves that are not finite, or that later rise above all of their first quarter, are
  left out: nothing in that quarter shows a divergence to come.
- pruning.svg: a study of 100 configurations under `PredictedLossPruner()` and under Optuna's median pruner, on the
  task whose share of epochs under the first is the median of all tasks.
"""

import argparse
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import optuna
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray
from optuna.pruners import MedianPruner

from hpo.search.predicted_loss.pruner import PredictedLossPruner
from hpo.search.replay import Replay, Setting, replay, whole_curves
from trainer.prediction.final_loss import Prediction, predict_final_loss

Array = NDArray[np.float64]

FIRST, JUDGED = 0.1, 0.25
CONFIGS = 100
# Colours that stay apart for colour-blind eyes: Okabe & Ito 2008, "Color universal design".
BLUE, ORANGE, BLACK, GREY = "#0072B2", "#D55E00", "#000000", "#8C8C8C"
RAN: dict[str, Any] = {"color": BLUE, "linewidth": 0.8, "alpha": 0.7}
PALE: dict[str, Any] = {"color": "#D8D8D8", "linewidth": 0.6}
FOUND: dict[str, Any] = {"color": BLACK, "linewidth": 2}
LOST: dict[str, Any] = {"color": ORANGE, "linewidth": 1.6, "linestyle": (0, (4, 2))}


@dataclass(frozen=True)
class Task:
    """A file of curves: its name, and losses [configurations, epochs]."""

    name: str
    curves: Array

    @property
    def unit(self) -> str:
        """What the losses are."""
        squared_or_absolute = {"graphs": "mean absolute error", "reconstruction": "mean squared error"}
        usual = "error rate" if self.name.endswith("error") else "cross-entropy, nats"
        return f"validation {squared_or_absolute.get(self.name.partition('_')[0], usual)}"

    @property
    def judged(self) -> int:
        """The epoch after a quarter of the run."""
        epochs: int = self.curves.shape[1]
        return round(JUDGED * epochs)

    @property
    def tame(self) -> list[int]:
        """The rows that are finite and do not rise above all of their first quarter."""
        first, rest = self.curves[:, : self.judged], self.curves[:, self.judged :]
        finite = np.isfinite(self.curves).all(axis=1)
        rows: list[int] = np.flatnonzero(finite & (rest.max(axis=1) <= first.max(axis=1))).tolist()
        return rows


def tasks_of(folder: Path) -> list[Task]:
    """The tasks of a folder, by name."""
    found = []
    for file in sorted(folder.glob("*.npz")):
        with np.load(file, allow_pickle=False) as arrays:
            found.append(Task(file.stem, arrays["valid"].astype(np.float64)))
    if len(found) < 6:
        raise SystemExit(f"{folder} has fewer than 6 files *.npz: make them with benchmarks/make_curves.py")
    return found


# ------------------------------------------------------------------------------------------------- predictions


def predicted(curve: Array, epoch: int) -> Prediction:
    """The prediction of a curve's end after so many epochs."""
    found = predict_final_loss(curve[:epoch], len(curve), min_epochs=1)
    assert found is not None
    return found


def errors(task: Task) -> dict[int, float]:
    """Of each row that may be shown, the error after a quarter of the run in standard deviations; least first."""
    answers = {row: predicted(task.curves[row], task.judged) for row in task.tame}
    found = {row: abs(answer.mean - task.curves[row, -1]) / answer.std for row, answer in answers.items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def chosen_curves(tasks: Sequence[Task]) -> list[tuple[str, Task, int]]:
    """Three tasks with the row of a typical curve, and three with that of a failing one."""
    found = {task.name: list(errors(task).items()) for task in tasks}
    middle = {name: ranked[len(ranked) // 2] for name, ranked in found.items()}
    worst = {name: ranked[-1] for name, ranked in found.items()}
    ranked = sorted(tasks, key=lambda task: middle[task.name][1])
    start = (len(ranked) - 3) // 2
    typical, others = ranked[start : start + 3], ranked[:start] + ranked[start + 3 :]
    failing = sorted(others, key=lambda task: -worst[task.name][1])[:3]
    chosen = [("typical", task, middle[task.name][0]) for task in typical]
    return chosen + [("failing", task, worst[task.name][0]) for task in failing]


def draw_prediction(axes: Axes, task: Task, row: int, kind: str) -> None:
    """A curve and its predictions from a tenth of the run on."""
    curve, length, judged = task.curves[row], task.curves.shape[1], task.judged
    seen = range(max(2, math.ceil(FIRST * length)), length + 1)
    answers = [predicted(curve, epoch) for epoch in seen]
    means = [answer.mean for answer in answers]
    lower, upper = [answer.lower for answer in answers], [answer.upper for answer in answers]
    epochs = np.arange(1, length + 1)
    axes.fill_between(list(seen), lower, upper, color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(seen, means, color=BLUE, linewidth=1.6)
    axes.plot(epochs[judged - 1 :], curve[judged - 1 :], color=GREY, linewidth=1.2)
    axes.plot(epochs[:judged], curve[:judged], color=BLACK, linewidth=1.6)
    axes.axhline(curve[-1], color=ORANGE, linewidth=1, linestyle=(0, (4, 3)))
    axes.axvline(judged, color=GREY, linewidth=0.8, linestyle=":")
    shown = np.concatenate([curve[2:], means, lower, upper])
    margin = 0.06 * float(np.ptp(shown))
    axes.set_ylim(float(shown.min()) - margin, float(shown.max()) + margin)
    axes.set_title(f"{kind}: {task.name}, run {row}", loc="left")
    axes.set(xlim=(0, length + 0.5), ylabel=task.unit)


def predictions_figure(tasks: Sequence[Task]) -> Figure:
    """Three rows of a typical and a failing curve."""
    figure = Figure(figsize=(8.4, 8.4), layout="constrained")
    grid = figure.subplots(3, 2)
    for place, (kind, task, row) in enumerate(chosen_curves(tasks)):
        draw_prediction(grid[place % 3, place // 3], task, row, kind)
    for axes in grid[-1]:
        axes.set_xlabel("epoch")
    handles = [
        Line2D([], [], color=BLACK, linewidth=1.6, label="the first quarter"),
        Line2D([], [], color=GREY, linewidth=1.2, label="the rest"),
        Line2D([], [], color=ORANGE, linewidth=1, linestyle=(0, (4, 3)), label="its last value"),
        Line2D([], [], color=BLUE, linewidth=1.6, label="last value predicted after this epoch"),
        Patch(color=BLUE, alpha=0.2, linewidth=0, label="80 % interval"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=5, columnspacing=1.2, handlelength=1.6)
    return figure


# ----------------------------------------------------------------------------------------------------- pruning


def replayed(task: Task, pruner: optuna.pruners.BasePruner) -> Replay:
    """A pruner on the first configurations of a task, which are drawn at random."""
    rows = whole_curves(np.where(np.isfinite(task.curves), task.curves, np.inf)[:CONFIGS])
    return replay(rows, pruner, Setting(max_epochs=task.curves.shape[1], study_name=task.name))


def joined(epochs: Array, curves: Array, parts: dict[int, tuple[int, int | None]]) -> tuple[Array, Array]:
    """Parts of curves, by row from the first to the last epoch, as one line with gaps: a small file."""
    x = [np.append(epochs[first - 1 : last], np.nan) for first, last in parts.values()]
    y = [np.append(curves[row, first - 1 : last], np.nan) for row, (first, last) in parts.items()]
    return np.concatenate(x), np.concatenate(y)


def draw_study(axes: Axes, task: Task, found: Replay, name: str) -> None:
    """All curves, as far as they ran and on from there; the best that ran to its end on top."""
    epochs = np.arange(1, task.curves.shape[1] + 1)
    curves = np.where(np.isfinite(task.curves), task.curves, np.nan)
    axes.plot(*joined(epochs, curves, {each.row: (each.epochs, None) for each in found.trials}), **PALE)
    axes.plot(*joined(epochs, curves, {each.row: (1, each.epochs) for each in found.trials}), **RAN)
    for each in found.trials:
        final = curves[each.row, -1]
        if final == (found.best if each.pruned else found.found):
            axes.plot(epochs, curves[each.row], **(LOST if each.pruned else FOUND))
    axes.set_title(
        f"{name}\n{found.epochs_fraction:.1%} of the epochs, regret {found.regret:.4f},\n"
        f"{found.wrongly_pruned} wrongly pruned",
        loc="left",
    )
    axes.set_xlabel("epoch")


def pruning_figure(tasks: Sequence[Task]) -> Figure:
    """One study under two pruners, side by side."""
    ours = {task.name: replayed(task, PredictedLossPruner()) for task in tasks}
    by_epochs = sorted(tasks, key=lambda task: ours[task.name].epochs_fraction)
    task = by_epochs[(len(by_epochs) - 1) // 2]
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, sharex=True)
    theirs = replayed(task, MedianPruner(5, 5))
    draw_study(left, task, ours[task.name], "PredictedLossPruner()")
    draw_study(right, task, theirs, "MedianPruner(5, 5)")
    finite = task.curves[np.isfinite(task.curves)]
    low, high = finite.min(), np.quantile(finite, 0.6)  # where it is decided
    left.set(ylabel=task.unit, xlim=(1, task.curves.shape[1]), ylim=(low - 0.03 * (high - low), high))
    handles = [
        Line2D([], [], **RAN, label="as far as it ran"),
        Line2D([], [], **PALE, label="what pruning left out"),
        Line2D([], [], **FOUND, label="best that ran to its end"),
    ]
    if ours[task.name].regret or theirs.regret:
        handles.append(Line2D([], [], **LOST, label="the best, pruned"))
    title = f"{task.name}, {min(CONFIGS, len(task.curves))} runs"
    figure.legend(handles=handles, title=title, loc="outside upper center", ncols=4, columnspacing=1.2)
    return figure


def set_style() -> None:
    """Small type, no frames, and the same names of elements in the file each time."""
    mpl.rcParams.update(
        {
            "font.size": 9,
            "axes.titlesize": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "svg.hashsalt": "hpo",
            "path.simplify_threshold": 0.3,  # points
        }
    )


def shortened(path: re.Match[str]) -> str:
    """An SVG path to a tenth of a point, which is all that can be seen, and without a letter for each line."""
    short = re.sub(r"(\d\.\d)\d+", r"\1", path[0])
    return short if "Q" in short else re.sub(r"\s+L ", " ", short)


def write(figure: Figure, path: Path) -> None:
    """Write a picture as SVG."""
    text = io.StringIO()
    figure.savefig(text, format="svg", facecolor="white", metadata={"Date": None})
    path.write_text(re.sub(r' d="[^"]*"', shortened, text.getvalue()))


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="files NAME.npz with an array `valid`")
    tasks = tasks_of(parser.parse_args().folder)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    set_style()
    here = Path(__file__).parent
    write(predictions_figure(tasks), here / "predictions.svg")
    write(pruning_figure(tasks), here / "pruning.svg")


if __name__ == "__main__":
    main()
