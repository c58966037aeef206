"""What a session stores while a trial trains: a value after each epoch, and what the scheduler decides about it.

`Reports` does so while the training waits, `LateReports` beside it. Both keep the same order: a value is stored
before the scheduler is asked about it, and a decision before it is acted on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import optuna

from hpo.search.schedulers.scheduler import Decision, Scheduler
from hpo.storage.attributes import PRUNED_ATTR
from hpo.storage.optuna_private import id_of_trial, reports_of


class Reports:
    """Stores a trial's values, and asks the scheduler.

    A step that the storage already held below its last one when the trial was resumed was asked about then, and is
    not again. A decision to prune is stored before it is acted on, so it holds for a trial that was lost in
    between: that one trains up to the epoch it was pruned at, and ends.

    Args:
        trial: The running trial; nothing else reports to it.
        metric: The metric to report.
        scheduler: The study's; it is asked after each epoch.
    """

    def __init__(self, trial: optuna.Trial, metric: str, scheduler: Scheduler) -> None:
        self.metric = metric
        self._trial = trial
        self._scheduler = scheduler
        self._asked = 0
        self._decided: int | None = None

    def resume(self, history: Sequence[Mapping[str, float]]) -> bool:
        """Bring the storage to a history: send what it lacks, rewrite what differs.

        Args:
            history: The metrics of each finished epoch; one that was not validated lacks the reported metric.

        Returns:
            Whether an earlier attempt has decided to prune the trial at an epoch that the history holds.
        """
        frozen = self._trial.storage.get_trial(id_of_trial(self._trial))
        stored = frozen.intermediate_values
        for step, metrics in enumerate(history, start=1):
            value = metrics.get(self.metric)
            if value is not None and (step not in stored or not _same(stored[step], value)):
                self._store(step, value)
        self._asked = max(stored, default=0) - 1
        self._decided = frozen.user_attrs.get(PRUNED_ATTR)
        if self._decided is not None:  # a late decision was reported past
            self._decided = max(self._decided, *stored)
        return self._is_due(len(history))

    def report(self, step: int, value: float, *, ask: bool) -> bool:
        """Store a step's value, in place of an earlier one.

        Args:
            step: The number of finished epochs.
            value: The metric's.
            ask: Whether the scheduler may be asked about it.

        Returns:
            Whether the trial is to be pruned now.
        """
        # With a decision the checkpoint lay before the epoch of it: the trial gets there again, and ends.
        ask = ask and self._decided is None and step > self._asked
        return self._send(step, value, ask=ask) or self._is_due(step)

    def finish(self) -> bool:
        """Wait for what is under way; whether the trial is to be pruned by that."""
        return False

    def close(self) -> None:
        """Give up what reporting needs; the next report takes it again."""

    def _is_due(self, step: int) -> bool:
        return self._decided is not None and step >= self._decided

    def _send(self, step: int, value: float, *, ask: bool) -> bool:
        self._store(step, value)
        if not ask or self._scheduler.decide(self._trial, step) is not Decision.STOP:
            return False
        self._trial.set_user_attr(PRUNED_ATTR, step)
        return True

    def _store(self, step: int, value: float) -> None:
        # Not trial.report: that keeps the first value of a step, with a warning. As it does, the value goes
        # into the trial's own copy too, which is what pruners are shown.
        trial = self._trial
        trial.storage.set_trial_intermediate_value(id_of_trial(trial), step, value)
        reports_of(trial)[step] = value


class LateReports(Reports):
    """As `Reports`, but in a thread of its own: what is decided about a step is acted on with the next.

    One step is under way at a time, so the training waits where the storage takes longer than an epoch. Errors
    come out of the next call, with their type.

    Args:
        trial: The running trial; nothing else reports to it.
        metric: The metric to report.
        scheduler: The study's; it is asked after each epoch.
    """

    def __init__(self, trial: optuna.Trial, metric: str, scheduler: Scheduler) -> None:
        super().__init__(trial, metric, scheduler)
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[bool] | None = None

    def finish(self) -> bool:
        """Wait for what is under way; whether the trial is to be pruned by that."""
        under_way, self._under_way = self._under_way, None
        return under_way is not None and under_way.result()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _send(self, step: int, value: float, *, ask: bool) -> bool:
        """Begin to store a step's value and to ask about it; whether to prune by the step before."""
        if self.finish():
            self._store(step, value)
            return True
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="hpo-reports")
        self._under_way = self._thread.submit(super()._send, step, value, ask=ask)
        return False


def _same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))
