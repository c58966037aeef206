"""Replays a finished study under other schedulers, on its stored curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from hpo.config.spec import StudySpec
from hpo.errors import StudyError
from hpo.search.replay import paces, regret
from hpo.search.schedulers.by_name import make_scheduler
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.scheduler import Scheduler, Standing
from hpo.search.schedulers.simulation import Known, Simulation
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome, outcome_of
from hpo.study.ranking import is_feasible
from hpo.study.replayable import Replayable, order_of, replayable
from hpo.study.standing import standing_of
from hpo.study.undeclared import refuse_what_needs_a_space

#: Outcomes of trials whose stored curve is complete.
_WHOLE: Final = (Outcome.COMPLETE, Outcome.DIVERGED)
#: Ends of trials that may be the best of their study.
_RESULTS: Final = (Outcome.COMPLETE, Outcome.PRUNED)
_FEWEST: Final = 2


@dataclass(frozen=True)
class Figures:
    """The result of one replay.

    Attributes:
        epochs_used: Epochs that it trained.
        found: The best value at any epoch that it trained, without trials that diverged or failed; not finite
            where there is none.
        regret: (found - best) ÷ (median - best): 0 where the best of all stored values was found, 1 at the median
            end (see `_Goal`); inf where nothing was found, or where the best was lost and there is no median.
        trials: Configurations that it started.
        grants: How often it granted a trial epochs.
        at_edge: Trials that it granted epochs that are not stored.
        decision_s: Median seconds of a decision.
        slowest_decision_s: Seconds of the slowest decision.
    """

    epochs_used: int
    found: float
    regret: float
    trials: int
    grants: int
    at_edge: int
    decision_s: float
    slowest_decision_s: float


class Stored:
    """Draws each configuration of a study once.

    Args:
        known: The configurations, in the order in which a sampler would draw them.
        standing: The study, for its search space.
    """

    def __init__(self, known: Sequence[Known], standing: Standing) -> None:
        self._left = list(known)
        self._encoding = Encoding(standing.space, standing.conditions)
        self._points = [self._features(each.params) for each in known]

    def draw(self, params: Mapping[str, Any] | None) -> Known:
        """The next configuration; for given parameters the nearest one left, all parameters weighted equally."""
        place = 0
        if params is not None:
            wanted = self._features(params)
            place = int(np.argmin([float(((point - wanted) ** 2).sum()) for point in self._points]))
        del self._points[place]
        return self._left.pop(place)

    def _features(self, params: Mapping[str, Any]) -> Any:
        return self._encoding.features(self._encoding.point(params)[None])[0]


def replay_schedulers(
    opened: OpenStudy,
    contestants: Mapping[str, StudySpec],
    *,
    orders: int,
    workers: int,
    epochs: int | None,
) -> dict[str, Any]:
    """Replay a study under several schedulers, on its stored curves.

    The curve of a trial that the study cut short ends there: if a scheduler grants the trial more, the trial ends
    and counts as at the edge. Where a scheduler proposes parameters, the nearest stored ones are used.

    Args:
        opened: The study.
        contestants: By the name to show, a study file with the scheduler to replay.
        orders: How many orders of the trials: the study's own, then random ones.
        workers: How many trials run at a time.
        epochs: How many epochs may be trained together; None: any number.

    Returns:
        Plain data: what the study did, and one entry per scheduler under ``schedulers``: means of `Figures`, and
        the largest regret.

    Raises:
        StudyError: Too little is stored.
    """
    known = replayable(opened)
    stored = _stored(known)
    goal = _Goal.of(opened, stored, known)
    found = {
        shown: [_replayed(opened, stored, spec, goal, order, workers, epochs) for order in range(orders)]
        for shown, spec in contestants.items()
    }
    return {
        "study": opened.spec.study.name,
        "trials": len(stored),
        "cut_short": sum(not each.whole for each in stored),
        "left_out": known.others,
        "epochs": sum(each.epochs for each in stored),
        "found": goal.sign * goal.best,
        "limit": epochs,
        "orders": orders,
        "workers": workers,
        "schedulers": [{"scheduler": shown, **_summed(figures)} for shown, figures in found.items()],
    }


def checked_scheduler(spec: StudySpec) -> Scheduler:
    """The scheduler of a study file, if it can be replayed.

    Raises:
        InputError: The scheduler can't be built with its arguments, needs a search space that the study has not
            declared, or forks trials.
    """
    refuse_what_needs_a_space(spec)
    scheduler = make_scheduler(spec)
    if scheduler.forks:
        raise spec.error(
            "can't be replayed: what a fork with other parameters would come to is in no stored curve",
            path="study.scheduler",
            value=spec.study.scheduler.name if spec.study.scheduler else None,
            fix="replay another one",
        )
    return scheduler


def _stored(known: Replayable) -> list[Known]:
    return [
        Known(
            trial.params,
            trial.intermediate_values,
            whole=outcome_of(trial) in _WHOLE,
            feasible=is_feasible(trial),
            counts=outcome_of(trial) in _RESULTS,
        )
        for trial in known.trials
    ]


@dataclass(frozen=True)
class _Goal:
    """The reference values of a regret, as losses: less is better.

    Attributes:
        sign: The factor that turns a value into a loss.
        best: The best of all stored values.
        median: The median of the last values of the whole trials, without diverged ones; of all trials where there
            is none, or it is the best; infinite where there is none either.
    """

    sign: int
    best: float
    median: float

    @classmethod
    def of(cls, opened: OpenStudy, stored: Sequence[Known], known: Replayable) -> _Goal:
        sign = 1 if opened.spec.study.direction == "minimize" else -1
        bests = [best for each in stored if math.isfinite(best := _least(each, each.epochs, sign))]
        if len(bests) < _FEWEST:
            name = opened.spec.study.name
            raise StudyError(
                f"the study {name} has fewer than {_FEWEST} complete or pruned trials with a finite value: "
                f"there is nothing to replay{known.aside}\n  fix: {known.fix('finish more trials')}"
            )
        # A study that pauses its trials may have no whole trial, or only its best one.
        medians = (_median(each, sign) for each in ([trial for trial in stored if trial.whole], stored))
        return cls(sign, min(bests), next((each for each in medians if min(bests) < each < math.inf), math.inf))


def _median(trials: Sequence[Known], sign: int) -> float:
    """The median of the finite last losses of those that have not diverged; infinite where there is none."""
    lasts = [sign * each.values[each.epochs] for each in trials if not each.diverged]
    return statistics.median([last for last in lasts if math.isfinite(last)] or [math.inf])


def _least(known: Known, done: int, sign: int) -> float:
    """The least loss up to an epoch; infinite where there is none, or the trial can't be the best of its study."""
    losses = [sign * value for epoch, value in known.values.items() if epoch <= done]
    return min(filter(math.isfinite, losses), default=math.inf) if known.feasible and known.counts else math.inf


def _replayed(
    opened: OpenStudy,
    stored: Sequence[Known],
    spec: StudySpec,
    goal: _Goal,
    order: int,
    workers: int,
    epochs: int | None,
) -> Figures:
    """One replay, in the order of this number."""
    speeds = paces(len(stored), order if workers > 1 else None)
    known = [replace(stored[row], pace=speeds[row]) for row in order_of(len(stored), order)]
    standing = _standing(opened, spec, order, workers, epochs, len(known))
    simulation = Simulation(checked_scheduler(spec), standing, Stored(known, standing).draw, workers)
    simulation.run()
    return _judged(simulation, goal)


def _standing(
    opened: OpenStudy, spec: StudySpec, order: int, workers: int, epochs: int | None, n_trials: int
) -> Standing:
    """The study before its first trial, with the imported ones."""
    now = standing_of(opened)
    imported = [replace(trial, number=number) for number, trial in enumerate(t for t in now.trials if t.imported)]
    return replace(
        now,
        read=lambda: imported,
        read_columns=None,
        horizon=now.horizon or spec.trial_epochs,
        seed=spec.seed + order,
        planned=workers,
        n_trials=n_trials,
        n_epochs=epochs,
        state={},
    )


def _judged(simulation: Simulation, goal: _Goal) -> Figures:
    trials = simulation.trials
    found = min((_least(trial.known, trial.done, goal.sign) for trial in trials), default=math.inf)
    return Figures(
        epochs_used=sum(trial.done for trial in trials),
        found=goal.sign * found,
        regret=regret(found, goal.best, goal.median),
        trials=len(trials),
        grants=sum(len(trial.kinds) for trial in trials),
        at_edge=sum(trial.at_edge for trial in trials),
        decision_s=statistics.median(simulation.seconds),
        slowest_decision_s=max(simulation.seconds),
    )


def _summed(figures: Sequence[Figures]) -> dict[str, Any]:
    """Means over the orders; the worst regret, and milliseconds of a decision."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(each, name) for each in figures)

    return {
        **{name: mean(name) for name in ("epochs_used", "found", "regret", "trials", "grants", "at_edge")},
        "worst_regret": max(each.regret for each in figures),
        "decision_ms": 1e3 * statistics.median(each.decision_s for each in figures),
        "slowest_decision_ms": 1e3 * max(each.slowest_decision_s for each in figures),
    }
