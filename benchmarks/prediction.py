"""What predicting a learning curve's last value gains over repeating one already seen: a Markdown table.

    python benchmarks/prediction.py FOLDER [FOLDER …] [--epochs 10] [--below 5]

FOLDER holds a file NAME.npz a task, with an array `valid` [configurations, epochs], a loss. The last epoch is
predicted from the first --epochs, on the curves that are finite everywhere and stay below --below (as early values
of diverging runs would outweigh all else). For each task, and for all curves together:

- Spearman: rank correlation of predicted and true last values.
- mean, median: absolute error.
- 80 %: share of the true values inside the 80 % interval.

The contestants: the last value seen, the best so far, and `trainer.prediction`. Below, the mean over tasks of the
error ÷ the last value's, and the time a prediction takes.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in workers; before NumPy is imported

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from trainer.prediction.final_loss import Prediction, predict_final_loss

Array = NDArray[np.float64]
CONTESTANTS = ("last value", "best so far", "prediction")


@dataclass(frozen=True)
class Scores:
    """The quality of predictions: rank correlation, mean and median absolute error."""

    spearman: float
    mean: float
    median: float


@dataclass(frozen=True)
class Task:
    """Predictions [n] by contestant, true last values [n], and whether each interval contained its true value."""

    name: str
    predicted: dict[str, Array]
    truth: Array
    held: NDArray[np.bool_]


def curves_of(folders: list[Path], below: float) -> Iterator[tuple[str, Array]]:
    """Name and usable curves [n, epochs] of each task."""
    for file in sorted(path for folder in folders for path in folder.glob("*.npz")):
        with np.load(file, allow_pickle=False) as arrays:
            curves = arrays["valid"].astype(np.float64)
        yield file.stem, curves[(np.isfinite(curves) & (curves < below)).all(axis=1)]


def predict(name: str, curves: Array, epochs: int, seconds: list[float]) -> Task:
    """All contestants' predictions for a task; the time of each of ours is added to ``seconds``."""
    answers: list[Prediction] = []
    for curve in curves:
        history = curve[:epochs].tolist()
        started = time.perf_counter()
        answer = predict_final_loss(history, curves.shape[1], min_epochs=1)
        seconds.append(time.perf_counter() - started)
        assert answer is not None
        answers.append(answer)
    truth = curves[:, -1]
    predicted = {
        "last value": curves[:, epochs - 1],
        "best so far": curves[:, :epochs].min(axis=1),
        "prediction": np.array([answer.mean for answer in answers]),
    }
    held = [answer.lower <= value <= answer.upper for answer, value in zip(answers, truth, strict=True)]
    return Task(name, predicted, truth, np.array(held))


def scores(predicted: Array, truth: Array) -> Scores:
    """Of one contestant on some curves."""
    error = np.abs(predicted - truth)
    return Scores(float(spearmanr(predicted, truth).statistic), float(error.mean()), float(np.median(error)))


def pooled(tasks: list[Task]) -> Task:
    """All curves as one task."""
    return Task(
        "all curves",
        {name: np.concatenate([task.predicted[name] for task in tasks]) for name in CONTESTANTS},
        np.concatenate([task.truth for task in tasks]),
        np.concatenate([task.held for task in tasks]),
    )


def print_task(task: Task) -> None:
    for name in CONTESTANTS:
        found = scores(task.predicted[name], task.truth)
        held = f"{task.held.mean():.2f}" if name == "prediction" else ""
        label = f"{task.name} ({len(task.truth)})" if name == CONTESTANTS[0] else ""
        print(f"| {label} | {name} | {found.spearman:.4f} | {found.mean:.4f} | {found.median:.5f} | {held} |")


def print_means(tasks: list[Task]) -> None:
    """Per contestant the mean over tasks: Spearman less the last value's, errors ÷ the last value's."""
    print("\n| mean over tasks | Spearman | mean error | median error |\n|---|---|---|---|")
    base = [scores(task.predicted["last value"], task.truth) for task in tasks]
    for name in CONTESTANTS[1:]:
        found = [scores(task.predicted[name], task.truth) for task in tasks]
        pairs = list(zip(found, base, strict=True))
        spearman = statistics.mean(ours.spearman - last.spearman for ours, last in pairs)
        mean = statistics.mean(ours.mean / last.mean for ours, last in pairs)
        median = statistics.mean(ours.median / last.median for ours, last in pairs)
        print(f"| {name} | {spearman:+.4f} | {mean:.3f} | {median:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--epochs", type=int, default=10, help="epochs seen (10)")
    parser.add_argument("--below", type=float, default=5.0, help="curves that reach this are left out (5)")
    arguments = parser.parse_args()
    seconds: list[float] = []
    found = [
        predict(name, curves, arguments.epochs, seconds)
        for name, curves in curves_of(arguments.folders, arguments.below)
    ]
    if not found:
        parser.error("no *.npz file in the folder: give one with arrays `valid` [configurations, epochs]")
    print("| task (curves) | contestant | Spearman | mean | median | 80 % |\n|---|---|---|---|---|---|")
    for task in [*found, pooled(found)]:
        print_task(task)
    print_means(found)
    median, longest = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
    print(f"\n{len(seconds)} predictions: median {median:.3f} ms, longest {longest:.2f} ms")


if __name__ == "__main__":
    main()
