"""What a search finds for the epochs it trains: W workers in virtual time, on tasks whose curves are known.

    python benchmarks/search.py run OUT.jsonl --tasks lc:0 ce:0 --data FOLDER [--strategies freeze_thaw asha gp …]
                                [--seeds 2] [--workers 4] [--epochs 1000] [--earlier other]
    python benchmarks/search.py table OUT.jsonl [--tasks lc- ce-] [--ours freeze_thaw] [--workers 4]
                                [--epochs 1000]
    python benchmarks/search.py decisions [--trials 200 2000] [--epochs 50]

A strategy is a scheduler (`freeze_thaw`, `asha`, `hyperband`; new trials at random where it leaves them to a
sampler), or SAMPLER+PRUNER: curve_gp, tpe, gp or random as the service has them, or plain-tpe and plain-gp as
Optuna has them, with none, median, hyperband or predicted_loss.
Runs that OUT has are left out. `table` shows the regret of the best loss seen at any epoch (0: best known, 1: the
median configuration's end; more counts as 1), at shares of the budget; the share of the runs that ours ends ahead
in; how many times fewer epochs ours needs for each one's end; and the CPU milliseconds of a decision. Tasks are
those of search_tasks.py.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as workers have it; before NumPy is imported

import argparse
import heapq
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from search_tasks import Task, Trained, regret, split

from hpo.search.as_predicted import as_predicted
from hpo.search.curve_sampler import CurveGPSampler
from hpo.search.per_trial import PerTrialSampler
from hpo.search.predicted_loss.pruner import PredictedLossPruner
from hpo.search.samplers import tpe_arguments
from hpo.search.schedulers.asha import Asha
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.freeze_thaw.scheduler import FreezeThaw
from hpo.search.schedulers.hyperband import Hyperband
from hpo.search.schedulers.scheduler import Resume, Scheduler, Seen, Standing, Wait
from hpo.storage.attributes import MAX_EPOCHS_ATTR

Floats = NDArray[np.float64]

SCHEDULERS: Mapping[str, Callable[[], Scheduler]] = {
    "freeze_thaw": FreezeThaw,
    "asha": Asha,
    "hyperband": Hyperband,
}
_PAIRS = ("curve_gp", "tpe", "plain-tpe", "random")
STRATEGIES = (
    *SCHEDULERS,
    "gp",
    *(f"{each}+{pruner}" for pruner in ("median", "predicted_loss") for each in _PAIRS),
)
SHARES = (0.125, 0.25, 0.5, 1.0)
#: Points of a run's trace that are kept.
_KEPT = 60
#: What is reported for a loss that is not finite, to samplers that take none.
_LOST = 1e9


@dataclass
class Running:
    """A trial of a simulated study."""

    number: int
    params: Mapping[str, Any]
    trained: Trained
    values: dict[int, float] = field(default_factory=dict)
    state: Any = "running"
    until: int | None = None
    kinds: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Epochs that it has finished."""
        return len(self.values)


@dataclass(frozen=True)
class Plan:
    """What a study has.

    Attributes:
        workers: How many train at a time.
        budget: Epochs that they train together.
        switch: Epochs of a trial that starting or resuming it takes, out of the same budget.
    """

    workers: int
    budget: int
    switch: float = 0.0


class Strategy(Protocol):
    """Who decides."""

    def free(self, trials: Sequence[Running], here: int | None) -> tuple[int | None, Mapping[str, Any]] | None:
        """What a free worker trains: a paused trial's number, or None and new parameters; None: it waits.

        ``here`` is the trial that it has had last; None for one that has had none.
        """

    def report(self, trial: Running, value: float) -> bool:
        """Whether the trial trains on after an epoch."""


class Scheduled:
    """A scheduler, shown the study as it would be in production."""

    def __init__(
        self,
        task: Task,
        scheduler: Scheduler,
        seed: int,
        plan: Plan,
        earlier: Sequence[Seen] = (),
    ) -> None:
        self._task, self._scheduler, self._seed, self._earlier = task, scheduler, seed, earlier
        self._plan = plan
        self._encoding = Encoding(task.space, task.conditions)
        self._state: Mapping[str, Any] = {}
        self.granted: tuple[int | None, str] = (None, "")

    def free(self, trials: Sequence[Running], here: int | None) -> tuple[int | None, Mapping[str, Any]] | None:
        """See `Strategy`."""
        answer = self._scheduler.next(self._standing(trials, here))
        if isinstance(answer, Wait):
            return None
        self._state = self._state if answer.state is None else json.loads(json.dumps(answer.state))
        self.granted = (answer.until, answer.why.kind)
        if isinstance(answer, Resume):
            return answer.number, {}
        if answer.params is not None:
            return None, answer.params
        drawn = np.random.default_rng((self._seed, len(trials))).random((1, len(self._encoding)))
        return None, self._encoding.params(self._encoding.snap(drawn)[0])

    def report(self, trial: Running, value: float) -> bool:
        """Up to its goal."""
        if not math.isfinite(value):
            trial.state = "ended"
        return trial.state == "running" and trial.done < (trial.until or self._task.horizon)

    def _standing(self, trials: Sequence[Running], here: int | None) -> Standing:
        seen = [
            Seen(
                trial.number,
                trial.params,
                trial.values,
                trial.state,
                trial.until,
                trial.kinds,
                whole=trial.done == self._task.horizon,
                switch=self._plan.switch,
            )
            for trial in trials
        ]
        return Standing(
            read=lambda: [*seen, *self._earlier],
            space=self._task.space,
            conditions=self._task.conditions,
            horizon=self._task.horizon,
            seed=self._seed,
            planned=self._plan.workers,
            n_epochs=None if self._plan.switch else self._plan.budget,
            state=self._state,
            here=None if here is None or trials[here].state != "paused" else here,
        )


class Sampled:
    """A sampler and a pruner: what is pruned has ended."""

    def __init__(self, task: Task, sampler: str, pruner: str, seed: int) -> None:
        self._task = task
        self._order = Encoding(task.space, task.conditions).names
        self._study = optuna.create_study(
            study_name=task.name, sampler=_sampler(sampler, task, seed), pruner=_pruner(pruner, task.horizon)
        )
        self._study.set_user_attr(MAX_EPOCHS_ATTR, task.horizon)
        self._trials: list[optuna.Trial] = []
        self.granted: tuple[int | None, str] = (None, "")

    def free(
        self,
        trials: Sequence[Running],  # noqa: ARG002
        here: int | None,  # noqa: ARG002
    ) -> tuple[int | None, Mapping[str, Any]] | None:
        """Always a new trial."""
        trial = self._study.ask()
        for name in self._order:
            conditions = self._task.conditions.get(name, {})
            if all(trial.params.get(other) in values for other, values in conditions.items()):
                _suggest(trial, name, self._task.space[name])
        self._trials.append(trial)
        return None, trial.params

    def report(self, trial: Running, value: float) -> bool:
        """Until it is pruned."""
        asked, value = self._trials[trial.number], value if math.isfinite(value) else _LOST
        asked.report(value, trial.done)
        if trial.done == self._task.horizon:
            self._study.tell(asked, min(_LOST, *trial.values.values()))  # the best epoch's, as the service does
            return False
        if value < _LOST and not asked.should_prune():
            return True
        trial.state = "ended"
        self._study.tell(asked, state=TrialState.PRUNED)
        return False


def _suggest(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> None:
    if isinstance(distribution, CategoricalDistribution):
        trial.suggest_categorical(name, distribution.choices)
    elif isinstance(distribution, IntDistribution):
        trial.suggest_int(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)
    else:
        assert isinstance(distribution, FloatDistribution)
        trial.suggest_float(
            name, distribution.low, distribution.high, step=distribution.step, log=distribution.log
        )


def _sampler(name: str, task: Task, seed: int) -> optuna.samplers.BaseSampler:
    """The service's; `plain-NAME` is Optuna's own, with its own defaults."""
    kinds: Mapping[str, Callable[[int], optuna.samplers.BaseSampler]] = {
        "tpe": lambda own: optuna.samplers.TPESampler(seed=own, **tpe_arguments(task.space, task.conditions)),
        "gp": lambda own: optuna.samplers.GPSampler(seed=own, warn_independent_sampling=False),
        "curve_gp": lambda _: CurveGPSampler(task.space, task.conditions, seed),
        "random": lambda own: optuna.samplers.RandomSampler(seed=own),
        "plain-tpe": lambda own: optuna.samplers.TPESampler(seed=own),
        "plain-gp": lambda own: optuna.samplers.GPSampler(seed=own, warn_independent_sampling=False),
    }
    if name not in kinds:
        raise SystemExit(
            f"no strategy is named `{name}`: a scheduler ({', '.join(SCHEDULERS)}) or one of {', '.join(kinds)}"
        )
    if name.startswith("plain-"):
        return kinds[name](seed)
    encoding = Encoding(task.space, task.conditions)

    def shown(study: optuna.Study) -> optuna.Study:
        return study if name == "curve_gp" else as_predicted(study, encoding)

    return PerTrialSampler(kinds[name], seed, shown)


def _pruner(name: str, horizon: int) -> optuna.pruners.BasePruner:
    kinds: Mapping[str, Callable[[], optuna.pruners.BasePruner]] = {
        "none": optuna.pruners.NopPruner,
        "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=5),
        "hyperband": lambda: optuna.pruners.HyperbandPruner(1, horizon, 3),
        "predicted_loss": lambda: PredictedLossPruner(max_epochs=horizon),
    }
    if name not in kinds:
        raise SystemExit(f"no pruner is named `{name}`: there are {', '.join(kinds)}")
    return kinds[name]()


def strategy_of(name: str, task: Task, seed: int, plan: Plan, earlier: Sequence[Seen] = ()) -> Strategy:
    """By its name on the command line; NAME,key=value gives a scheduler's arguments."""
    kind, *arguments = name.split(",")
    if kind in SCHEDULERS:
        given = {key: json.loads(value) for key, _, value in (each.partition("=") for each in arguments)}
        return Scheduled(task, SCHEDULERS[kind](**given), seed, plan, earlier)
    sampler, _, pruner = name.partition("+")
    return Sampled(task, sampler, pruner or "none", seed)


#: Numbers of imported trials begin here.
_IMPORTED = 10**6
#: An earlier study's seed is so much larger.
_OTHER_SEED = 100


def earlier_trials(task: Task, other: Task, kind: str, seed: int, plan: Plan) -> list[Seen]:
    """The trials of an earlier study by `freeze_thaw`, as a study on ``task`` has them that starts from it.

    Args:
        task: The task.
        other: Another one with the same space.
        kind: What the earlier study was of: ``"same"``, the task; ``"other"``, the other one; ``"inverted"``, the
            other one, its good trials shown as bad ones; ``""``: there is none.
        seed: Of the study; the earlier one has another.
        plan: Of both.
    """
    if not kind:
        return []
    source, seed = task if kind == "same" else other, seed + _OTHER_SEED
    study = Study(source, strategy_of("freeze_thaw", source, seed, plan), plan, seed)
    study.run()
    sign = -1.0 if kind == "inverted" else 1.0
    return [
        Seen(
            _IMPORTED + trial.number,
            trial.params,
            {epoch: sign * value for epoch, value in trial.values.items()},
            "ended",
            whole=trial.done == task.horizon,
            imported=True,
            source=source.name,
        )
        for trial in study.trials
    ]


class Study:
    """One simulated study: workers in virtual time until the budget is used."""

    def __init__(self, task: Task, strategy: Strategy, plan: Plan, seed: int) -> None:
        self._task, self._strategy, self._plan, self._seed = task, strategy, plan, seed
        self.trials: list[Running] = []
        self.trace = np.full(plan.budget, np.inf)
        self.decisions: list[float] = []
        self._events: list[tuple[float, int, int]] = []
        self._idle: list[int] = []
        self._last: list[int | None] = [None] * plan.workers
        self._used = 0.0
        self._best = (math.inf, math.inf)

    def run(self) -> None:
        """Train; `trace` has the regret of the best seen after each epoch of the budget."""
        self._idle = list(range(self._plan.workers))
        self._start(0.0)
        while self._events and self._used < self._plan.budget:
            now, worker, number = heapq.heappop(self._events)
            trial = self.trials[number]
            self._used += 1
            value, true = float(trial.trained.seen[trial.done]), float(trial.trained.true[trial.done])
            trial.values[trial.done + 1] = value
            self._best = min(self._best, (value, true))
            self.trace[math.ceil(self._used) - 1 :] = self._best[1]
            self._after(trial, value, now, worker)
        self.trace = regret(self._task, self.trace)

    def _after(self, trial: Running, value: float, now: float, worker: int) -> None:
        began = time.process_time()
        continues = self._strategy.report(trial, value)
        self.decisions[-1] += time.process_time() - began
        if trial.done == self._task.horizon:
            trial.state = "ended"
        elif continues:
            heapq.heappush(self._events, (now + trial.trained.seconds, worker, trial.number))
            return
        elif trial.state == "running":
            trial.state = "paused"
        self._idle.append(worker)
        self._start(now)

    def _start(self, now: float) -> None:
        while self._idle:
            began = time.process_time()
            worker = self._idle[-1]
            answer = self._strategy.free(self.trials, self._last[worker])
            self.decisions.append(time.process_time() - began)
            if answer is None:
                return
            number, params = answer
            if number is None:
                trained = self._task.train(params, self._seed)
                number = len(self.trials)
                self.trials.append(Running(number, params, trained))
            trial = self.trials[number]
            if trial.state == "ended" or trial.done >= self._task.horizon:
                raise AssertionError(f"trial {number} has ended")
            trial.state, (trial.until, kind) = "running", self._strategy.granted
            trial.kinds.append(kind)
            switch = 0.0 if number == self._last[worker] else self._plan.switch
            self._last[worker] = number
            self._used += switch
            heapq.heappush(self._events, (now + (1 + switch) * trial.trained.seconds, self._idle.pop(), number))


def run(arguments: argparse.Namespace) -> None:
    """Add the runs that the file lacks."""
    out: Path = arguments.out
    known = {tuple(json.loads(line)["key"]) for line in out.open()} if out.exists() else set()
    plan = Plan(arguments.workers, arguments.epochs, arguments.switch)
    at = np.unique(np.round(np.geomspace(10, plan.budget, _KEPT)).astype(int))
    tasks = [task for name in arguments.tasks for task in split(name, arguments.data)]
    for task, other in zip(tasks, tasks[1:] + tasks[:1], strict=True):
        for seed in range(arguments.seeds):
            for name in arguments.strategies:
                label = f"{name} after {arguments.earlier}" if arguments.earlier else name
                label += f" switch {plan.switch:g}" if plan.switch else ""
                key = (task.name, label, seed, plan.workers, plan.budget)
                if key in known:
                    continue
                earlier = earlier_trials(task, other, arguments.earlier, seed, plan)
                strategy = strategy_of(name, task, seed, plan, earlier)
                study = Study(task, strategy, plan, seed)
                study.run()
                with out.open("a") as file:
                    file.write(json.dumps({"key": key, **_summary(study, at)}) + "\n")


def _summary(study: Study, at: NDArray[np.int64]) -> dict[str, Any]:
    kinds = [kind for trial in study.trials for kind in trial.kinds]
    return {
        "at": at.tolist(),
        "regret": np.minimum(study.trace[at - 1], 1e6).tolist(),
        "trials": len(study.trials),
        "whole": sum(len(trial.values) == len(trial.trained.seen) for trial in study.trials),
        "kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "decisions": len(study.decisions),
        "decision_ms": 1e3 * float(np.mean(study.decisions)),
        "slowest_ms": 1e3 * float(np.max(study.decisions)),
    }


Runs = dict[tuple[str, int], dict[str, Any]]


def table(arguments: argparse.Namespace) -> None:
    """Print a table over the runs that all strategies of the file have in common."""
    runs: dict[str, Runs] = {}
    for line in arguments.out.open():
        row = json.loads(line)
        task, name, seed, workers, budget = row["key"]
        wanted = any(task.startswith(prefix) for prefix in arguments.tasks)
        chosen = not arguments.strategies or name in arguments.strategies
        if wanted and chosen and (workers, budget) == (arguments.workers, arguments.epochs):
            runs.setdefault(name, {})[task, seed] = row
    common = sorted(set.intersection(*(set(each) for each in runs.values()))) if runs else []
    if not common:
        raise SystemExit("no run is there for every strategy: see --tasks, --workers, --epochs")
    curves = {
        name: np.array([np.minimum(each[key]["regret"], 1.0) for key in common]) for name, each in runs.items()
    }
    at = np.array(next(iter(runs.values()))[common[0]]["at"])
    print(f"{len({task for task, _ in common})} tasks, {len(common)} runs each, {arguments.workers} workers\n")
    cells = [f"{share:.1%}" for share in SHARES]
    print(f"| strategy | {' | '.join(cells)} | ours ahead | epochs ÷ ours | trials | whole | ms | slowest ms |")
    print("|---" * (len(cells) + 7) + "|")
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
    cells = [f"{np.interp(share * arguments.epochs, at, mine.mean(0)):.3f}" for share in SHARES]
    ahead = factor = ""
    if ours is not None and name != arguments.ours:
        ahead = f"{np.mean(ours[:, -1] < mine[:, -1] - 1e-6):.0%}"
        ratios = []
        for task in sorted({task for task, _ in common}):
            which = [index for index, (its, _) in enumerate(common) if its == task]
            hit = np.nonzero(ours[which].mean(0) <= mine[which].mean(0)[-1])[0]
            ratios.append(arguments.epochs / at[hit[0]] if len(hit) else 0.5)
        factor = f"{np.median(ratios):.1f}"
    means = [f"{np.mean([row[key] for row in rows]):.{digits}f}" for key, digits in _MEANS]
    return f"| {' | '.join((name, *cells, ahead, factor, *means))} |"


_MEANS = (("trials", 0), ("whole", 1), ("decision_ms", 1), ("slowest_ms", 0))


def decisions(arguments: argparse.Namespace) -> None:
    """Print the CPU milliseconds of consecutive decisions of a study of so many trials, refits included."""
    print("| trials | epochs each | mean ms | median ms | longest ms |\n|---|---|---|---|---|")
    for count in arguments.trials:
        taken = np.array(_timed(count, arguments.epochs, arguments.decisions)) * 1e3
        print(
            f"| {count} | {arguments.epochs} | {taken.mean():.1f} | {np.median(taken):.1f} | {taken.max():.0f} |"
        )


def _timed(count: int, epochs: int, decisions: int) -> list[float]:
    """Each decision's answer is trained at once: the study grows as it would."""
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
        "--tasks", nargs="+", required=True, metavar="SPLIT", help="lc, ce, ts or formula; lc:0, lc:1: half"
    )
    one.add_argument("--data", type=Path, help="folder with lcbench/ and learning_curves/")
    one.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    one.add_argument("--seeds", type=int, default=2)
    one.add_argument("--switch", type=float, default=0.0, help="epochs that starting or resuming a trial takes")
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
