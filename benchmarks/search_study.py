"""Simulates a study for search.py: strategies, and workers in virtual time on tasks with known curves."""

import heapq
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from search_tasks import Task, Trained, regret

from hpo.search.as_predicted import as_predicted
from hpo.search.curve_sampler import CurveGPSampler
from hpo.search.one_thread import one_thread
from hpo.search.per_trial import PerTrialSampler
from hpo.search.predicted_loss.pruner import PredictedLossPruner
from hpo.search.samplers import tpe_arguments
from hpo.search.schedulers.asha import Asha
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.freeze_thaw.mixture import Mixture
from hpo.search.schedulers.freeze_thaw.scheduler import FreezeThaw
from hpo.search.schedulers.freeze_thaw.study_view import StudyView
from hpo.search.schedulers.hyperband import Hyperband
from hpo.search.schedulers.scheduler import New, Next, Resume, Scheduler, Standing, Wait
from hpo.search.schedulers.seen import Seen
from hpo.storage.attributes import MAX_EPOCHS_ATTR

Floats = NDArray[np.float64]


class _Alone(Mixture):
    """`FreezeThaw` in which every trial is judged, and successive halving decides only without a model."""

    def _unjudged(self) -> None:
        return None

    def _granted(self) -> New | Resume | None:
        return self._model() or self._halving()


class ModelAlone(FreezeThaw):
    """`FreezeThaw` with only its model, without the mixture's other parts."""

    def next(self, standing: Standing) -> Next:
        """See `Scheduler`."""
        with one_thread():
            return _Alone(StudyView(standing, self.switch)).answer()


SCHEDULERS: Mapping[str, Callable[..., Scheduler]] = {
    "freeze_thaw": FreezeThaw,
    "model_alone": ModelAlone,
    "asha": Asha,
    "hyperband": Hyperband,
}
#: The value reported for a loss that is not finite, for samplers that refuse such values.
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
        """The epochs that the trial has finished."""
        return len(self.values)


@dataclass(frozen=True)
class Plan:
    """What a study has.

    Attributes:
        workers: How many train at a time.
        budget: Epochs that they train together.
        switch: Epochs of a trial that starting or resuming it takes, out of the same budget.
        trials: How many trials it has, where these are counted in place of epochs; None: any number.
        timed: Whether budget and switch are virtual seconds, the budget's of all workers together.
    """

    workers: int
    budget: int
    switch: float = 0.0
    trials: int | None = None
    timed: bool = False

    def switch_of(self, trained: Trained) -> float:
        """The cost of starting or resuming a trial, in its epochs."""
        return self.switch / trained.seconds if self.timed else self.switch


class Strategy(Protocol):
    """Decides what free workers train, and whether trials continue."""

    def free(self, trials: Sequence[Running], here: int | None) -> tuple[int | None, Mapping[str, Any]] | None:
        """The next work of a free worker: a paused trial's number, or None and new parameters; None: it waits.

        ``here`` is the trial that it has had last; None for one that has had none.
        """

    def report(self, trial: Running, value: float) -> bool:
        """Whether a trial continues after an epoch."""


class Scheduled:
    """A scheduler of hpo, which sees the study as in production."""

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
        """Whether the trial has not reached its grant's end."""
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
                switch=self._plan.switch_of(trial.trained),
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
            n_trials=self._plan.trials,
            n_epochs=None if self._plan.switch or self._plan.trials else self._plan.budget,
            state=self._state,
            here=None if here is None or trials[here].state != "paused" else here,
        )


class Sampled:
    """A sampler with a pruner: a pruned trial has ended."""

    def __init__(self, task: Task, sampler: optuna.samplers.BaseSampler, pruner: str, plan: Plan) -> None:
        self._task, self._plan = task, plan
        self._order = Encoding(task.space, task.conditions).names
        self._study = optuna.create_study(
            study_name=task.name, sampler=sampler, pruner=_pruner(pruner, task.horizon)
        )
        self._study.set_user_attr(MAX_EPOCHS_ATTR, task.horizon)
        self._trials: list[optuna.Trial] = []
        self.granted: tuple[int | None, str] = (None, "")

    def free(
        self,
        trials: Sequence[Running],
        here: int | None,  # noqa: ARG002
    ) -> tuple[int | None, Mapping[str, Any]] | None:
        """A new trial, if the study may have another one."""
        if self._plan.trials is not None and len(trials) >= self._plan.trials:
            return None
        trial = self._study.ask()
        for name in self._order:
            conditions = self._task.conditions.get(name, {})
            if all(trial.params.get(other) in values for other, values in conditions.items()):
                _suggest(trial, name, self._task.space[name])
        self._trials.append(trial)
        return None, trial.params

    def report(self, trial: Running, value: float) -> bool:
        """Whether the trial is not pruned."""
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
    """hpo's sampler of this name; `plain-NAME` is Optuna's own, with Optuna's defaults."""
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
    kind, given = _named(name)
    kinds: Mapping[str, tuple[Callable[..., optuna.pruners.BasePruner], dict[str, Any]]] = {
        "none": (optuna.pruners.NopPruner, {}),
        "median": (optuna.pruners.MedianPruner, {"n_startup_trials": 5, "n_warmup_steps": 5}),
        "hyperband": (optuna.pruners.HyperbandPruner, {"max_resource": horizon}),
        "predicted_loss": (PredictedLossPruner, {"max_epochs": horizon}),
    }
    if kind not in kinds:
        raise SystemExit(f"no pruner is named `{kind}`: there are {', '.join(kinds)}")
    make, arguments = kinds[kind]
    return make(**arguments | given)


def _named(text: str) -> tuple[str, dict[str, Any]]:
    """NAME,key=value,… as the name and the arguments."""
    name, *arguments = text.split(",")
    return name, {key: json.loads(value) for key, _, value in (each.partition("=") for each in arguments)}


def strategy_of(name: str, task: Task, seed: int, plan: Plan, earlier: Sequence[Seen] = ()) -> Strategy:
    """The strategy with this name on the command line; NAME,key=value sets arguments of a scheduler or pruner."""
    sampler, _, pruner = name.partition("+")
    kind, given = _named(sampler)
    if kind in SCHEDULERS:
        return Scheduled(task, SCHEDULERS[kind](**given), seed, plan, earlier)
    return Sampled(task, _sampler(sampler, task, seed), pruner or "none", plan)


#: Numbers of imported trials begin here.
_IMPORTED = 10**6
#: The seed of an earlier study is larger by this.
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
            self._used = now * self._plan.workers if self._plan.timed else self._used + 1
            value, true = float(trial.trained.seen[trial.done]), float(trial.trained.true[trial.done])
            trial.values[trial.done + 1] = value
            if math.isfinite(true):  # one that fails in the end is never the study's best, however well it stood
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
            switch = 0.0 if number == self._last[worker] else self._plan.switch_of(trial.trained)
            self._last[worker] = number
            self._used += 0.0 if self._plan.timed else switch
            heapq.heappush(self._events, (now + (1 + switch) * trial.trained.seconds, self._idle.pop(), number))
