"""The interface of a scheduler, and what it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Protocol

import optuna
from optuna.trial import FrozenTrial, TrialState

from hpo.storage.attributes import BUDGET_ATTR, IMPORTED_ATTR
from hpo.storage.pausing import paused_at


class Decision(Enum):
    """What a running trial does after an epoch."""

    CONTINUE = "continue"
    PAUSE = "pause"
    STOP = "stop"


@dataclass(frozen=True)
class New:
    """Start a new trial, if the study's budget allows one."""


@dataclass(frozen=True)
class Resume:
    """Resume a paused trial.

    Attributes:
        number: The trial.
    """

    number: int


@dataclass(frozen=True)
class Wait:
    """Start nothing now: what the running trials report may change that."""


Next = New | Resume | Wait


class Standing:
    """The study's own trials at one moment; they are read when one of these is first asked for.

    Args:
        study: The study.
    """

    def __init__(self, study: optuna.Study) -> None:
        self.study = study

    @cached_property
    def trials(self) -> list[FrozenTrial]:
        """All of them, by number; trials imported from other studies are left out."""
        trials = self.study.get_trials(deepcopy=False)
        return [trial for trial in trials if IMPORTED_ATTR not in trial.system_attrs]

    @cached_property
    def running(self) -> list[FrozenTrial]:
        """Those that a worker has, by number."""
        return [each for each in self.trials if each.state == TrialState.RUNNING and paused_at(each) is None]

    @cached_property
    def paused(self) -> list[FrozenTrial]:
        """Those that are paused, by number; `hpo.storage.pausing.paused_at` has their epoch."""
        return [each for each in self.trials if paused_at(each) is not None]

    @cached_property
    def left(self) -> int | None:
        """New trials that the budget still allows; None for any number."""
        budget = self.study.user_attrs.get(BUDGET_ATTR)
        return None if budget is None else max(0, int(budget) - len(self.trials))


class Scheduler(Protocol):
    """Decides which trials run, and for how long.

    Workers on several machines ask their own copies of one scheduler, and must come to the same answers: a
    scheduler decides from what the study stores, and keeps nothing between two calls but what it can read again.
    It is sent to worker processes by pickle.
    """

    def decide(self, trial: optuna.Trial, step: int) -> Decision:
        """What a trial does after an epoch whose value it has reported.

        PAUSE and STOP end the trial's process after this epoch has been logged and checkpointed. A trial that has
        had its last epoch, has diverged or stops early is not paused.

        Args:
            trial: The running trial.
            step: Epochs that it has finished.
        """

    def next(self, standing: Standing) -> Next:
        """What a free worker does.

        Trials that wait (requeued ones, initial trials) are taken first, with any answer. A `New` above the
        budget, and a `Wait` while no trial runs, mean that nothing is left to do; where that is so for the whole
        study, its paused trials are stored as pruned.

        Args:
            standing: The study's trials now.
        """
