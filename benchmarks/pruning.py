"""What pruners save and lose on recorded learning curves: a Markdown table.

    python benchmarks/pruning.py FOLDER [--pruner NAME[,key=value] …] [--tasks …] [--orders 4] [--configs 100]
                                 [--workers 1 8] [--horizon] [--keep-nan] [--per-task]

FOLDER holds a file NAME.npz a task, with an array `valid` [configurations, epochs], a loss. For each task and
order the first --configs of `numpy.random.default_rng(order).permutation(configurations)` are replayed
(`hpo.search.replay`), one after the other, or by so many workers side by side, whose epochs take different
times. What is shown:

- epochs: epochs used ÷ all epochs, the mean over tasks and orders.
- regret: (last value of the best trial that ran to its end - best last value) ÷ (median last value - best), of the
  configurations replayed; mean and worst over tasks and orders. 0: the best was found.
- wrongly pruned: trials pruned that would have ended better than the best found, the mean over tasks and orders.
- best 5 % pruned: of the best twentieth of the configurations, by their last values.
- ms: what a decision takes, median and longest.

A value that is not finite is reported as the worst there is (--keep-nan: as it stands), and the trial continues
unless it is pruned. --horizon gives the pruner the length of a trial, as `hpo run` does; without, it has to see.
Wilcoxon's pruner is not here: it is for trials that repeat a measurement in another order, not for curves. A
threshold would have to be chosen for each task.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in workers; before NumPy is imported

import argparse
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.pruners import BasePruner, HyperbandPruner, PatientPruner

from hpo.config.yaml_source import parse_value
from hpo.search.pruners import PRUNERS
from hpo.search.replay import RecordedRun, Replay, Setting, replay, summarize, whole_curves
from hpo.study.replay_study import typed_mapping

CONTESTANTS = (
    "none",
    "median,n_startup_trials=5,n_warmup_steps=5",
    "percentile,percentile=25.0,n_startup_trials=5,n_warmup_steps=5",
    "successive_halving,min_resource=1,reduction_factor=3",
    "successive_halving,min_resource=2,reduction_factor=3",
    "successive_halving,min_resource=4,reduction_factor=3",
    "hyperband,min_resource=1,reduction_factor=3",
    "patient,patience=3,wrapped_pruner={name: median, n_startup_trials: 5, n_warmup_steps: 5}",
    "predicted_loss",
)
HEADER = (
    *("epochs", "regret", "worst regret", "wrongly pruned"),
    *("best 5 % pruned", "ms", "longest ms"),
)


@dataclass(frozen=True)
class Task:
    """A file of curves: its name, and losses [configurations, epochs]."""

    name: str
    values: NDArray[np.float64]


def tasks_of(arguments: argparse.Namespace) -> list[Task]:
    """The requested tasks of the folder."""
    found = []
    for file in sorted(arguments.folder.glob("*.npz")):
        if arguments.tasks and not any(part in file.stem for part in arguments.tasks):
            continue
        with np.load(file, allow_pickle=False) as arrays:
            values = arrays["valid"].astype(np.float64)
        if not arguments.keep_nan:
            values[~np.isfinite(values)] = math.inf
        found.append(Task(file.stem, values))
    if not found:
        raise SystemExit(f"no such task in {arguments.folder}: it has to hold files NAME.npz")
    return found


def build(node: dict[str, object], epochs: int) -> BasePruner:
    """A new pruner from its name and arguments; Hyperband's length defaults to that of the curves."""
    arguments = {key: value for key, value in node.items() if key != "name"}
    if node["name"] not in PRUNERS:
        raise SystemExit(f"no pruner is named {node['name']}; there are {', '.join(PRUNERS)}")
    kind = PRUNERS[str(node["name"])]
    if kind is HyperbandPruner:
        arguments.setdefault("max_resource", epochs)
    if kind is PatientPruner and isinstance(wrapped := arguments["wrapped_pruner"], str | dict):
        arguments["wrapped_pruner"] = build({"name": wrapped} if isinstance(wrapped, str) else wrapped, epochs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return kind(**arguments)


def drawn(task: Task, order: int, configs: int) -> list[RecordedRun]:
    """The curves of some configurations of a task, in a random order."""
    return whole_curves(task.values[np.random.default_rng(order).permutation(len(task.values))[:configs]])


def replays(task: Task, pruner: str, workers: int, arguments: argparse.Namespace) -> Iterator[Replay]:
    """Replay a task with a pruner, once for each order."""
    epochs = task.values.shape[1]
    for order in range(arguments.orders):
        setting = Setting(
            workers=workers,
            speed_seed=order if workers > 1 else None,
            max_epochs=epochs if arguments.horizon else None,
            study_name=f"{task.name}-{order}",
        )
        contestant = build(parse_value(typed_mapping(pruner, "--pruner")), epochs)
        yield replay(drawn(task, order, arguments.configs), contestant, setting)


def row(name: str, found: Sequence[Replay]) -> str:
    """A row of the table."""
    summary = summarize(found)
    cells = (
        name,
        f"{summary.epochs_fraction:.3f}",
        f"{summary.regret:.4f}",
        f"{summary.worst_regret:.4f}",
        f"{summary.wrongly_pruned:.2f}",
        f"{summary.top_pruned:.0%}",
        f"{summary.decision_ms:.3f}",
        f"{summary.slowest_decision_ms:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def print_header(first: str) -> None:
    print(f"| {' | '.join((first, *HEADER))} |")
    print("|---" * (len(HEADER) + 1) + "|")


def print_tables(tasks: list[Task], workers: int, arguments: argparse.Namespace) -> None:
    """Print a table of all pruners, and on request one of each task with each pruner."""
    print(
        f"\n{len(tasks)} tasks, {arguments.orders} orders, {arguments.configs} configurations, {workers} workers\n"
    )
    print_header("pruner")
    by_task: list[str] = []
    for pruner in arguments.pruner or CONTESTANTS:
        found = {task.name: list(replays(task, pruner, workers, arguments)) for task in tasks}
        print(row(pruner, [each for several in found.values() for each in several]), flush=True)
        by_task += [row(f"{pruner} on {name}", several) for name, several in found.items()]
    if arguments.per_task:
        print()
        print_header("pruner and task")
        print("\n".join(by_task))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="files NAME.npz with an array `valid`")
    parser.add_argument("--pruner", nargs="+", action="extend", metavar="NAME[,key=value]", help="default: all")
    parser.add_argument("--tasks", nargs="+", metavar="PART", help="files whose names contain one of these")
    parser.add_argument("--orders", type=int, default=4)
    parser.add_argument("--configs", type=int, default=100)
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--horizon", action="store_true", help="give the pruner the length of a trial")
    parser.add_argument("--keep-nan", action="store_true", help="report what is not finite as it stands")
    parser.add_argument("--per-task", action="store_true", help="a second table, of each task")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    tasks = tasks_of(arguments)
    for workers in arguments.workers:
        print_tables(tasks, workers, arguments)


if __name__ == "__main__":
    main()
