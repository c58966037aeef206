"""Repairs stale state in a study: trials whose workers are gone, and leases that no process holds.

Each repair is checked and made in one transaction, and only if nothing has changed meanwhile. So a repair beside a
running study takes nothing from a living worker, and a second repair finds nothing to do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.storage import ledger
from hpo.storage.agents import AllowedSilence
from hpo.storage.ledger import ATTEMPTS, Attempt
from hpo.storage.optuna_private import TRIALS
from hpo.storage.outage import patient
from hpo.storage.recovery import requeue_dead
from hpo.storage.study_storage import StudyStorage

if TYPE_CHECKING:
    from sqlalchemy import orm

    from hpo.study.open_study import OpenStudy

#: Actions of a repair.
REQUEUED: Final = "requeued"
FAILED: Final = "failed"
LEASE_ENDED: Final = "lease ended"
ATTEMPT_REMOVED: Final = "attempt removed"

_IGNORANT = "by a tool that knows nothing of leases"


@dataclass(frozen=True)
class Repair:
    """One repair, or one running trial that was left alone.

    Attributes:
        trial: The trial's number; None for a trial that no longer exists.
        attempt: The attempt in question; 0 for a trial that runs without one.
        action: The action taken; empty where nothing was done.
        reason: Why, for people.
    """

    trial: int | None
    attempt: int
    action: str
    reason: str


@dataclass(frozen=True)
class RepairReport:
    """The result of `repair`.

    Attributes:
        done: The repairs made; in a dry run, those that would be made.
        left: Running trials that were left alone.
    """

    done: list[Repair]
    left: list[Repair]


def repair(opened: OpenStudy, *, dry_run: bool = False) -> RepairReport:
    """Repair everything stale, by the limits of the study file.

    That is: running trials whose owner is dead or missing, open leases of trials that do not run, and attempts at
    trials that no longer exist (of any study, since it is not known any more to which study they belonged).

    Args:
        opened: The study.
        dry_run: Only report what would be done.
    """
    storage, run = opened.storage, opened.spec.run
    settled = requeue_dead(
        storage,
        opened.study_id,
        grace=run.lost_after,
        max_retries=run.max_retries,
        stop_note=opened.stop_note,
        dry_run=dry_run,
    )
    done = [
        Repair(each.number, each.attempt, REQUEUED if each.state == TrialState.WAITING else FAILED, each.reason)
        for each in settled
    ]
    taken = {each.number for each in settled}
    running, stale, allowed = _look(storage, opened.study_id, run.lost_after)
    left = [_left_alone(trial, allowed) for trial in running if trial.number not in taken]
    ended = (_end_lease(storage, number, lease, dry_run=dry_run) for number, lease in stale)
    done += [each for each in ended if each is not None]
    done += _remove_orphans(storage, dry_run=dry_run)
    return RepairReport(done, left)


@patient
def _look(
    storage: StudyStorage, study_id: int, grace: float
) -> tuple[list[ledger.RunningTrial], list[tuple[int, Attempt]], AllowedSilence]:
    """The running trials; open leases of other trials, with their numbers; and how long owners may be silent."""
    with storage.engine.connect() as conn:
        running, stale = ledger.running_trials(conn, study_id), _stale_leases(conn, study_id)
        return running, stale, AllowedSilence.of(conn, study_id, grace)


def _left_alone(trial: ledger.RunningTrial, allowed: AllowedSilence) -> Repair:
    lease = trial.lease
    if lease is None:
        return Repair(trial.number, 0, "", "it runs without a lease, in a study that was not started by `hpo run`")
    beat = max(0.0, time.time() - lease.beat_at)
    if lease.owner_is_alive():
        reason = f"{lease.worker} is alive: process {lease.pid} on this host, last heard of {beat:.0f} s ago"
    else:
        reason = (
            f"{lease.worker} on {lease.host} is alive: last heard of {beat:.0f} s ago, "
            f"counted dead after {allowed.of_owner(lease):.0f} s of silence"
        )
    return Repair(trial.number, lease.attempt, "", reason)


def _stale_leases(conn: sa.Connection, study_id: int) -> list[tuple[int, Attempt]]:
    """Open leases of trials that do not run, with the trials' numbers."""
    query = (
        sa.select(TRIALS.c.number, ATTEMPTS)
        .join_from(ATTEMPTS, TRIALS, TRIALS.c.trial_id == ATTEMPTS.c.trial_id)
        .where(TRIALS.c.study_id == study_id, TRIALS.c.state != TrialState.RUNNING, ATTEMPTS.c.ended_at.is_(None))
        .order_by(TRIALS.c.number)
    )
    return [(row[0], Attempt._make(row[1:])) for row in conn.execute(query)]


@patient
def _end_lease(storage: StudyStorage, number: int, lease: Attempt, *, dry_run: bool) -> Repair | None:
    """End the lease of a trial that does not run; None if the trial runs by now, or the lease has ended."""
    with storage.transaction() as session:
        if not ledger.holds(session, lease.trial_id, lease.attempt):
            return None
        state = _state_of(session, lease.trial_id)
        if state is None or state == TrialState.RUNNING:
            return None
        if state == TrialState.WAITING:
            outcome, reason = "requeued", f"the trial waits, put there {_IGNORANT}"
        else:
            outcome, reason = state.name.lower(), f"the trial is finished ({state.name}), ended {_IGNORANT}"
        if not dry_run:
            ledger.end(session, lease.trial_id, lease.attempt, outcome, reason)
        return Repair(number, lease.attempt, LEASE_ENDED, reason)


def _state_of(session: orm.Session, trial_id: int) -> TrialState | None:
    query = sa.select(TRIALS.c.state).where(TRIALS.c.trial_id == trial_id).with_for_update()
    return cast("TrialState | None", session.execute(query).scalar())


@patient
def _remove_orphans(storage: StudyStorage, *, dry_run: bool) -> list[Repair]:
    """Remove the attempts at trials that Optuna's own tools have deleted."""
    orphan = ~sa.exists().where(TRIALS.c.trial_id == ATTEMPTS.c.trial_id)
    with storage.transaction() as session:
        query = sa.select(ATTEMPTS).where(orphan).order_by(ATTEMPTS.c.trial_id, ATTEMPTS.c.attempt)
        found = [Attempt._make(row) for row in session.execute(query.with_for_update())]
        if found and not dry_run:
            session.execute(sa.delete(ATTEMPTS).where(orphan))
    reason = "its trial (database id {}) has been deleted"
    return [Repair(None, each.attempt, ATTEMPT_REMOVED, reason.format(each.trial_id)) for each in found]
