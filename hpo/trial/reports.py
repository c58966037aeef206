"""What a trial stores while it trains: a value after each epoch, and what the scheduler decides about it.

`Reports` does so while the training waits, `LateReports` beside it. Both keep the same order: a value is stored
before the scheduler is asked about it, and a decision before it is acted on.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import optuna

from hpo.search.schedulers.scheduler import Decision, Scheduler
from hpo.storage.attributes import PRUNED_ATTR
from hpo.storage.optuna_private import id_of_trial, reports_of


class Reports:
    """Stores a trial's values, and asks the scheduler.

    Args:
        trial: The running trial.
        scheduler: The study's.
    """

    def __init__(self, trial: optuna.Trial, scheduler: Scheduler) -> None:
        self._trial = trial
        self._scheduler = scheduler

    def store(self, step: int, value: float) -> None:
        """Store a step's value, in place of an earlier one."""
        # Not trial.report: that keeps the first value of a step, with a warning. As it does, the value goes
        # into the trial's own copy too, which is what pruners are shown.
        trial = self._trial
        trial.storage.set_trial_intermediate_value(id_of_trial(trial), step, value)
        reports_of(trial)[step] = value

    def send(self, step: int, value: float, *, ask: bool) -> bool:
        """Store a step's value and ask about it; whether the trial is to be pruned now."""
        self.store(step, value)
        if not ask or self._scheduler.decide(self._trial, step) is not Decision.STOP:
            return False
        self._trial.set_user_attr(PRUNED_ATTR, step)
        return True

    def finish(self) -> bool:
        """Wait for what is under way; whether the trial is to be pruned by that."""
        return False

    def close(self) -> None:
        """Give up what reporting needs; the next report takes it again."""


class LateReports(Reports):
    """As `Reports`, but in a thread of its own: what is said about a step is acted on with the next.

    One step is under way at a time, so the training waits where the storage takes longer than an epoch. Errors
    come out of the next call, with their type.

    Args:
        trial: The running trial; nobody else reports to it.
        scheduler: The study's.
    """

    def __init__(self, trial: optuna.Trial, scheduler: Scheduler) -> None:
        super().__init__(trial, scheduler)
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[bool] | None = None

    def send(self, step: int, value: float, *, ask: bool) -> bool:
        """Begin to store a step's value and to ask about it; whether to prune by the step before."""
        if self.finish():
            self.store(step, value)
            return True
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="hpo-reports")
        self._under_way = self._thread.submit(super().send, step, value, ask=ask)
        return False

    def finish(self) -> bool:
        """Wait for what is under way; whether the trial is to be pruned by that."""
        under_way, self._under_way = self._under_way, None
        return under_way is not None and under_way.result()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
