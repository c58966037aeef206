"""Reconstructs what happens in a study from its database: a driver, which has no workers of its own, gets the
messages that workers send to a supervisor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from optuna.trial import FrozenTrial, TrialState

from hpo.execution.messages import EpochsEnded, Extended, Message, Started
from hpo.storage import ledger
from hpo.storage.attributes import IMPORTED_ATTR, MAX_EPOCHS_ATTR, REASON_ATTR, SAME_AS_ATTR
from hpo.storage.grants import grants_of
from hpo.storage.ledger import Attempt, Lease
from hpo.storage.lineage import epochs_reached, inherited_epochs
from hpo.storage.pausing import pruned_at_end
from hpo.storage.settling import LOST, STOPPED, Settled
from hpo.storage.trial_rows import TrialRow
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome, finite, outcome_of, unclaimed
from hpo.study.own_trials import trial_value
from hpo.trial.report import TrialReport
from hpo.wording import never_asked, paused_at_end, same_as

_READ: Final = frozenset(state for state in TrialState if state != TrialState.WAITING)

#: The sender (``worker@host``) and the message.
Said = tuple[str, Message | Settled]


@dataclass(frozen=True)
class _Held:
    """An attempt that was seen running.

    Attributes:
        label: Its worker.
        attempt: Its number.
        step: The last epoch that has been reported as reached; epochs of a fork's parent count.
        grants: How many grants have been reported.
    """

    label: str
    attempt: int
    step: int
    grants: int


class Observer:
    """Looks at a study again and again, and reports what has changed in between.

    The start of an attempt that begins and ends between two looks is not reported; every end of a trial is.

    Args:
        opened: The study. What happened before this object was made is not reported.
    """

    def __init__(self, opened: OpenStudy) -> None:
        self._opened = opened
        self._last_id = -1
        self._unfinished: set[int] = set()
        self._change = opened.storage.latest_change(opened.study_id)
        self._held: dict[int, _Held] = {}
        for row, trial, lease in self._changed(frozenset({TrialState.RUNNING})):
            self._note(row)
            if trial is not None and lease is not None:
                self._held[row.trial_id] = _held(trial, lease)

    def look(self) -> Iterator[Said]:
        """What has happened since the last look."""
        for row, trial, lease in self._changed(_READ):
            held, said = self._seen(row, trial, lease)  # if the database is away, the next look reports it
            self._note(row)
            if held is None:
                self._held.pop(row.trial_id, None)
            else:
                self._held[row.trial_id] = held
            yield from said

    def _seen(
        self, row: TrialRow, trial: FrozenTrial | None, lease: Attempt | None
    ) -> tuple[_Held | None, list[Said]]:
        """The trial's current attempt, if it runs, and what has happened to the trial."""
        held = self._held.get(row.trial_id)
        if row.state == TrialState.RUNNING and row.pause is None:
            if trial is None or lease is None:
                return held, []
            now = _held(trial, lease)
            return now, list(self._running(trial, lease, held, now))
        if trial is not None and (held is not None or row.state.is_finished()):
            return None, [self._ended(row, trial)]
        return None, [] if held is None else [(held.label, self._given_up(row.trial_id, row.number, held))]

    def _changed(
        self, states: frozenset[TrialState]
    ) -> Iterator[tuple[TrialRow, FrozenTrial | None, Attempt | None]]:
        """Trials that have changed or may change at any time; those in ``states`` are read whole."""
        storage, study_id = self._opened.storage, self._opened.study_id
        with storage.engine.connect() as conn:  # leases first: a trial that ends in between is seen as ended
            leases = {each.trial_id: each.lease for each in ledger.running_trials(conn, study_id)}
        self._change, changed = storage.changes_since(study_id, self._change)
        self._unfinished |= changed  # kept until they are noted: the database may go away before that
        rows, trials = storage.read_changes(study_id, after=self._last_id, among=self._unfinished, states=states)
        whole = {trial.number: trial for trial in trials}
        for row in rows:
            trial = whole.get(row.number)
            if trial is None or IMPORTED_ATTR not in trial.system_attrs:
                yield row, trial, leases.get(row.trial_id)
            else:
                self._note(row)

    def _note(self, row: TrialRow) -> None:
        self._last_id = max(self._last_id, row.trial_id)
        if row.state.is_finished() or row.pause is not None:
            self._unfinished.discard(row.trial_id)
        else:
            self._unfinished.add(row.trial_id)

    def _running(self, trial: FrozenTrial, lease: Attempt, held: _Held | None, now: _Held) -> Iterator[Said]:
        """What has happened since ``held`` to a trial that runs ``now``."""
        if held is not None and held.attempt != now.attempt:
            yield held.label, self._given_up(lease.trial_id, trial.number, held)
            held = None
        if held is None:  # epochs so far are those of earlier attempts, if there were any, or else its parent's
            step = now.step if now.attempt > 1 else inherited_epochs(trial)
            held = replace(now, step=step)
            yield now.label, Started(trial.number, Lease(*lease[:2]), 0.0, step, grants_of(trial))
        if now.grants > held.grants:
            yield now.label, Extended(trial.number, grants_of(trial))
        if now.step > held.step:
            yield now.label, self._epochs(trial, held.step + 1, now.step)

    def _epochs(self, trial: FrozenTrial, first: int, last: int) -> EpochsEnded:
        found = (trial.intermediate_values.get(step) for step in range(first, last + 1))
        values = tuple(finite(value) for value in found)
        return EpochsEnded(trial.number, first, values, self._opened.study.user_attrs.get(MAX_EPOCHS_ATTR) or 0)

    def _ended(self, row: TrialRow, trial: FrozenTrial) -> Said:
        """The report that a trial has ended or paused."""
        last = self._attempt(row.trial_id)
        label, seconds = (_label(last), last.seconds) if last else ("", 0.0)
        if (epoch := pruned_at_end(trial)) is not None:
            return label, Settled(trial.number, 0, TrialState.PRUNED, Outcome.PRUNED, paused_at_end(epoch))
        paused = row.pause is not None
        outcome = None if paused else Outcome(outcome_of(trial))
        reason = _reason(trial)
        if outcome == Outcome.LOST:
            return label, Settled(trial.number, last.attempt if last else 0, TrialState.FAIL, outcome, reason)
        value, epochs = trial_value(self._opened, trial), epochs_reached(trial)
        params, bounded = trial.params, bool(trial.constraints)
        return label, TrialReport(
            trial.number, outcome, value, epochs, seconds, reason, params, paused, bounded=bounded
        )

    def _given_up(self, trial_id: int, number: int, held: _Held) -> TrialReport | Settled:
        """The report that an attempt has ended and its trial has not."""
        ended = self._attempt(trial_id, held.attempt)
        outcome, reason, seconds = (ended.outcome, ended.reason, ended.seconds) if ended else (None, None, 0.0)
        if outcome in (LOST, STOPPED):
            return Settled(number, held.attempt, TrialState.WAITING, outcome, reason or "")
        return TrialReport(number, None, None, held.step, seconds, reason or "")

    def _attempt(self, trial_id: int, number: int | None = None) -> Attempt | None:
        """One of a trial's attempts; without a number, the last one."""
        with self._opened.storage.engine.connect() as conn:
            found = ledger.attempts_of_trial(conn, trial_id)
        return next((each for each in reversed(found) if number in (None, each.attempt)), None)


def _reason(trial: FrozenTrial) -> str:
    """The reason that a worker on this machine would report with a trial's outcome."""
    if SAME_AS_ATTR in trial.user_attrs:
        return same_as(trial.user_attrs[SAME_AS_ATTR])
    if outcome_of(trial) == Outcome.COMPLETE:
        return never_asked(unclaimed(trial))
    return str(trial.user_attrs.get(REASON_ATTR, "")) if trial.state == TrialState.FAIL else ""


def _label(attempt: Attempt) -> str:
    return f"{attempt.worker}@{attempt.host}"


def _held(trial: FrozenTrial, lease: Attempt) -> _Held:
    return _Held(_label(lease), lease.attempt, epochs_reached(trial), len(grants_of(trial)))
