"""Takes back trials whose workers are gone: each is requeued, or fails.

Whoever first notices a death (another supervisor, a timer, a person with `hpo repair`) ends the dead owner's
attempt and changes the trial's state in one transaction. The lease is the fence: an owner that was wrongly taken
for dead and wakes up finds its attempt ended, and can no longer write anything.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Final, cast

from hpo.storage import agents, ledger, machine
from hpo.storage.agents import AllowedSilence
from hpo.storage.attributes import BUDGET_ATTR
from hpo.storage.outage import patient
from hpo.storage.settling import GONE, Hear, Settled, StopNote, Verdict, no_note, not_heard, settle_all
from hpo.storage.study_storage import StudyStorage

#: A process that looks only once watches for 1/2 of the grace, in which a living worker beats three times.
_WATCHED_SHARE: Final = 2
#: Seconds between two looks while watching.
_WATCH_PAUSE: Final = 1.0


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
    stop_note: StopNote = no_note,
    spare: Collection[int] = (),
    heard: Hear = not_heard,
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
            settled.extend(settle_all(storage, [each], GONE, max_retries, stop_note, heard, dry_run=dry_run))

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
    stop_note: StopNote = no_note,
    heard: Hear = not_heard,
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
        settled += settle_all(storage, held, verdict, max_retries, stop_note, heard)
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
    stop_note: StopNote = no_note,
    heard: Hear = not_heard,
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
        settled += settle_all(storage, left, verdict, max_retries, stop_note, heard)
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
