"""Stores a trial's values while it trains: one after each epoch, and then the scheduler's decision about it.

With `Reports` the training waits for that; `LateReports` does it in a thread beside the training. Both keep the
same order: a value is stored before the scheduler is asked about it, and a decision before it is acted on. Where
the scheduler does not watch epochs, `GatheredReports` stores several values together.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, cast

import optuna

from hpo.search.schedulers.scheduler import Decision, Scheduler
from hpo.storage.attributes import PAUSE_AT_ATTR, PRUNED_ATTR
from hpo.storage.cache import StudyCache
from hpo.storage.grants import Extend, granted_until
from hpo.storage.lineage import inherited_epochs
from hpo.storage.optuna_private import id_of_trial, known_of, reports_of
from hpo.storage.settling import LOST

#: Seconds within which `GatheredReports` stores a value.
_LATEST: Final = 0.25
#: The key under which the epoch of each decision is stored; the first outranks the second.
_KEYS: Final = {Decision.STOP: PRUNED_ATTR, Decision.PAUSE: PAUSE_AT_ATTR}


class Reports:
    """Stores a trial's values, and asks the scheduler about them.

    The scheduler is not asked again about a step below the last one that was stored when the trial resumed. A
    decision to prune or to pause is stored before it is acted on. So it also holds for a trial that was lost in
    between: the trial trains up to the epoch of the decision, and ends or pauses there. A trial also pauses where
    its grant ends.

    Args:
        trial: The running trial; nothing else reports to it.
        metric: The metric to report.
        scheduler: The study's scheduler, which is asked after each epoch.
        extend: Called where the trial's grant ends. Without it the trial pauses there.
    """

    def __init__(
        self,
        trial: optuna.Trial,
        metric: str,
        scheduler: Scheduler,
        extend: Extend | None = None,
    ) -> None:
        self.metric = metric
        self._extend = extend
        self._trial = trial
        self._scheduler = scheduler
        self._asked = 0
        self._decided = Decision.CONTINUE
        self._decided_at = 0
        self._until: int | None = None
        self._resumed = False
        self._gathered: dict[int, float] = {}  # values not stored yet

    def resume(self, history: Sequence[Mapping[str, float]]) -> Decision:
        """Make the stored values equal to a history: store missing values, rewrite different ones.

        Args:
            history: The metrics of each finished epoch; an epoch without validation lacks the reported metric. The
                epochs that a fork has from its parent are not stored again.

        Returns:
            A decision of an earlier attempt, at an epoch in the history, that was not carried out.
        """
        # The first time, use what this process read when it took the trial; later, read the trial anew.
        again, self._resumed = self._resumed, True
        frozen = self._trial.storage.get_trial(id_of_trial(self._trial)) if again else known_of(self._trial)
        stored = dict(frozen.intermediate_values)
        self._until = granted_until(frozen)
        own = inherited_epochs(frozen)
        for step, metrics in enumerate(history[own:], start=own + 1):
            value = metrics.get(self.metric)
            if value is not None and (step not in stored or not _same(stored[step], value)):
                self._store(step, value)
        self._asked = max(stored, default=0) - 1
        self._decided = next((each for each, key in _KEYS.items() if key in frozen.user_attrs), Decision.CONTINUE)
        if self._decided is not Decision.CONTINUE:  # with a late decision, later epochs may be stored too
            self._decided_at = max([frozen.user_attrs[_KEYS[self._decided]], *stored])
        return self._due(len(history))

    def report(self, step: int, value: float, *, ask: bool) -> Decision:
        """Store a step's value, in place of an earlier one.

        Args:
            step: The number of finished epochs.
            value: The value of the metric.
            ask: Whether the scheduler may be asked about it, and whether the trial may pause where its grant ends.

        Returns:
            What the trial does now.
        """
        # If there is a decision, the checkpoint was from before its epoch, which the trial will reach again.
        undecided = self._decided is Decision.CONTINUE and step > self._asked
        decision = self._send(step, value, ask=ask and undecided)
        return self._due(step) if ask and decision is Decision.CONTINUE else decision

    def passed(self, step: int) -> Decision:
        """What the trial does after a step without a value."""
        return self._due(step)

    def finish(self) -> Decision:
        """Wait until all is stored; returns what the trial does then."""
        return Decision.CONTINUE

    def close(self) -> None:
        """Release what reporting needs, such as a thread; the next report gets it again."""

    def _catch_up(self) -> Decision:
        """Wait until nothing is being stored; returns what the trial does then."""
        return self.finish()

    def _due(self, step: int) -> Decision:
        if self._decided is not Decision.CONTINUE and step >= self._decided_at:
            return self._decided
        if self._until is None or step < self._until:
            return Decision.CONTINUE
        if (late := self._catch_up()) is not Decision.CONTINUE:
            return late
        granted = None if self._extend is None else self._extend(self._gathered)
        if granted is None:
            return Decision.PAUSE
        self._gathered = {}
        self._until = granted["until"]
        return Decision.CONTINUE if self._until is None or step < self._until else Decision.PAUSE

    def _send(self, step: int, value: float, *, ask: bool) -> Decision:
        self._store(step, value)
        decision = self._scheduler.decide(self._trial, step) if ask else Decision.CONTINUE
        if decision is not Decision.CONTINUE:
            self._trial.set_user_attr(_KEYS[decision], step)
        return decision

    def _store(self, step: int, value: float) -> None:
        # Not trial.report, which keeps the first value of a step and warns. As there, the value is also written to
        # the trial's own copy, which pruners read.
        trial = self._trial
        trial.storage.set_trial_intermediate_value(id_of_trial(trial), step, value)
        reports_of(trial)[step] = value


class _ReportsBeside(Reports):
    """Reports that are stored in a thread. An error is raised by the next call, with its own type."""

    _thread: ThreadPoolExecutor | None = None
    _under_way: Future[Decision] | None = None

    def finish(self) -> Decision:
        """Wait until all is stored; returns what the trial does then."""
        under_way, self._under_way = self._under_way, None
        return Decision.CONTINUE if under_way is None else under_way.result()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _begin(self, store: Callable[[], Decision]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="hpo-reports")
        self._under_way = self._thread.submit(store)


class LateReports(_ReportsBeside):
    """As `Reports`, but in a thread: a decision about a step is acted on at the next step.

    One step is stored at a time, so the training waits where the storage takes longer than an epoch.
    """

    def resume(self, history: Sequence[Mapping[str, float]]) -> Decision:
        """As of `Reports`; after a death, the scheduler is asked about the last epoch.

        The checkpoint of an epoch may be written before the scheduler has been asked about it.
        """
        decision = super().resume(history)
        value = history[-1].get(self.metric, math.nan) if history else math.nan
        own = len(history) > inherited_epochs(self._trial)
        if decision is Decision.CONTINUE and own and math.isfinite(value) and self._follows_a_death():
            return super()._send(len(history), value, ask=True)
        return decision

    def _follows_a_death(self) -> bool:
        storage = cast("StudyCache", self._trial.storage)
        *earlier, _ = storage.behind.attempts_of_trial(id_of_trial(self._trial))
        return bool(earlier) and earlier[-1].outcome == LOST

    def _send(self, step: int, value: float, *, ask: bool) -> Decision:
        """Begin to store a step's value and to ask about it; returns what to do because of the step before."""
        if (late := self.finish()) is not Decision.CONTINUE:
            self._store(step, value)
            return late
        self._begin(partial(super()._send, step, value, ask=ask))
        return Decision.CONTINUE


class GatheredReports(_ReportsBeside):
    """As `Reports`, for a scheduler that does not watch epochs: values of several epochs are stored together.

    A value is stored at most `_LATEST` seconds after its epoch, and before the trial pauses or ends. If the trial
    is killed before that, the values in its checkpoint are stored when it resumes: see `Reports.resume`.
    """

    def __init__(
        self,
        trial: optuna.Trial,
        metric: str,
        scheduler: Scheduler,
        extend: Extend | None = None,
    ) -> None:
        super().__init__(trial, metric, scheduler, extend)
        self._lock = threading.Lock()
        self._hurry = threading.Event()

    def report(self, step: int, value: float, *, ask: bool) -> Decision:
        """As of `Reports`; what was gathered is stored where the trial is to pause."""
        return self._settled(super().report(step, value, ask=ask))

    def passed(self, step: int) -> Decision:
        """As of `Reports`; what was gathered is stored where the trial is to pause."""
        return self._settled(super().passed(step))

    def _settled(self, decision: Decision) -> Decision:
        if decision is not Decision.CONTINUE:
            self.finish()
        return decision

    def finish(self) -> Decision:
        """Store the gathered values; returns CONTINUE."""
        self._catch_up()
        return self._store_gathered()

    def close(self) -> None:
        """End the thread."""
        self._hurry.set()
        super().close()

    def _send(self, step: int, value: float, *, ask: bool) -> Decision:  # noqa: ARG002 - nothing is asked
        reports_of(self._trial)[step] = value
        with self._lock:
            first = not self._gathered
            self._gathered[step] = value
        if first:
            self._store_soon()
        return Decision.CONTINUE

    def _store_soon(self) -> None:
        super().finish()  # it has taken what it stores, and is done in a moment
        self._hurry.clear()
        self._begin(self._store_late)

    def _catch_up(self) -> Decision:
        """Take back the values that the thread has not begun to store, and wait for the others."""
        gathered = self._take_gathered()
        self._hurry.set()
        super().finish()
        self._gathered = gathered
        return Decision.CONTINUE

    def _store_late(self) -> Decision:
        self._hurry.wait(_LATEST)
        return self._store_gathered()

    def _store_gathered(self) -> Decision:
        if gathered := self._take_gathered():
            storage = cast("StudyCache", self._trial.storage)
            storage.set_trial_intermediate_values(id_of_trial(self._trial), gathered)
        return Decision.CONTINUE

    def _take_gathered(self) -> dict[int, float]:
        with self._lock:
            gathered, self._gathered = self._gathered, {}
        return gathered


def _same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))
