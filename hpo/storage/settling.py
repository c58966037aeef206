"""What becomes of a trial whose owner is gone: its attempt is ended, and it waits to resume, or fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, cast

import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.storage import ledger
from hpo.storage.attributes import OUTCOME_ATTR, REASON_ATTR, RETRIED_ATTR, TRACEBACK_ATTR, WORKER_ATTR
from hpo.storage.optuna_private import TRIAL_USER_ATTRS, models, set_user_attr
from hpo.storage.pausing import lock_paused
from hpo.storage.study_storage import StudyStorage

if TYPE_CHECKING:
    from sqlalchemy import orm

LOST: Final = "lost"
STOPPED: Final = "stopped"


@dataclass(frozen=True)
class Verdict:
    """What is stored about an attempt that its owner can't end itself.

    Attributes:
        outcome: ``lost`` counts against ``max_retries``; ``stopped`` (we ended the process ourselves) does not;
            with ``final``, the trial's outcome.
        reason: Why, for people.
        final: The trial fails, however many retries are left.
    """

    outcome: str
    reason: str
    final: bool = False


GONE: Final = Verdict(LOST, "its process is gone")


#: Called with a trial's number and an attempt; see `hpo.study.folders.stop_note`.
StopNote = Callable[[int, int], str | None]


def no_note(_number: int, _attempt: int) -> None:
    """A `StopNote` for studies without notes."""
    return


@dataclass(frozen=True)
class Settled:
    """A trial that was taken back from its owner, or pruned at the study's end because it was paused.

    Attributes:
        number: The trial.
        attempt: The attempt that ended; 0 if the trial had no lease.
        state: WAITING to resume, FAIL, or PRUNED for one that was paused.
        outcome: The attempt's outcome; for a failed trial, the trial's.
        reason: Why, for people.
    """

    number: int
    attempt: int
    state: TrialState
    outcome: str
    reason: str


#: Called with each trial as soon as it is settled: the database may go away before the next one is.
Hear = Callable[[Settled], None]


def not_heard(_settled: Settled) -> None:
    """A `Hear` for callers that need only the returned list."""


def settle_all(
    storage: StudyStorage,
    trials: Iterable[ledger.RunningTrial],
    verdict: Verdict,
    max_retries: int,
    stop_note: StopNote,
    heard: Hear,
    *,
    dry_run: bool = False,
) -> list[Settled]:
    """Take trials back from their owners, one transaction each; see `hpo.storage.recovery.requeue_dead`.

    Returns:
        What has become of them; a trial whose lease has changed since it was read is left out.
    """
    done: list[Settled] = []
    for trial in trials:
        settled = _settle(storage, trial, _noted(trial, verdict, stop_note), max_retries, dry_run=dry_run)
        if settled is not None:
            done.append(settled)
            heard(settled)
    return done


def _noted(running: ledger.RunningTrial, verdict: Verdict, stop_note: StopNote) -> Verdict:
    """The verdict on an attempt; for a lost one that has left a note saying why, that note."""
    if verdict.outcome != LOST or running.lease is None:
        return verdict
    note = stop_note(running.number, running.lease.attempt)
    return verdict if note is None else Verdict(STOPPED, note)


def _settle(
    storage: StudyStorage,
    running: ledger.RunningTrial,
    verdict: Verdict,
    max_retries: int,
    *,
    dry_run: bool = False,
) -> Settled | None:
    """Take back one trial from its owner; None if its lease has changed since it was read."""
    with storage.transaction() as session:
        # The lease first, then the trial, as an owner's writes lock them.
        if running.lease is not None and not ledger.lock_unchanged(session, running.lease):
            return None
        trial = models.TrialModel.find_or_raise_by_id(running.trial_id, session, for_update=True)
        history = ledger.attempts_of_trial(session, running.trial_id)
        if trial.state != TrialState.RUNNING or lock_paused(session, running.trial_id):
            return None  # another process was faster
        if running.lease is None and any(attempt.ended_at is None for attempt in history):
            return None
        settled = _judge(running, history, verdict, max_retries, forgiven=_forgiven(session, trial))
        if dry_run:
            return settled
        if running.lease is not None:
            ledger.end(session, running.trial_id, settled.attempt, verdict.outcome, verdict.reason)
        if settled.state == TrialState.WAITING:
            trial.state = TrialState.WAITING
        else:
            _fail(storage, session, trial, {OUTCOME_ATTR: settled.outcome, REASON_ATTR: settled.reason})
        return settled


def _judge(
    running: ledger.RunningTrial,
    history: Iterable[ledger.Attempt],
    verdict: Verdict,
    max_retries: int,
    *,
    forgiven: int,
) -> Settled:
    """Decide what becomes of a trial whose owner is gone, given its attempts so far."""
    attempt = 0 if running.lease is None else running.lease.attempt
    deaths = sum(each.outcome == LOST and each.attempt > forgiven for each in history) + (verdict.outcome == LOST)
    if verdict.final:
        return Settled(running.number, attempt, TrialState.FAIL, verdict.outcome, verdict.reason)
    if verdict.outcome == LOST and deaths > max_retries:  # not if STOPPED: max_retries may have been lowered since
        reason = f"its worker died {deaths} times, the last time: {verdict.reason}"
        return Settled(running.number, attempt, TrialState.FAIL, verdict.outcome, reason)
    return Settled(running.number, attempt, TrialState.WAITING, verdict.outcome, verdict.reason)


def _forgiven(session: orm.Session, trial: models.TrialModel) -> int:
    """The last attempt that does not count against the retries; 0 if all count."""
    attr = models.TrialUserAttributeModel.find_by_trial_and_key(trial, RETRIED_ATTR, session)
    return 0 if attr is None else int(json.loads(cast("str", attr.value_json)))


def _fail(storage: StudyStorage, session: orm.Session, trial: models.TrialModel, attrs: dict[str, str]) -> None:
    trial_id = cast("int", trial.trial_id)
    forget_failure(session, trial_id)
    for key, value in attrs.items():
        set_user_attr(storage, session, trial_id, key, value)
    trial.state = TrialState.FAIL
    trial.datetime_complete = datetime.now()


def forget_failure(session: orm.Session, trial_id: int) -> None:
    """Delete the attributes about its failure that an earlier attempt has left on a trial."""
    attrs = TRIAL_USER_ATTRS
    failure = attrs.c.key.in_([OUTCOME_ATTR, REASON_ATTR, TRACEBACK_ATTR, WORKER_ATTR])
    session.execute(sa.delete(attrs).where(attrs.c.trial_id == trial_id, failure))
