"""Fits the weights of `hpo.search.predicted_loss.promise` on learning curves.

``python benchmarks/fit_promise.py FOLDER… [--minutes 10] [--leave-out TASK…]`` replays studies over the curves of
all files (arrays ``valid`` [configs, epochs]) but those left out, searches for weights with CMA-ES, and prints
them with the share of epochs and the regret that they reach, on the tasks they were fitted on and on those left
out. The probability's base and slope are a logistic regression of "ended as the best so far" on the score, over
decisions that the fitted model would meet.

A folder is judged by the mean over its tasks; what is minimised adds, over folders, the share of epochs and the
excess regret in units of what is acceptable (see `Goal`), with a steep price above.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import optuna

from hpo.search.predicted_loss.curves import Array, EndedCurves
from hpo.search.predicted_loss.promise import FITTED, Weights, score
from trainer.prediction.final_loss import Prediction, predict_final_loss

# The others are factors of a length, searched on a logarithmic scale.
_LINEAR = frozenset(
    ("standing", "reach_fades", "crowd", "early", "agreement", "learning", "settling", "forecast", "offset")
)
_NOT_SEARCHED = frozenset(("slope", "base"))


@dataclass(frozen=True)
class Goal:
    """What is acceptable for the tasks of a folder: share of epochs, mean and worst excess regret."""

    epochs: float
    regret: float
    worst: float


class Task:
    """The curves of a file, with the predictions that were made of them.

    Args:
        path: An npz file with an array ``valid`` [configs, epochs].
    """

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.curves: Array = np.load(path)["valid"].astype(np.float64)
        self.curves[~np.isfinite(self.curves)] = np.inf
        self._predictions: dict[tuple[int, int], Prediction | None] = {}

    def prediction(self, row: int, step: int) -> Prediction | None:
        """The predicted final value of a row from its first ``step`` values."""
        if (row, step) not in self._predictions:
            curve = self.curves[row]
            self._predictions[row, step] = predict_final_loss(curve[:step], len(curve), min_epochs=1)
        return self._predictions[row, step]


@dataclass(frozen=True)
class Decision:
    """A decision that was met: its score, and whether the trial would have ended as the best so far."""

    score: float
    best: bool


def replay(
    task: Task, rows: Sequence[int], weights: Weights, met: list[Decision] | None = None
) -> tuple[float, float]:
    """The share of epochs used and the excess regret of one study in sequence, pruning at scores below 0."""
    ended, used, horizon = EndedCurves(1), 0, task.curves.shape[1]
    finals = task.curves[list(rows), -1]
    found = math.inf
    for row in rows:
        curve = task.curves[row]
        stop = _stop(task, row, ended, weights, found, met)
        used += stop
        final = float(curve[-1]) if stop == horizon else None
        ended.add({step: float(curve[step - 1]) for step in range(1, stop + 1)}, final)
        found = found if final is None else min(found, final)
    best, median = finals.min(), np.median(finals[np.isfinite(finals)])
    return used / (len(rows) * horizon), min(float((found - best) / (median - best)), 2.0)


def _stop(
    task: Task, row: int, ended: EndedCurves, weights: Weights, found: float, met: list[Decision] | None
) -> int:
    curve = task.curves[row]
    for step in range(1, len(curve)):
        if not math.isfinite(curve[step - 1]):
            return step
        if not ended.complete or step < 2:
            continue
        value = score(curve[:step], task.prediction(row, step), ended.at(step, 1), step, len(curve), weights)
        if met is not None:
            met.append(Decision(value, bool(curve[-1] < found)))
        if value < 0:
            return step
    return len(curve)


def orders(task: Task, count: int, configs: int = 125) -> Iterable[npt.NDArray[np.intp]]:
    """The first ``count`` orders of a task, by seed."""
    configs = 100 if len(task.curves) > 2 * configs else configs
    for seed in range(count):
        yield np.random.default_rng(seed).permutation(len(task.curves))[:configs]


def measure(tasks: Sequence[Task], weights: Weights, count: int, met: list[Decision] | None = None) -> Array:
    """Share of epochs and excess regret; [tasks * orders, 2]."""
    return np.array([replay(task, list(order), weights, met) for task in tasks for order in orders(task, count)])


def price(results: Array, goal: Goal) -> float:
    """What is minimised for a folder: about 2 where both figures are at the goal."""
    epochs, regret = results.mean(axis=0)
    over = max(epochs / goal.epochs - 1, 0) * 10 + max(regret / goal.regret - 1, 0) * 2
    return float(epochs / goal.epochs + regret / goal.regret + over + max(results[:, 1].max() / goal.worst - 1, 0))


def suggest(trial: optuna.Trial) -> Weights:
    """Weights within wide bounds."""
    values: dict[str, float] = {}
    for field in fields(Weights):
        if field.name in _LINEAR:
            values[field.name] = trial.suggest_float(field.name, -8, 12)
        elif field.name not in _NOT_SEARCHED:
            values[field.name] = trial.suggest_float(field.name, 3e-4, 20, log=True)
    return replace(FITTED, **values)


def fit(folders: Sequence[tuple[Sequence[Task], Goal, int]], seconds: float, seed: int) -> Weights:
    """Search from the weights that are fitted already."""
    start = {key: value for key, value in dataclasses.asdict(FITTED).items() if key not in _NOT_SEARCHED}
    sampler = optuna.samplers.CmaEsSampler(x0=start, sigma0=0.03, seed=seed)
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial(start)

    def objective(trial: optuna.Trial) -> float:
        weights = suggest(trial)
        return sum(price(measure(tasks, weights, count), goal) for tasks, goal, count in folders)

    study.optimize(objective, timeout=seconds)
    print(f"{len(study.trials)} sets of weights; price {study.trials[0].value:.3f} -> {study.best_value:.3f}")
    return replace(FITTED, **study.best_params)


def calibrate(folders: Sequence[tuple[Sequence[Task], Goal, int]], weights: Weights) -> Weights:
    """Base and slope of the probability, by Newton's method for a logistic regression, folders weighing alike."""
    scores, best, share = [], [], []
    for tasks, _, count in folders:
        met: list[Decision] = []
        measure(tasks, replace(weights, offset=weights.offset + 1), count, met)
        scores += [each.score - 1 for each in met]
        best += [each.best for each in met]
        share += [1 / len(met)] * len(met)
    inputs, labels = np.column_stack([np.ones(len(scores)), scores]), np.array(best, np.float64)
    weight, at = np.array(share), np.zeros(2)
    for _ in range(30):
        chance = 1 / (1 + np.exp(-inputs @ at))
        gradient = inputs.T @ (weight * (labels - chance))
        curvature = (inputs * (weight * chance * (1 - chance))[:, None]).T @ inputs
        at = at + np.linalg.solve(curvature, gradient)
    return replace(weights, base=float(at[0]), slope=float(at[1]))


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--leave-out", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--goal", nargs=3, type=float, action="append", help="epochs, regret, worst: one a folder")
    parser.add_argument("--orders", type=int, nargs="+", default=[4])
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    goals = [Goal(*goal) for goal in arguments.goal or [(0.2, 0.03, 0.3)] * len(arguments.folders)]
    counts = (arguments.orders * len(arguments.folders))[: len(arguments.folders)]
    every = [[Task(path) for path in sorted(folder.glob("*.npz"))] for folder in arguments.folders]
    fitted = [
        ([task for task in tasks if task.name not in arguments.leave_out], goal, count)
        for tasks, goal, count in zip(every, goals, counts, strict=True)
    ]
    weights = fit(fitted, arguments.minutes * 60, arguments.seed)
    weights = calibrate(fitted, weights)
    for field in fields(weights):
        print(f"    {field.name}={getattr(weights, field.name):.3g},")
    for folder, tasks, count in zip(arguments.folders, every, counts, strict=True):
        for title, left in (("fitted on", False), ("left out", True)):
            chosen = [task for task in tasks if (task.name in arguments.leave_out) == left]
            if chosen:
                results = measure(chosen, weights, count)
                epochs, regret = results.mean(axis=0)
                worst = results[:, 1].max()
                print(f"{folder.name}, {title}: epochs {epochs:.3f}, regret {regret:.4f}, worst {worst:.3f}")


if __name__ == "__main__":
    main()
