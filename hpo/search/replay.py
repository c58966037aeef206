"""Replays recorded curves under a pruner, to measure how many epochs it would have saved and what it would lose.

The curves pass through a real Optuna study in memory (ask, report, should_prune, tell), so any pruner can be
judged unchanged. Only the training is left out: an epoch takes one unit of simulated time. Several workers are
simulated as if they ran at the same time: each takes the next configuration as soon as it is free, and the pruner
sees all that the others have reported by then.

A curve may contain values that are not finite. Each is reported as it is and the pruner is asked about it, as in
Optuna's own loops; if the pruner does not end the trial, the trial continues along the recorded curve. A trial of
`hpo` that diverges ends by itself, without asking the pruner, and so does its replayed curve. A trial whose final
value is not finite, or that violates a bound of its study, counts as the worst possible value.
"""

from __future__ import annotations

import heapq
import math
import statistics
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import optuna
from numpy.typing import ArrayLike
from optuna.pruners import BasePruner
from optuna.trial import TrialState

from hpo.search.predicted_loss.audit import Condemned
from hpo.storage.attributes import MAX_EPOCHS_ATTR

#: The share of the configurations, by final value, that count as the top.
_TOP: Final = 0.05
#: Standard deviation of the logarithm of an epoch's time, where configurations differ in speed: two thirds of them
#: lie within a factor of 1.6 of the median.
_DRIFT: Final = 0.5


@dataclass(frozen=True)
class RecordedRun:
    """The recorded run of one configuration.

    Attributes:
        values: The metric at each report.
        steps: The epoch of each report, counted from 1, rising.
        final: The trial's final value; not finite where it diverged, and meaningless where it was cut short.
        end: How the trial ends if the pruner lets it continue to the last report: COMPLETE, or the state in which
            it was cut short (PRUNED, FAIL), so that its full result is unknown.
        feasible: Whether the trial kept to the study's bounds; a trial that did not is never the best.
        diverged: Whether the run diverged at its last report; the pruner is not asked about that report.

    Raises:
        ValueError: There is no report, or values and steps differ in number.
    """

    values: tuple[float, ...]
    steps: tuple[int, ...]
    final: float = math.nan
    end: TrialState = TrialState.COMPLETE
    feasible: bool = True
    diverged: bool = False

    def __post_init__(self) -> None:
        if not self.values or len(self.values) != len(self.steps):
            raise ValueError("a curve needs at least one value, and a step for each")

    @property
    def epochs(self) -> int:
        """The length of the run, in epochs."""
        return self.steps[-1]

    @property
    def whole(self) -> bool:
        """Whether the configuration's full result is known."""
        return self.end == TrialState.COMPLETE

    @property
    def judged(self) -> float:
        """The value that the trial is judged by; not finite where the trial can't be the best."""
        return self.final if self.feasible else math.nan


@dataclass(frozen=True)
class Setting:
    """The circumstances of a replay.

    Attributes:
        direction: Whether the metric is minimised or maximised.
        workers: How many trials run at a time.
        speed_seed: Seed for how long each configuration's epochs take, so that workers drift apart; None: all
            epochs take the same time, and workers report in turn.
        max_epochs: The epochs of a whole trial, written to the study as `hpo` writes it; None: the pruner has to
            find out by itself.
        study_name: The study's name, on which Hyperband's brackets depend.
    """

    direction: Literal["minimize", "maximize"] = "minimize"
    workers: int = 1
    speed_seed: int | None = None
    max_epochs: int | None = None
    study_name: str = "replay"

    @property
    def sign(self) -> int:
        """The factor that turns values into ones where less is better."""
        return 1 if self.direction == "minimize" else -1


@dataclass(frozen=True)
class ReplayedTrial:
    """How a replayed trial ended.

    Attributes:
        row: The index of its curve.
        epochs: Epochs that it used.
        pruned: Whether the replayed pruner ended it.
        alpha: The ``alpha`` in force at `PredictedLossPruner`'s first decision against it; None without one.
    """

    row: int
    epochs: int
    pruned: bool
    alpha: float | None = None

    @property
    def audited(self) -> bool:
        """Whether it ran on as an audit."""
        return self.alpha is not None and not self.pruned


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Values are as recorded, in either direction. Trials that were cut short when they were recorded count only in
    the epochs.

    Attributes:
        trials: The trials, in the order in which they started.
        epochs_used: Epochs that all trials used together.
        epochs_in_all: Epochs that they would have used without pruning.
        found: The best final value among trials that ran to their end; the worst possible value if none did.
        best: The best of all final values within the study's bounds.
        median: The median of the finite ones.
        regret: (found - best) ÷ (median - best): 0 where the best was found, 1 where the result is no better than
            the median configuration; inf where nothing was found, or where there is no median above the best.
        wrongly_pruned: Pruned trials that would have ended better than the best found.
        top: How many trials are the best 5 %, rounded up.
        top_pruned: How many of those were pruned.
        audited: Trials that ran on as audits.
        alpha: The ``alpha`` in force at the last trial that the pruner decided against; None where there is none.
        decision_s: Median seconds that the pruner took for a decision.
        slowest_decision_s: Seconds that its slowest decision took.
    """

    trials: tuple[ReplayedTrial, ...]
    epochs_used: int
    epochs_in_all: int
    found: float
    best: float
    median: float
    regret: float
    wrongly_pruned: int
    top: int
    top_pruned: int
    audited: int
    alpha: float | None
    decision_s: float
    slowest_decision_s: float

    @property
    def epochs_fraction(self) -> float:
        """Epochs used ÷ epochs in all."""
        return self.epochs_used / self.epochs_in_all


@dataclass(frozen=True)
class Summary:
    """The figures of several replays of one pruner, summed up.

    Attributes:
        epochs_fraction: Mean of epochs used ÷ epochs in all.
        regret: Mean regret.
        worst_regret: The largest regret.
        wrongly_pruned: Mean number of trials pruned that would have ended better than the best found.
        top_pruned: Of the best 5 % of the trials, the share that was pruned.
        audited: Mean number of trials that ran on as audits.
        alpha: Mean of the replays' last ``alpha``; None where no replay has one.
        decision_ms: Median over the replays of the median time of a decision, in milliseconds.
        slowest_decision_ms: The time of the slowest decision, in milliseconds.
    """

    epochs_fraction: float
    regret: float
    worst_regret: float
    wrongly_pruned: float
    top_pruned: float
    audited: float
    alpha: float | None
    decision_ms: float
    slowest_decision_ms: float


def whole_curves(rows: Iterable[ArrayLike]) -> list[RecordedRun]:
    """Runs of complete trials, whose final values are the last ones of their curves.

    Args:
        rows: The metric by epoch, for each configuration: an array [configurations, epochs], or rows of different
            lengths. Values that are not finite are kept.
    """
    values = [tuple(map(float, np.asarray(row, dtype=np.float64))) for row in rows]
    return [RecordedRun(row, tuple(range(1, len(row) + 1)), row[-1] if row else math.nan) for row in values]


def replay(
    curves: Sequence[RecordedRun],
    pruner: BasePruner,
    setting: Setting = Setting(),
    order: Iterable[int] | None = None,
) -> Replay:
    """Run the configurations of some curves under a pruner.

    Args:
        curves: The recorded runs, one for each configuration.
        pruner: The pruner; a new one for each replay, since some pruners keep state.
        setting: Direction, workers and so on.
        order: Indices of the curves in the order in which they are tried, possibly not all; None: as given.

    Raises:
        ValueError: No curve of ``order`` is whole, or there is no worker.
    """
    rows = list(range(len(curves)) if order is None else map(int, order))
    if not any(curves[row].whole for row in rows):
        raise ValueError("there is no curve that is known to its end")
    if setting.workers < 1:
        raise ValueError("it takes at least one worker")
    simulation = _Simulation(curves, rows, pruner, setting)
    with warnings.catch_warnings():
        # NumPy warns where Optuna's pruners compute with values that are not finite; they cope with the result.
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
        warnings.filterwarnings("ignore", "invalid value", RuntimeWarning, module=r"numpy\.")
        simulation.run()
    return _judged(curves, [simulation.ended[number] for number in range(len(rows))], simulation.seconds, setting)


def summarize(replays: Sequence[Replay]) -> Summary:
    """Sum up the figures of several replays.

    Raises:
        ValueError: There is no replay.
    """
    if not replays:
        raise ValueError("there is no replay to sum up")
    alphas = [each.alpha for each in replays if each.alpha is not None]
    return Summary(
        epochs_fraction=statistics.fmean(each.epochs_fraction for each in replays),
        regret=statistics.fmean(each.regret for each in replays),
        worst_regret=max(each.regret for each in replays),
        wrongly_pruned=statistics.fmean(each.wrongly_pruned for each in replays),
        top_pruned=sum(each.top_pruned for each in replays) / max(1, sum(each.top for each in replays)),
        audited=statistics.fmean(each.audited for each in replays),
        alpha=statistics.fmean(alphas) if alphas else None,
        decision_ms=1e3 * statistics.median(each.decision_s for each in replays),
        slowest_decision_ms=1e3 * max(each.slowest_decision_s for each in replays),
    )


# ------------------------------------------------------------------------------------------------- the simulation


@dataclass
class _Run:
    """A running trial."""

    row: int
    curve: RecordedRun
    trial: optuna.Trial
    started: float
    pace: float
    reports: int = 0

    @property
    def next_at(self) -> float:
        """The simulated time of its next report."""
        return self.started + self.pace * self.curve.steps[self.reports]


@dataclass
class _Simulation:
    """Simulates workers on one study, event by event; at equal times the lower worker's event comes first."""

    curves: Sequence[RecordedRun]
    rows: list[int]
    pruner: BasePruner
    setting: Setting
    ended: dict[int, ReplayedTrial] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._study = optuna.create_study(
            study_name=self.setting.study_name,
            direction=self.setting.direction,
            pruner=self.pruner,
            sampler=optuna.samplers.RandomSampler(seed=0),  # draws nothing, and costs the least
        )
        if self.setting.max_epochs is not None:
            self._study.set_user_attr(MAX_EPOCHS_ATTR, self.setting.max_epochs)
        self._paces = paces(len(self.curves), self.setting.speed_seed)

    def run(self) -> None:
        """Run all trials to their ends."""
        waiting = iter(self.rows)
        events = [(0.0, worker) for worker in range(self.setting.workers)]
        running: dict[int, _Run] = {}
        while events:
            now, worker = heapq.heappop(events)
            if worker in running and self._is_over(running[worker]):
                del running[worker]
            if worker not in running:
                row = next(waiting, None)
                if row is None:
                    continue
                running[worker] = _Run(row, self.curves[row], self._study.ask(), now, self._paces[row])
            heapq.heappush(events, (running[worker].next_at, worker))

    def _is_over(self, run: _Run) -> bool:
        """Report the next value and ask the pruner; returns whether the trial has ended."""
        curve, trial = run.curve, run.trial
        step = curve.steps[run.reports]
        trial.report(curve.values[run.reports], step)
        run.reports += 1
        last = run.reports == len(curve.steps)
        pruned = not (last and curve.diverged) and self._is_pruned(trial)
        if not pruned and not last:
            return False
        if pruned or not curve.whole:
            self._study.tell(trial, state=TrialState.PRUNED if pruned else curve.end)
        else:
            worst = self.setting.sign * math.inf
            self._study.tell(trial, curve.final if math.isfinite(curve.final) else worst)
        decision = Condemned.of(self._study.get_trials(deepcopy=False)[trial.number])
        self.ended[trial.number] = ReplayedTrial(
            run.row, step, pruned, None if decision is None else decision.alpha
        )
        return True

    def _is_pruned(self, trial: optuna.Trial) -> bool:
        began = time.perf_counter()
        pruned = bool(trial.should_prune())
        self.seconds.append(time.perf_counter() - began)
        return pruned


def paces(count: int, seed: int | None) -> list[float]:
    """Simulated time of an epoch, for each configuration [configurations]; 1 for all without a seed."""
    if seed is None:
        return [1.0] * count
    drawn: list[float] = np.exp(_DRIFT * np.random.default_rng(seed).standard_normal(count)).tolist()
    return drawn


# ---------------------------------------------------------------------------------------------------- the verdict


def _judged(
    curves: Sequence[RecordedRun], ended: list[ReplayedTrial], seconds: list[float], setting: Setting
) -> Replay:
    known = [each for each in ended if curves[each.row].whole]
    pruned = np.array([each.pruned for each in known])
    finals = setting.sign * np.array([curves[each.row].judged for each in known])
    finals[~np.isfinite(finals)] = math.inf
    finite = finals[np.isfinite(finals)]
    found, best = float(np.min(finals[~pruned], initial=math.inf)), float(finals.min())
    median = float(np.median(finite)) if finite.size else math.inf
    top = np.argsort(finals, kind="stable")[: math.ceil(_TOP * len(finals))]
    return Replay(
        trials=tuple(ended),
        epochs_used=sum(each.epochs for each in ended),
        epochs_in_all=sum(curves[each.row].epochs for each in ended),
        found=setting.sign * found,
        best=setting.sign * best,
        median=setting.sign * median,
        regret=regret(found, best, median),
        wrongly_pruned=int(np.sum(finals[pruned] < found)),
        top=len(top),
        top_pruned=int(np.sum(pruned[top])),
        audited=sum(each.audited for each in ended),
        alpha=next((each.alpha for each in reversed(ended) if each.alpha is not None), None),
        decision_s=statistics.median(seconds),
        slowest_decision_s=max(seconds),
    )


def regret(found: float, best: float, median: float) -> float:
    """(found - best) ÷ (median - best), where less is better; inf where the median is not finite or not worse."""
    if found == best:
        return 0.0
    return (found - best) / (median - best) if best < median < math.inf else math.inf
