"""The interface of a scheduler: what it is shown, and what it may answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from statistics import median
from typing import Any, Final, Literal, Protocol

import optuna
from optuna.distributions import BaseDistribution

from hpo.config.conditions import Condition

#: Trials by which the cost of a switch is measured, at least; a switch that takes less of an epoch costs nothing.
_FEWEST: Final = 4
_SHORT: Final = 0.125


class Decision(Enum):
    """What a running trial does after an epoch."""

    CONTINUE = "continue"
    PAUSE = "pause"
    STOP = "stop"


@dataclass(frozen=True)
class Why:
    """Why a scheduler has granted a trial epochs; people read it beside the trial.

    Attributes:
        kind: What decided, such as ``"initial"``, ``"promotion"`` or ``"model"``; each scheduler has its own.
        predicted: The value that the trial was expected to end at, in the metric's unit; None where nothing was.
        low: Lower end of that prediction's 80 % interval.
        high: Its upper end.
        incumbent: The study's best value at that time; None: what stores the grant fills in `Standing.incumbent`.
    """

    kind: str = ""
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    incumbent: float | None = None


@dataclass(frozen=True)
class New:
    """Start a new trial, if the study's budget allows one.

    Attributes:
        params: Its parameters, dotted path → value; None: the study's sampler draws them.
        until: The epoch after which it pauses, to be decided about again; None: it trains to its end.
        why: The reason.
        state: What the scheduler wants to be shown with later decisions, as JSON; None: what it is shown now.
    """

    params: Mapping[str, Any] | None = None
    until: int | None = None
    why: Why = Why()
    state: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Resume:
    """Resume a paused trial.

    Attributes:
        number: The trial.
        until: As of `New`.
        why: As of `New`.
        state: As of `New`.
    """

    number: int
    until: int | None = None
    why: Why = Why()
    state: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Fork:
    """Start a new trial from a checkpoint of another one, if the study's budget allows a trial.

    It begins with all that the other one had after an epoch at which that had paused: weights, optimizer state,
    history. Epochs before are the other's, and count against no budget again.

    Attributes:
        parent: The other trial.
        epoch: Epochs that it had finished there.
        params: The new trial's parameters, all of them.
        until: As of `New`, counted from the other trial's beginning.
        why: As of `New`.
        state: As of `New`.
        replaces: A trial in whose place it stands: where that is paused, it is pruned in the same transaction.
    """

    parent: int
    epoch: int
    params: Mapping[str, Any]
    until: int | None = None
    why: Why = Why()
    state: Mapping[str, Any] | None = None
    replaces: int | None = None


@dataclass(frozen=True)
class Wait:
    """Start nothing now: what the running trials report may change that."""


Next = New | Resume | Fork | Wait


@dataclass(frozen=True)
class Seen:
    """A trial as a scheduler sees it.

    Attributes:
        number: Its number.
        params: Dotted path → value; a parameter whose condition does not hold is left out.
        values: Finished epochs → the metric as it was reported after them; it may be NaN or infinite, and epochs
            may be left out.
        state: ``"waiting"`` for a worker, ``"running"``, ``"paused"`` or ``"ended"``.
        until: The epoch to which it has been granted; None: its end, or nothing was granted.
        kinds: `Why.kind` of each grant, the first one first; empty for a trial that was never granted anything.
        whole: It has trained to its end.
        imported: It was trained outside of the study: it counts against no budget.
        source: The study that it was imported from, perhaps of other data; None: none, or it is not known.
        feasible: It keeps to the study's bounds, as far as it was measured; else it can't be the best.
        inherited: Epochs at its beginning that another trial, its parent, has trained; it has no values there.
        replaces: The trial in whose place it was forked.
        switch: Epochs of its own that could be trained in the time that each of its starts and resumptions took;
            None where that was not measured.
    """

    number: int
    params: Mapping[str, Any]
    values: Mapping[int, float]
    state: Literal["waiting", "running", "paused", "ended"]
    until: int | None = None
    kinds: Sequence[str] = ()
    whole: bool = False
    imported: bool = False
    source: str | None = None
    feasible: bool = True
    inherited: int = 0
    replaces: int | None = None
    switch: float | None = None

    @property
    def epochs(self) -> int:
        """Epochs that it has finished, as far as they were reported, those of its parent included.

        One that has paused has had all of its grant, also where it reported nothing after the last epoch of it.
        """
        reported = max(self.values, default=self.inherited)
        return max(reported, self.until or 0) if self.state == "paused" else reported

    def best(self, pick: Callable[[Iterable[float]], float]) -> float | None:
        """The best finite value by ``pick``, min or max; None where there is none."""
        values: Collection[float] = self.values.values()
        if not math.isfinite(sum(values)):  # a sum is finite only where all of them are
            values = [value for value in values if math.isfinite(value)]
        return pick(values) if values else None


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A study at the moment of a decision.

    Attributes:
        read: Returns every trial, by number; called when `trials` is first asked for.
        space: Optuna's distribution of each parameter.
        conditions: Parameter → other parameter → the values of it under which it exists, for those that depend on
            others.
        where: What each point satisfies beside that.
        horizon: Epochs of a whole trial; None where that is not known.
        minimize: Whether the metric is to fall.
        seed: The study's.
        planned: How many workers the study asks for.
        n_trials: How many trials the study may have, imported ones aside; None: any number.
        n_epochs: How many epochs all its trials may train together; None: any number.
        state: What the scheduler has stored with an earlier decision; empty at first.
        here: The paused trial in whose process this is asked: it resumes at no cost. None: no trial is.
    """

    read: Callable[[], Sequence[Seen]]
    space: Mapping[str, BaseDistribution] = field(default_factory=dict)
    conditions: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    where: Sequence[Condition] = ()
    horizon: int | None = None
    minimize: bool = True
    seed: int = 0
    planned: int = 1
    n_trials: int | None = None
    n_epochs: int | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    here: int | None = None

    @cached_property
    def trials(self) -> Sequence[Seen]:
        """Every trial, by number; imported ones among them."""
        return self.read()

    @cached_property
    def own(self) -> list[Seen]:
        """The trials that were not imported, by number."""
        return [trial for trial in self.trials if not trial.imported]

    @cached_property
    def running(self) -> list[Seen]:
        """Those that a worker has, by number."""
        return [trial for trial in self.own if trial.state == "running"]

    @cached_property
    def workers(self) -> int:
        """How many workers there are at least: those that are planned, or those that run a trial and who asks."""
        return max(self.planned, len(self.running) + 1)

    @cached_property
    def switch(self) -> float:
        """Epochs that could be trained in the time that starting a trial, or resuming any but `here`, takes.

        The median of those that were measured, to a power of four, so that a study that is run again comes to the
        same; 0 below an eighth and where few were measured, and 16 at most.
        """
        measured = [trial.switch for trial in self.own if trial.switch is not None]
        middle = median(measured) if len(measured) >= _FEWEST else 0.0
        return 4.0 ** min(round(math.log(middle, 4)), 2) if middle >= _SHORT else 0.0

    @cached_property
    def paused(self) -> list[Seen]:
        """Those that are paused, by number."""
        return [trial for trial in self.own if trial.state == "paused"]

    @cached_property
    def incumbent(self) -> float | None:
        """The best value at any epoch of a trial that keeps to the bounds; None before the first."""
        pick = min if self.minimize else max
        bests = (trial.best(pick) for trial in self.own if trial.feasible)
        return pick((best for best in bests if best is not None), default=None)

    @cached_property
    def decision(self) -> int:
        """How many grants there have been: the number of this decision, from which its randomness comes."""
        return sum(len(trial.kinds) for trial in self.own)

    @cached_property
    def new_left(self) -> int | None:
        """New trials that the budget still allows; None for any number."""
        return None if self.n_trials is None else max(0, self.n_trials - len(self.own))

    @cached_property
    def epochs_left(self) -> int | None:
        """Epochs that no trial has trained or been granted; None for any number."""
        return None if self.n_epochs is None else max(0, self.n_epochs - sum(map(self.claimed, self.own)))

    def numbered(self, number: int) -> Seen:
        """One of the trials that were not imported.

        Raises:
            ValueError: It is not there.
        """
        for trial in self.own:
            if trial.number == number:
                return trial
        raise ValueError(f"the scheduler resumes trial {number}, which is not there")

    def claimed(self, trial: Seen) -> int:
        """Epochs of a trial that count against the budget: those it has trained, and those it may still train."""
        if trial.state in ("paused", "ended") or not (trial.kinds or trial.state == "running"):
            return trial.epochs - trial.inherited
        granted = self.horizon if trial.until is None else trial.until
        return max(trial.epochs, granted or 0) - trial.inherited


def within_epochs(standing: Standing, step: Next) -> Next:
    """An answer, cut to the epochs that the study has left; `Wait` where it has none."""
    if isinstance(step, Wait) or standing.n_epochs is None:
        return step
    assert standing.epochs_left is not None
    if standing.epochs_left == 0:
        return Wait()
    goal, end = step.until or standing.horizon, _epochs_before(standing, step) + standing.epochs_left
    return step if goal is not None and goal <= end else replace(step, until=end)


def _epochs_before(standing: Standing, step: New | Resume | Fork) -> int:
    """Epochs that lie behind a trial where a grant begins."""
    if isinstance(step, New):
        return 0
    return step.epoch if isinstance(step, Fork) else standing.numbered(step.number).epochs


class Scheduler(Protocol):
    """Decides which trials run, and for how long.

    Workers on several machines ask their own copies of one scheduler, and must come to the same answers: a
    scheduler decides from what the study stores, and keeps nothing between two calls but what it can read again.
    It is sent to worker processes by pickle.

    An answer with an ``until``, or with parameters, is a *grant*: it is stored with the trial in the transaction
    that gives the trial to the worker, unless another grant came in between; then the scheduler is asked again.

    Attributes:
        forks: Whether it forks trials. Then the checkpoints where grants have ended stay as long as a trial may be
            forked from them.
    """

    @property
    def forks(self) -> bool:
        """See the class."""

    def watches(self, study: optuna.Study) -> bool:
        """Whether `decide` is to be asked after each epoch; False: it would always say CONTINUE.

        Where it is not, reports of several epochs are stored together, and an epoch's end costs next to nothing.
        """

    def decide(self, trial: optuna.Trial, step: int) -> Decision:
        """What a trial does after an epoch whose value it has reported, below the end of its grant.

        PAUSE and STOP end the trial's process after this epoch has been logged and checkpointed. A trial that has
        had its last epoch, has diverged or stops early is not paused.

        Args:
            trial: The running trial.
            step: Epochs that it has finished.
        """

    def first(self, standing: Standing) -> int | None:
        """The epoch after which a trial that a person has enqueued pauses first; None: it trains to its end."""

    def next(self, standing: Standing) -> Next:
        """What a free worker does; also asked where a grant ends, when that trial may train on without a pause.

        Trials that wait (requeued ones, initial trials) are taken first, with any answer. A `New` above the
        budget, and a `Wait` while no trial runs, mean that nothing is left to do; where that is so for the whole
        study, its paused trials are stored as pruned.

        Args:
            standing: The study now.
        """
