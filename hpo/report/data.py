"""Reads a study for its report: defines StudyReport, with everything that the report's sections show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

import optuna
from optuna.trial import FrozenTrial

from hpo.config.schema_study import Direction
from hpo.report.causes import Cause, causes
from hpo.report.drawable import drawn_text, is_too_large, snapshot
from hpo.report.edges import Edge, edges
from hpo.report.grants import Kind, kinds
from hpo.report.importances import Importances, importances
from hpo.report.looks import thinned
from hpo.report.origin import origin
from hpo.report.timeline import Timeline, Work
from hpo.storage import ledger
from hpo.storage.attributes import WIDENED_ATTR
from hpo.storage.optuna_private import id_of_trial
from hpo.study.internals import wanted_metrics
from hpo.study.lineage import forks_by_replaced, one_of_each_lineage
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome, finite, outcome_of
from hpo.study.own_trials import own_trials
from hpo.study.pruning_summary import (
    ComparedPrediction,
    PredictionSummary,
    compared_predictions,
    summarize_predictions,
)
from hpo.study.ranking import best_of, is_ranked, ranked
from hpo.study.status import study_status
from hpo.study.timing import took


@dataclass(frozen=True)
class StudyReport:
    """The data of a study's report, read at one time.

    Attributes:
        status: The study's status, as `hpo status` shows it (`hpo.study.status.study_status`).
        goals: The direction of each metric that is optimised, the leading metric first.
        bounds: The constraints as in the study file, by metric.
        trials: The study's own trials, by number.
        ranked: The trials that can be among the best, the best first (`hpo.study.ranking.ranked`).
        best: The best trial, or the Pareto front of several goals.
        compared: Predictions with the values that the trials ended with.
        work: Every attempt at a trial.
        config: The config that the study was started with, without passwords.
        environment: The environment that was stored at the start; None if not known.
        scheduler: The name of the study's scheduler; None without one.
        wanted: Internal metrics that the study file asks for (`hpo.study.internals`).
        made: When the study was read, in UTC.
        widened: How the search space was widened since the start, as stored (`hpo.study.widened`).
    """

    status: Mapping[str, Any]
    goals: Mapping[str, Direction]
    bounds: Mapping[str, str]
    trials: Sequence[FrozenTrial]
    ranked: Sequence[FrozenTrial]
    best: Sequence[FrozenTrial]
    compared: Sequence[ComparedPrediction]
    work: Sequence[Work]
    config: Mapping[str, Any]
    environment: Mapping[str, Any] | None
    made: datetime
    widened: Sequence[Mapping[str, Any]] = ()
    scheduler: str | None = None
    wanted: frozenset[str] = frozenset()

    @property
    def metric(self) -> str:
        """The study's metric; with several objectives, the leading one."""
        return next(iter(self.goals))

    @property
    def direction(self) -> Direction:
        """The direction of `metric`."""
        return self.goals[self.metric]

    @property
    def several(self) -> bool:
        """Whether there are several objectives."""
        return len(self.goals) > 1

    @property
    def predictions(self) -> PredictionSummary:
        """A summary of the predictions' errors."""
        return summarize_predictions(self.compared)

    @cached_property
    def timeline(self) -> Timeline:
        """Which worker worked when."""
        return Timeline.of(self.work)

    @cached_property
    def causes(self) -> list[Cause]:
        """The causes of failures, the most frequent first."""
        return causes(self.trials, self.work)

    @cached_property
    def edges(self) -> list[Edge]:
        """Parameters whose best values lie at an end of their range."""
        return edges(self.unrelated)

    @cached_property
    def importances(self) -> Importances:
        """The importance of each parameter, computed with one trial of each lineage of forks; see `unrelated`."""
        complete = filter(is_ranked, self.ranked)
        return importances(one_of_each_lineage(complete, self.trials), self.goals)

    @cached_property
    def grants(self) -> list[Kind]:
        """The scheduler's grants by kind; empty without a scheduler."""
        return kinds(self.trials)

    @cached_property
    def forks(self) -> Mapping[int | None, FrozenTrial]:
        """The forks, by the number of the trial that each replaces."""
        return forks_by_replaced(self.trials)

    @cached_property
    def complete(self) -> list[FrozenTrial]:
        """The complete trials with finite values, including those outside the bounds, by number."""
        ended = (trial for trial in self.trials if outcome_of(trial) == Outcome.COMPLETE)
        return [trial for trial in ended if trial.values and all(map(math.isfinite, trial.values))]

    @cached_property
    def sample(self) -> list[FrozenTrial]:
        """The trials that the page lists, by number: of a large study the best, and a sample of the others."""
        return thinned(self.best_first(self.trials), MOST_TRIALS)

    @cached_property
    def complete_sample(self) -> list[FrozenTrial]:
        """The complete trials that are drawn as points, by number: sampled as in `sample`, plus each new best."""
        kept = {trial.number: trial for trial in thinned(self.by_rank, MOST_TRIALS)}
        first = len(self.ranked)
        for trial in self.complete:
            if self._places.get(trial.number, first) < first:
                first = self._places[trial.number]
                kept[trial.number] = trial
        return [kept[number] for number in sorted(kept)]

    @cached_property
    def escaped(self) -> optuna.Study:
        """The `complete_sample` as a study in memory, with names escaped for plotly.js."""
        return snapshot(self.complete_sample, self.goals, drawn_text)

    @cached_property
    def by_rank(self) -> list[FrozenTrial]:
        """The `complete` trials, the best first, those outside the bounds last; `ranked` also has paused ones."""
        return self.best_first(self.complete)

    def best_first(self, trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
        """These trials sorted: the ranked ones, the best first, then the others by number."""
        places = self._places
        return sorted(trials, key=lambda trial: (places.get(trial.number, len(places)), trial.number))

    @cached_property
    def _places(self) -> dict[int, int]:
        return {trial.number: place for place, trial in enumerate(self.ranked)}

    @cached_property
    def curves(self) -> list[FrozenTrial]:
        """The trials that have reported an epoch, sorted by `best_first`."""
        return self.best_first(trial for trial in self.trials if trial.intermediate_values)

    @cached_property
    def drawn_curves(self) -> list[FrozenTrial]:
        """The trials whose curves are drawn, by number."""
        return thinned(self.curves, MOST_CURVES)

    @property
    def too_large(self) -> bool:
        """Whether a value is too large to be drawn at its place."""
        curves = (trial.intermediate_values.values() for trial in self.drawn_curves)
        values = (trial.values for trial in self.complete)
        return any(is_too_large(value) for each in (*curves, *values) for value in each)

    @cached_property
    def params(self) -> list[str]:
        """The parameters of the complete trials, sorted by importance if known."""
        names = dict.fromkeys(name for trial in self.complete for name in trial.params)
        return [name for name in dict.fromkeys((*self.importances.shares, *names)) if name in names]

    @cached_property
    def partial(self) -> str:
        """A text about parameters that only some of the complete trials have; empty if there are none."""
        having = {name: sum(name in trial.params for trial in self.complete) for name in self.params}
        every = len(self.complete)
        said = (f"`{name}` is in {some} of {every} trials." for name, some in having.items() if some < every)
        return " ".join(said)

    def took(self, trial: FrozenTrial) -> float | None:
        """The seconds of all attempts at a trial, as in `hpo trials`; None while it runs or waits."""
        return took(trial, [each.end - each.start for each in self.work_at.get(trial.number, ())])

    @cached_property
    def work_at(self) -> dict[int, list[Work]]:
        """The attempts at each trial, by its number."""
        found: dict[int, list[Work]] = {}
        for each in self.work:
            found.setdefault(each.trial, []).append(each)
        return found

    @property
    def leaders(self) -> Sequence[FrozenTrial]:
        """The trials that the page shows in detail: the best five, or the whole Pareto front."""
        return self.best if self.several else self.ranked[:_LEADERS]

    @cached_property
    def unrelated(self) -> Sequence[FrozenTrial]:
        """The leaders with one trial of each lineage: of a trial and its forks, only the best one."""
        found = one_of_each_lineage(self.best if self.several else self.ranked, self.trials)
        return found if self.several else found[:_LEADERS]


_LEADERS: Final = 5
#: At most this many curves are drawn.
MOST_CURVES: Final = 300
#: At most this many trials are listed, and attempts drawn.
MOST_TRIALS: Final = 1000


def study_report(opened: OpenStudy) -> StudyReport:
    """Read a study from its storage."""
    study, trials = opened.spec.study, own_trials(opened)
    config, environment = origin(opened)
    numbers = {id_of_trial(trial): trial.number for trial in trials}
    with opened.storage.engine.connect() as conn:
        attempts = ledger.attempts(conn, opened.study_id)
    return StudyReport(
        status=study_status(opened, trials),
        goals=study.goals,
        bounds=study.constraints,
        trials=trials,
        ranked=ranked(trials, study.goals),
        best=best_of(trials, study.goals),
        compared=compared_predictions(trials),
        work=[Work.of(each, numbers[each.trial_id]) for each in attempts if each.trial_id in numbers],
        config=config,
        environment=environment,
        made=datetime.now(UTC),
        widened=opened.study.user_attrs.get(WIDENED_ATTR, ()),
        scheduler=None if study.scheduler is None else study.scheduler.name,
        wanted=wanted_metrics(opened.spec),
    )


def report_data(report: StudyReport) -> dict[str, Any]:
    """The page's numbers as plain data.

    Returns:
        The study's status as in `hpo status`, and ``predictions``, ``importances`` (by parameter; None without
        any, and then ``importances_missing`` says why), ``edges``, ``grants`` (by kind; empty without a
        scheduler), ``failures``, ``timeline`` and ``environment``.
    """
    kept = ("study", "n_trials", "epochs", "finished", "outcomes", "best", "code", "pruning")
    found: dict[str, Any] = {
        **{name: report.status[name] for name in kept},
        "predictions": {
            **asdict(report.predictions),
            "trials": [asdict(each) for each in report.compared],
        },
        "importances": report.importances.shares or None,
        "importances_missing": report.importances.missing,
        "edges": [{**asdict(each), "said": each.said} for each in report.edges],
        "grants": [asdict(each) for each in report.grants],
        "failures": [asdict(each) for each in report.causes],
        "timeline": report.timeline.totals(),
        "environment": report.environment,
    }
    plain: dict[str, Any] = finite(found)
    return plain
