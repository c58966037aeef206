"""What a search finds for the epochs it trains: W workers in virtual time, on tasks whose curves are known.

    python benchmarks/search.py run OUT.jsonl --tasks lc:0 ce:0 --data FOLDER [--strategies freeze_thaw asha gp …]
                                [--seeds 2] [--workers 4] [--epochs 1000 | --trials 60] [--earlier other]
                                [--switch 8] [--timed] [--recorded STUDY.yaml …]
    python benchmarks/search.py table OUT.jsonl [--tasks lc- ce-] [--ours freeze_thaw] [--workers 4]
                                [--epochs 1000 | --trials 60]
    python benchmarks/search.py decisions [--trials 200 2000] [--epochs 50]

A strategy is a scheduler (`freeze_thaw`; `model_alone`, which is its model without the mixture; `asha`,
`hyperband`; new trials at random where it leaves them to a sampler), or SAMPLER+PRUNER: curve_gp, tpe, gp or
random as the service has them, or plain-tpe and plain-gp as Optuna has them, with none, median, hyperband or
predicted_loss; or a peer of search_peers.py.
Runs that OUT has are left out. `table` shows the regret of the best loss seen at any epoch (0: best known, 1: the
median configuration's end; more counts as 1), at shares of the budget; the share of the runs that ours ends ahead
in; how many times fewer epochs ours needs for each one's end; and the CPU milliseconds of a decision. Tasks are
those of search_splits.py.

With --switch, a start or a resumption takes so many of its trial's epochs of the budget. With --trials a study has
so many trials, and the shares are those of the epochs that they take if each runs whole. With --timed the budget
and a switch are virtual seconds of a worker; an epoch of the median trial takes about one. That counts where
some trials' epochs take longer. With --recorded, tasks are studies that have been trained: see search_recorded.py.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in workers; before NumPy is imported

import argparse
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from search_peers import PEERS
from search_recorded import Recorded
from search_splits import split
from search_study import SCHEDULERS, Floats, Plan, Running, Scheduled, Strategy, Study, earlier_trials, strategy_of
from search_tasks import Task

from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.freeze_thaw.scheduler import FreezeThaw
from hpo.search.schedulers.seen import Seen

_PAIRS = ("curve_gp", "tpe", "plain-tpe", "random")
STRATEGIES = (
    *SCHEDULERS,
    "gp",
    *(f"{each}+{pruner}" for pruner in ("median", "predicted_loss") for each in _PAIRS),
)
SHARES = (0.125, 0.25, 0.5, 1.0)
#: How many points of a run's trace are kept.
_KEPT = 60


def run(arguments: argparse.Namespace) -> None:
    """Run what the file lacks, and add it."""
    out: Path = arguments.out
    known = {tuple(json.loads(line)["key"]) for line in out.open()} if out.exists() else set()
    tasks = [task for name in arguments.tasks for task in split(name, arguments.data)]
    tasks += map(Recorded, arguments.recorded)
    if not tasks:
        raise SystemExit("no task is named: give --tasks or --recorded")
    for task, other in zip(tasks, tasks[1:] + tasks[:1], strict=True):
        epochs = arguments.trials * task.horizon if arguments.trials else arguments.epochs
        plan = Plan(arguments.workers, epochs, arguments.switch, arguments.trials, arguments.timed)
        for seed in range(arguments.seeds):
            for name in arguments.strategies:
                label = f"{name} after {arguments.earlier}" if arguments.earlier else name
                label += f" switch {plan.switch:g}" if plan.switch else ""
                label += " timed" if plan.timed else ""
                key = (task.name, label, seed, plan.workers, _budget(arguments))
                if key in known:
                    continue
                earlier = earlier_trials(task, other, arguments.earlier, seed, plan)
                study = Study(task, _strategy(name, task, seed, plan, earlier), plan, seed)
                study.run()
                with out.open("a") as file:
                    file.write(json.dumps({"key": key, **_summary(study, plan)}) + "\n")


def _strategy(name: str, task: Task, seed: int, plan: Plan, earlier: Sequence[Seen]) -> Strategy:
    kind, _, pruner = name.partition("+")
    return PEERS[kind](task, pruner, seed, plan) if kind in PEERS else strategy_of(name, task, seed, plan, earlier)


def _budget(arguments: argparse.Namespace) -> int | str:
    return f"{arguments.trials} trials" if arguments.trials else int(arguments.epochs)


def _summary(study: Study, plan: Plan) -> dict[str, Any]:
    at = np.unique(np.round(np.geomspace(10, plan.budget, _KEPT)).astype(int))
    kinds = [kind for trial in study.trials for kind in trial.kinds]
    return {
        "at": at.tolist(),
        "regret": np.minimum(study.trace[at - 1], 1e6).tolist(),
        "trials": len(study.trials),
        "epochs": sum(trial.done for trial in study.trials),
        "whole": sum(len(trial.values) == len(trial.trained.seen) for trial in study.trials),
        "kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "decisions": len(study.decisions),
        "decision_ms": 1e3 * float(np.mean(study.decisions)),
        "slowest_ms": 1e3 * float(np.max(study.decisions)),
    }


Runs = dict[tuple[str, int], dict[str, Any]]


def table(arguments: argparse.Namespace) -> None:
    """Print a table of the runs that all strategies in the file have."""
    runs: dict[str, Runs] = {}
    for line in arguments.out.open():
        row = json.loads(line)
        task, name, seed, workers, budget = row["key"]
        wanted = any(task.startswith(prefix) for prefix in arguments.tasks)
        chosen = not arguments.strategies or name in arguments.strategies
        if wanted and chosen and (workers, budget) == (arguments.workers, _budget(arguments)):
            runs.setdefault(name, {})[task, seed] = row
    common = sorted(set.intersection(*(set(each) for each in runs.values()))) if runs else []
    if not common:
        raise SystemExit("no run is there for every strategy: see --tasks, --workers, --epochs, --trials")
    curves = {
        name: np.array([np.minimum(each[key]["regret"], 1.0) for key in common]) for name, each in runs.items()
    }
    at = np.array(next(iter(runs.values()))[common[0]]["at"])
    print(f"{len({task for task, _ in common})} tasks, {len(common)} runs each, {arguments.workers} workers\n")
    cells = [f"{share:.1%}" for share in SHARES]
    heads = ("strategy", *cells, "ours ahead", "epochs ÷ ours", "trials", "whole", "epochs", "ms", "slowest ms")
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
    for name in sorted(runs, key=lambda each: float(curves[each][:, -1].mean())):
        print(_row(name, [runs[name][key] for key in common], curves, at, common, arguments))


def _row(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Floats],
    at: NDArray[np.int64],
    common: Sequence[tuple[str, int]],
    arguments: argparse.Namespace,
) -> str:
    mine, ours = curves[name], curves.get(arguments.ours)
    cells = [f"{np.interp(share * at[-1], at, mine.mean(0)):.3f}" for share in SHARES]
    ahead = factor = ""
    if ours is not None and name != arguments.ours:
        ahead = f"{np.mean(ours[:, -1] < mine[:, -1] - 1e-6):.0%}"
        ratios = []
        for task in sorted({task for task, _ in common}):
            which = [index for index, (its, _) in enumerate(common) if its == task]
            hit = np.nonzero(ours[which].mean(0) <= mine[which].mean(0)[-1])[0]
            ratios.append(at[-1] / at[hit[0]] if len(hit) else 0.5)
        factor = f"{np.median(ratios):.1f}"
    means = [f"{np.mean([row[key] for row in rows]):.{digits}f}" for key, digits in _MEANS]
    return f"| {' | '.join((name, *cells, ahead, factor, *means))} |"


_MEANS = (("trials", 0), ("whole", 1), ("epochs", 0), ("decision_ms", 1), ("slowest_ms", 0))


def decisions(arguments: argparse.Namespace) -> None:
    """Print the CPU milliseconds of consecutive decisions in studies of these sizes, including refits."""
    print("| trials | epochs each | mean ms | median ms | longest ms |\n|---|---|---|---|---|")
    for count in arguments.trials:
        taken = np.array(_timed(count, arguments.epochs, arguments.decisions)) * 1e3
        print(
            f"| {count} | {arguments.epochs} | {taken.mean():.1f} | {np.median(taken):.1f} | {taken.max():.0f} |"
        )


def _timed(count: int, epochs: int, decisions: int) -> list[float]:
    """Measure decisions, and train each answer at once, so that the study grows as in a real run."""
    (task,) = [each for each in split("formula", None) if each.name == "formula-silent-0"]
    space: Mapping[str, BaseDistribution] = task.space
    encoding, rng = Encoding(space, {}), np.random.default_rng(0)
    trials = []
    for number, point in enumerate(encoding.snap(rng.random((count, len(encoding))))):
        params = encoding.params(point)
        trained = task.train(params, 0)
        done = int(rng.integers(1, epochs + 1)) if number % 2 else epochs
        seen = np.interp(np.linspace(0, 1, epochs), np.linspace(0, 1, len(trained.seen)), trained.seen)
        values = {epoch: float(seen[epoch - 1]) for epoch in range(1, done + 1)}
        state, kind = "ended" if done == epochs else "paused", "model" if number % 4 else "breadth"
        trials.append(Running(number, params, trained, values, state, kinds=[kind]))
    strategy, taken = Scheduled(task, FreezeThaw(), 0, Plan(4, 10**9)), []
    strategy.free([], None)  # the first decision imports SciPy
    for _ in range(decisions):
        began = time.process_time()
        answer = strategy.free(trials, None)
        taken.append(time.process_time() - began)
        if answer is None:
            break
        number, params = answer
        if number is None:
            number = len(trials)
            trials.append(Running(number, params, task.train(params, 0)))
        trial, goal = trials[number], strategy.granted[0] or task.horizon
        for epoch in range(trial.done + 1, goal + 1):
            trial.values[epoch] = float(trial.trained.seen[min(epoch, task.horizon) - 1])
        trial.state, trial.until = "ended" if goal >= task.horizon else "paused", goal
        trial.kinds.append(strategy.granted[1])
    return taken


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="simulate studies, a line of JSON each")
    one.set_defaults(call=run)
    one.add_argument("out", type=Path)
    one.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        metavar="SPLIT",
        help="lc, ce, ts, formula, rugged, …; lc:0, lc:1: half; formula-cross-1: one",
    )
    one.add_argument("--data", type=Path, help="folder with lcbench/ and learning_curves/")
    one.add_argument("--recorded", type=Path, nargs="+", default=[], metavar="STUDY.yaml", help="recorded studies")
    one.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    one.add_argument("--seeds", type=int, default=2)
    one.add_argument("--switch", type=float, default=0.0, help="epochs that starting or resuming a trial takes")
    one.add_argument("--timed", action="store_true", help="--epochs and --switch are virtual seconds of a worker")
    one.add_argument(
        "--earlier",
        choices=("same", "other", "inverted"),
        default="",
        help="start from an earlier study: of the task, of the next one (lc, ce), or of that one upside down",
    )
    two = commands.add_parser("table", help="Markdown of what was run")
    two.set_defaults(call=table)
    two.add_argument("out", type=Path)
    two.add_argument("--tasks", nargs="+", default=[""], metavar="PREFIX", help="tasks whose names start so")
    two.add_argument("--strategies", nargs="+", help="only these")
    two.add_argument("--ours", default="freeze_thaw", help="what the others are compared with")
    for each in (one, two):
        each.add_argument("--workers", type=int, default=4)
        each.add_argument("--epochs", type=int, default=1000, help="budget of a study")
        each.add_argument("--trials", type=int, help="how many trials a study has, in place of epochs")
    three = commands.add_parser("decisions", help="CPU time of a decision")
    three.set_defaults(call=decisions)
    three.add_argument("--trials", type=int, nargs="+", default=[200, 2000])
    three.add_argument("--epochs", type=int, default=50, help="of a whole trial")
    three.add_argument("--decisions", type=int, default=100)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    arguments.call(arguments)


if __name__ == "__main__":
    main()
