"""The interface of a scheduler: `Standing` is what it is shown, `Next` and `Decision` are its answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from statistics import median
from typing import Any, Final, Protocol

import numpy as np
import optuna
from optuna.distributions import BaseDistribution

from hpo.config.conditions import Condition
from hpo.search.schedulers import columns
from hpo.search.schedulers.columns import Columns, Flags, Integers, columns_of
from hpo.search.schedulers.seen import Seen, State

#: Minimum number of trials to measure the cost of a switch with; a cost below `_SHORT` epochs counts as 0.
_FEWEST: Final = 4
_SHORT: Final = 0.125


class Decision(Enum):
    """What a running trial does after an epoch."""

    CONTINUE = "continue"
    PAUSE = "pause"
    STOP = "stop"


@dataclass(frozen=True)
class Why:
    """Why a scheduler has granted a trial epochs; shown to people beside the trial.

    Attributes:
        kind: What decided, such as ``"initial"``, ``"promotion"`` or ``"model"``; each scheduler has its own.
        predicted: The predicted final value of the trial, in the metric's unit; None without a prediction.
        low: Lower end of that prediction's 80 % interval.
        high: Upper end of that interval.
        incumbent: The study's best value at that time; None: `Standing.incumbent` is filled in when the grant is
            stored.
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
        until: The epoch after which it pauses for the next decision; None: it trains to its end.
        why: The reason.
        state: The scheduler's own state for later decisions, as JSON; None: it stays as it is.
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
    """Start a new trial from a checkpoint of another trial, its parent, if the study's budget allows a trial.

    It begins with all that the parent had after an epoch at which the parent had paused: weights, optimizer state,
    history. The epochs before that are the parent's, and do not count against a budget again.

    Attributes:
        parent: The number of the parent.
        epoch: The epoch of the parent's checkpoint.
        params: The new trial's parameters, all of them.
        until: As of `New`, counted from the parent's beginning.
        why: As of `New`.
        state: As of `New`.
        replaces: The trial whose place the new one takes; if it is paused, it is pruned in the same transaction.
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
    """Start nothing now; later reports of the running trials may change that."""


Next = New | Resume | Fork | Wait


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A study at the moment of a decision.

    Attributes:
        read: Returns every trial, by number; called when `trials` is first asked for.
        space: Optuna's distribution of each parameter; a parameter comes after those that its conditions name.
        conditions: Parameter → other parameter → the other's values under which the parameter exists.
        where: Conditions that each point satisfies besides.
        horizon: Epochs of a whole trial; None where that is not known.
        longest: Upper bound of a trial's epochs, where trials differ in length; None where that is not known.
        minimize: Whether the metric is minimised.
        bounded: Whether the study has bounds; then a trial that was not measured yet is not known to be within.
        seed: The study's seed.
        planned: How many workers the study asks for.
        n_trials: How many trials the study may have, without imported ones; None: any number.
        n_epochs: How many epochs all trials may train together; None: any number.
        state: The state that the scheduler stored with its last decision; empty at first.
        granted: How many grants there had been when ``state`` was read; None: it was read together with `trials`.
        retries: How many failed trials had been retried before `trials` were read.
        here: The number of the paused trial in whose process the scheduler is asked, which can resume at no cost;
            None: the process has no trial.
        read_columns: Returns `columns` without reading trials; None: they are made from `trials`.
    """

    read: Callable[[], Sequence[Seen]]
    space: Mapping[str, BaseDistribution] = field(default_factory=dict)
    conditions: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    where: Sequence[Condition] = ()
    horizon: int | None = None
    longest: int | None = None
    minimize: bool = True
    bounded: bool = False
    seed: int = 0
    planned: int = 1
    n_trials: int | None = None
    n_epochs: int | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    granted: int | None = None
    retries: int = 0
    here: int | None = None
    read_columns: Callable[[], Columns] | None = None

    @cached_property
    def columns(self) -> Columns:
        """All trials as columns, for budgets and rungs."""
        if self.read_columns is None or "trials" in self.__dict__:
            return columns_of(self.trials, minimize=self.minimize)
        return self.read_columns()

    @cached_property
    def trials(self) -> Sequence[Seen]:
        """All trials by number, including imported ones."""
        return self.read()

    @cached_property
    def own(self) -> list[Seen]:
        """The trials that were not imported, by number."""
        return [trial for trial in self.trials if not trial.imported]

    @cached_property
    def running(self) -> list[Seen]:
        """The running trials of `own`, by number."""
        return [trial for trial in self.own if trial.state == "running"]

    @cached_property
    def workers(self) -> int:
        """How many workers there are at least: those planned, or the running trials plus the asking worker."""
        return max(self.planned, len(self.running) + 1)

    @cached_property
    def switch(self) -> float:
        """The cost of starting a trial, or of resuming any trial but `here`, in epochs that fit into that time.

        The median of the measured costs, rounded to a power of four so that a repeated study gets the same number.
        It is 0 where the median is below 1/8 or fewer than 4 trials were measured, and at most 16.
        """
        measured = [trial.switch for trial in self.own if trial.switch is not None]
        middle = median(measured) if len(measured) >= _FEWEST else 0.0
        return 4.0 ** min(round(math.log(middle, 4)), 2) if middle >= _SHORT else 0.0

    @cached_property
    def paused(self) -> list[Seen]:
        """The paused trials of `own`, by number."""
        return [trial for trial in self.own if trial.state == "paused"]

    @cached_property
    def incumbent(self) -> float | None:
        """The best value at any epoch of own trials within the bounds that did not diverge or fail, or None."""
        every = self.columns
        within = every.feasible & every.measured if self.bounded else every.feasible
        sound = every.finite & ~every.failed & ~every.diverged & ~np.isnan(every.best)
        bests = every.best[~every.imported & within & sound]
        return float(bests.min() if self.minimize else bests.max()) if len(bests) else None

    def is_within(self, trial: Seen) -> bool:
        """Whether a trial is known to keep to the study's bounds; True in a study without bounds."""
        return trial.feasible and (trial.measured or not self.bounded)

    @cached_property
    def decision(self) -> int:
        """The number of grants so far, which seeds the randomness of this decision."""
        return int(self.columns.grants[~self.columns.imported].sum())

    @cached_property
    def new_left(self) -> int | None:
        """New trials that the budget still allows; None for any number."""
        if self.n_trials is None:
            return None
        return max(0, self.n_trials - int(np.count_nonzero(~self.columns.imported)))

    @cached_property
    def epochs_left(self) -> int | None:
        """Epochs that no trial has trained or been granted; None for any number."""
        return None if self.n_epochs is None else max(0, self.n_epochs - int(self._claimed.sum()))

    @cached_property
    def takeable(self) -> Integers:
        """Numbers of the waiting trials that a worker may take.

        A trial with a grant may be taken if the budget covers some of it; others only while epochs are left.
        """
        waiting = self._own_in(columns.WAITING)
        if self.epochs_left == 0:
            waiting &= (self.columns.grants > 0) & ((self._due == 0) | (self._covered > 0))
        return self.columns.number[waiting]

    @cached_property
    def cut(self) -> tuple[int, int] | None:
        """The waiting trial whose grant the budget covers only in part, and the epoch up to which; else None.

        The grants of earlier trials come first, and those of later trials are not covered at all.
        """
        in_part = np.flatnonzero((self._covered > 0) & (self._covered < self._due))
        if not len(in_part):
            return None
        place = int(in_part[0])
        return int(self.columns.number[place]), int((self.columns.epochs + self._covered)[place])

    def count(self, state: State) -> int:
        """How many trials are in this state, without imported ones."""
        return int(np.count_nonzero(self._own_in(columns.STATES.index(state))))

    def epochs_of(self, number: int) -> int:
        """Epochs that a trial has finished; see `Seen.epochs`.

        Raises:
            ValueError: There is no such trial, or it was imported.
        """
        return int(self.columns.epochs[self._place(number)])

    def is_paused(self, number: int) -> bool:
        """Whether a trial is paused."""
        return bool(self.columns.state[self._place(number)] == columns.PAUSED)

    def _place(self, number: int) -> int:
        place = self.columns.place(number)
        if place is None or self.columns.imported[place]:
            raise ValueError(f"the scheduler resumes trial {number}, which is not there")
        return place

    def _own_in(self, state: int) -> Flags:
        mine: Flags = (self.columns.state == state) & ~self.columns.imported
        return mine

    @cached_property
    def _covered(self) -> Integers:
        """The part of `_due` that the budget covers; not all if it was lowered, or a failed trial was retried."""
        if self.n_epochs is None:
            return self._due
        left = self.n_epochs - int((self._claimed - self._due).sum())
        covered: Integers = np.clip(left - (np.cumsum(self._due) - self._due), 0, self._due)
        return covered

    @cached_property
    def _due(self) -> Integers:
        """Epochs that each waiting trial has been granted and has not trained yet; 0 for other trials."""
        every = self.columns
        waits = self._own_in(columns.WAITING) & (every.grants > 0)
        due: Integers = np.where(waits, self._claimed - (every.epochs - every.inherited), 0)
        return due

    @cached_property
    def _claimed(self) -> Integers:
        """Epochs of each trial that count against the budget: those trained, and those granted to it."""
        every = self.columns
        settled = (every.state == columns.PAUSED) | (every.state == columns.ENDED)
        settled |= (every.grants == 0) & (every.state != columns.RUNNING)
        granted = np.where(every.until == columns.NONE, self.horizon or self.longest or 0, every.until)
        epochs = every.epochs
        claimed = np.where(settled, epochs, np.maximum(epochs, granted)) - every.inherited
        counted: Integers = np.where(every.imported | every.taken_over, 0, claimed)
        return counted


def within_epochs(standing: Standing, step: Next) -> Next:
    """An answer, cut to the epochs that the study has left; `Wait` where none are left."""
    if isinstance(step, Wait) or standing.n_epochs is None:
        return step
    assert standing.epochs_left is not None
    if standing.epochs_left == 0:
        return Wait()
    goal = step.until or standing.horizon or standing.longest
    end = _epochs_before(standing, step) + standing.epochs_left
    return step if goal is not None and goal <= end else replace(step, until=end)


def _epochs_before(standing: Standing, step: New | Resume | Fork) -> int:
    """Epochs that a trial has finished where a grant begins."""
    if isinstance(step, New):
        return 0
    return step.epoch if isinstance(step, Fork) else standing.epochs_of(step.number)


class Scheduler(Protocol):
    """Decides which trials run, and for how long.

    Each worker, on any machine, has its own copy of the scheduler, and all copies must give the same answers. So a
    scheduler decides from the storage, and keeps nothing between two calls except what it can read again. It is
    sent to worker processes by pickle.

    An answer with an ``until``, or with parameters, is a *grant*. It is stored with the trial in the transaction
    that gives the trial to the worker. If another grant came first, the scheduler is asked again.

    Attributes:
        forks: Whether it forks trials. Then the checkpoints at the ends of grants are kept as long as a trial may
            be forked from them.
        reads_trials: Whether it uses `Standing.trials`, for which all curves are read; else `Standing.columns` has
            all that it needs.
    """

    @property
    def forks(self) -> bool:
        """See the class."""

    @property
    def reads_trials(self) -> bool:
        """See the class."""

    def watches(self, study: optuna.Study) -> bool:
        """Whether `decide` is to be called after each epoch; False: it would always return CONTINUE.

        If not, reports of several epochs are stored together, and an epoch's end costs almost nothing.
        """

    def decide(self, trial: optuna.Trial, step: int) -> Decision:
        """What a trial does after an epoch whose value it has reported, before the end of its grant.

        PAUSE and STOP end the trial's process after this epoch has been logged and checkpointed. A trial that has
        finished its last epoch, has diverged or stops early is not paused.

        Args:
            trial: The running trial.
            step: Epochs that it has finished.
        """

    def first(self, standing: Standing) -> int | None:
        """The epoch after which an enqueued trial pauses first; None: it trains to its end."""

    def next(self, standing: Standing) -> Next:
        """What a free worker does; also called where a grant ends, as that trial may continue without a pause.

        Waiting trials (requeued ones, initial trials) are taken first, whatever the answer. A `New` above the
        budget, or a `Wait` while no trial runs, means that nothing is left to do; where that is so for the whole
        study, its paused trials are stored as pruned.

        Args:
            standing: The study now.
        """
