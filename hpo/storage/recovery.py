"""Takes back trials whose workers are gone: each is requeued, or fails.

Whoever first notices a death (another supervisor, a timer, a person with `hpo repair`) ends the dead owner's
attempt and changes the trial's state in one transaction. The lease is the fence: an owner that was wrongly taken
for dead and wakes up finds its attempt ended, and can no longer write anything.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, cast

import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.storage import agents, ledger, machine
from hpo.storage.agents import AllowedSilence
from hpo.storage.attributes import (
    BUDGET_ATTR,
    OUTCOME_ATTR,
    REASON_ATTR,
    RETRIED_ATTR,
    TRACEBACK_ATTR,
    WORKER_ATTR,
)
from hpo.storage.optuna_private import TRIAL_USER_ATTRS, models, set_user_attr
from hpo.storage.outage import patient
from hpo.storage.pausing import lock_paused
from hpo.storage.study_storage import StudyStorage

if TYPE_CHECKING:
    from sqlalchemy import orm

#: A process that looks only once watches for 1/2 of the grace, in which a living worker beats three times.
_WATCHED_SHARE: Final = 2
#: Seconds between two looks while watching.
_WATCH_PAUSE: Final = 1.0
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


def _no_note(_number: int, _attempt: int) -> None:
    return None


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


def _not_heard(_settled: Settled) -> None:
    return


class Sightings:
    """Measures, for a process that looks repeatedly, how long each lease or agent has gone without a new beat.

    Only that process's own clock is used, so other machines' clocks may be wrong. While it could not look (the
    database was unreachable, the machine asleep), workers may have been unable to beat as well. So of the time
    between two looks at most a third of the grace counts.
    """

    def __init__(self) -> None:
        self._looked_at = time.monotonic()
        self._silent: dict[tuple[float, ...], float] = {}

    def look(self, keys: Sequence[tuple[float, ...]], grace: float) -> list[float]:
        """Seconds for which each key has been seen; a key contains the latest beat. Other keys are forgotten."""
        now = time.monotonic()
        passed = min(now - self._looked_at, grace / 3)
        silent = [self._silent[key] + passed if key in self._silent else 0.0 for key in keys]
        self._looked_at, self._silent = now, dict(zip(keys, silent, strict=True))
        return silent


def requeue_dead(
    storage: StudyStorage,
    study_id: int,
    *,
    grace: float = 60.0,
    max_retries: int = 3,
    sightings: Sightings | None = None,
    stop_note: StopNote = _no_note,
    spare: Collection[int] = (),
    heard: Hear = _not_heard,
    dry_run: bool = False,
) -> list[Settled]:
    """Take back every RUNNING trial whose owner is dead.

    An owner on this host is dead if its process is gone. One on another host is dead if it has not beaten for
    ``grace`` seconds, or for its own agent's ``lost_after`` if that is longer. ``sightings`` measure this; without
    them the clock does, and watching for half that time must confirm it. A RUNNING trial without a lease is taken
    back only in a study with a budget: other studies are not ours.

    Args:
        storage: The study's storage.
        study_id: Optuna's id of the study.
        grace: Seconds.
        max_retries: How many deaths a trial survives; after the next one it fails with the outcome ``lost``.
        sightings: What this process has seen in earlier looks; None if it looks only once.
        stop_note: Returns why an attempt ended, if that was not the trial's fault.
        spare: Processes of this host whose trials the caller settles itself, because it knows why they are gone.
        heard: Called with each settled trial, see `Hear`.
        dry_run: Only return what would be done.
    """
    settled: list[Settled] = []

    def take_back() -> None:
        if dry_run:
            settled.clear()  # an earlier try has done nothing
        for each in _dead(storage, study_id, grace, sightings, spare):
            settled.extend(_settle_all(storage, [each], GONE, max_retries, stop_note, heard, dry_run=dry_run))

    storage.patience.run(take_back)
    return settled


def _dead(
    storage: StudyStorage,
    study_id: int,
    grace: float,
    sightings: Sightings | None,
    spare: Collection[int],
) -> list[ledger.RunningTrial]:
    """The RUNNING trials whose owners are dead, by number; see `requeue_dead`."""
    ours = BUDGET_ATTR in storage.get_study_user_attrs(study_id)
    with storage.engine.connect() as conn:
        running = [trial for trial in ledger.running_trials(conn, study_id) if not _is_spared(trial, spare)]
        allowed = AllowedSilence.of(conn, study_id, grace)
    dead = [trial for trial in running if trial.lease is None and ours]
    leased = [trial for trial in running if trial.lease is not None]
    found = _with_dead_owners(storage, leased, allowed, sightings)
    if sightings is None:
        found = _watched(storage, study_id, found, allowed)
    return sorted([*dead, *found], key=lambda trial: trial.number)


def _is_spared(trial: ledger.RunningTrial, spare: Collection[int]) -> bool:
    lease = trial.lease
    return lease is not None and (lease.host, lease.boot_id) == machine.here() and lease.pid in spare


def _lives(storage: StudyStorage, lease: ledger.Attempt) -> bool | None:
    """Whether a lease's owner lives; None if that can't be known.

    A SQLite file belongs to one machine: the same name with another boot id is this machine before it restarted.
    """
    if (
        storage.engine.name == "sqlite"
        and lease.host == machine.host_name()
        and lease.boot_id != machine.boot_id()
    ):
        return False
    return lease.owner_is_alive()


def _with_dead_owners(
    storage: StudyStorage, trials: list[ledger.RunningTrial], allowed: AllowedSilence, sightings: Sightings | None
) -> list[ledger.RunningTrial]:
    leases = [cast("ledger.Attempt", trial.lease) for trial in trials]
    if sightings is None:
        # The owner's clock may be ahead, hence `abs`; `_watched` spares those that live.
        silent = [abs(time.time() - lease.beat_at) for lease in leases]
    else:
        silent = sightings.look([(each.trial_id, each.attempt, each.beat_at) for each in leases], allowed.own)
    alive = [_lives(storage, lease) for lease in leases]
    return [
        trial
        for trial, lease, lives, seconds in zip(trials, leases, alive, silent, strict=True)
        if (seconds > allowed.of_owner(lease) if lives is None else not lives)
    ]


def _watched(
    storage: StudyStorage, study_id: int, trials: list[ledger.RunningTrial], allowed: AllowedSilence
) -> list[ledger.RunningTrial]:
    """The trials whose owners are dead processes of this host, or don't beat while they are watched.

    A clock, here or elsewhere, may be wrong; going by the clock alone, all workers elsewhere would then seem dead.
    """
    here = [trial for trial in trials if trial.lease is not None and _lives(storage, trial.lease) is not None]
    elsewhere = [trial for trial in trials if trial not in here]
    waits = [allowed.of_owner(each.lease) for each in elsewhere if each.lease is not None]
    until = time.monotonic() + max(waits, default=0.0) / _WATCHED_SHARE
    while elsewhere and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _WATCH_PAUSE))
        with storage.engine.connect() as conn:
            leases = {trial.lease for trial in ledger.running_trials(conn, study_id)}
        elsewhere = [trial for trial in elsewhere if trial.lease in leases]
    return here + elsewhere


@patient
def settle_process(
    storage: StudyStorage,
    study_id: int,
    pid: int,
    verdict: Verdict,
    *,
    max_retries: int = 3,
    stop_note: StopNote = _no_note,
    heard: Hear = _not_heard,
) -> list[Settled]:
    """Settle the trials that a process of this host held; the caller has seen that it is gone.

    Args:
        storage: The study's storage.
        study_id: Optuna's id of the study.
        pid: The process.
        verdict: Why it is gone.
        max_retries: See `requeue_dead`, as for the next two.
        stop_note: See there.
        heard: See there.
    """
    settled: list[Settled] = []
    # After the process has died, a server may still store what it had sent, a beat say; the lease has then changed
    # and is not taken. So repeat until nothing is held.
    start, held = _held_by(storage, study_id, pid, 0.0)
    while held:
        settled += _settle_all(storage, held, verdict, max_retries, stop_note, heard)
        start, held = _held_by(storage, study_id, pid, start)
    return settled


@patient
def settle_agent(
    storage: StudyStorage,
    study_id: int,
    placement: str,
    verdict: Verdict,
    *,
    max_retries: int = 3,
    stop_note: StopNote = _no_note,
    heard: Hear = _not_heard,
) -> list[Settled]:
    """Settle the trials that an agent's workers held, on any machine; its engine has lost or killed the agent.

    If the engine is wrong, the workers find their leases ended at their next write, and store nothing more.

    Args:
        storage: The study's storage.
        study_id: Optuna's id of the study.
        placement: Id of the agent's placement.
        verdict: Why it is gone.
        max_retries: See `requeue_dead`, as for the next two.
        stop_note: See there.
        heard: See there.
    """
    settled: list[Settled] = []
    with storage.one_transaction() as conn:
        ids = agents.end_placement(conn, study_id, placement)
        running = ledger.running_trials(conn, study_id)
    held = {trial.lease[:2] for trial in running if trial.lease is not None and trial.lease.agent in ids}
    while left := [trial for trial in running if trial.lease is not None and trial.lease[:2] in held]:
        settled += _settle_all(storage, left, verdict, max_retries, stop_note, heard)
        with storage.engine.connect() as conn:  # leases that have beaten in between were not taken
            running = ledger.running_trials(conn, study_id)
    return settled


@patient
def holds_a_trial(storage: StudyStorage, study_id: int, pid: int) -> bool:
    """Whether a process of this host holds a trial and lives."""
    with storage.engine.connect() as conn:
        leases = [trial.lease for trial in ledger.running_trials(conn, study_id) if trial.lease is not None]
    here = (*machine.here(), pid)
    owned = [lease for lease in leases if (lease.host, lease.boot_id, lease.pid) == here]
    return any(lease.owner_is_alive() for lease in owned)


def _held_by(
    storage: StudyStorage, study_id: int, pid: int, since: float
) -> tuple[float, list[ledger.RunningTrial]]:
    """The start of the latest process of this boot with this id, and the trials that it holds; none if it runs.

    Earlier processes with that id, or ones that started before ``since``, died of another cause.
    """
    with storage.engine.connect() as conn:
        running = ledger.running_trials(conn, study_id)
    leases = [trial.lease for trial in running if trial.lease is not None]
    here = (*machine.here(), pid)
    owners = [lease for lease in leases if (lease.host, lease.boot_id, lease.pid) == here]
    latest = max((lease.start_time for lease in owners), default=since)
    if latest < since:
        return since, []
    held = {lease for lease in owners if lease.start_time == latest and lease.owner_is_alive() is not True}
    return latest, [trial for trial in running if trial.lease in held]


def _settle_all(
    storage: StudyStorage,
    trials: Iterable[ledger.RunningTrial],
    verdict: Verdict,
    max_retries: int,
    stop_note: StopNote,
    heard: Hear,
    *,
    dry_run: bool = False,
) -> list[Settled]:
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
