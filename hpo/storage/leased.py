"""The part of the storage that knows which leases this process holds, and refuses writes without a lease."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.errors import LeaseLostError
from hpo.storage import beats, ledger
from hpo.storage.deletion import delete_study
from hpo.storage.ledger import Owner
from hpo.storage.optuna_private import REPORTS, TRIALS, id_of_trial, models
from hpo.storage.outage import patient
from hpo.storage.process_forks import refuse_forks
from hpo.storage.reader import ReadingStorage


@dataclass
class Held:
    """A lease that a storage holds.

    Attributes:
        attempt: The attempt at the trial.
        since: The monotonic clock when it was taken.
        outcome: The outcome that has been stored for the trial; None: none yet.
    """

    attempt: int
    since: float = field(default_factory=time.monotonic)
    outcome: str | None = None

    @property
    def seconds(self) -> float:
        """Seconds for which it has been held."""
        return time.monotonic() - self.since


class LeasedStorage(ReadingStorage):
    """Optuna's storage with leases: an owner writes only to trials whose lease it holds.

    Args:
        url: A normalised URL (`hpo.storage.engines.normalize_url`) of a database that has the schema.
        owner: The process on whose behalf trials are run; None for a storage that runs none.

    Attributes:
        process: Id of the process that runs the owner's trials.
        owners: By trial id, the owner in whose name a trial is taken or resumed, instead of ``owner``.
        excused_s: Returns how many seconds of the current lease do not count as the trial's.
    """

    def __init__(self, url: str, owner: Owner | None) -> None:
        self.owner = owner
        self.owners: Mapping[int, Owner] = {}
        self.excused_s: Callable[[], float] = lambda: 0.0
        self._held: dict[int, Held] = {}
        self._untouched: dict[int, FrozenTrial] = {}
        super().__init__(url)
        refuse_forks(self.engine, lambda: None if self._owner is None else self.process)

    @property
    def owner(self) -> Owner | None:
        """On whose behalf trials are run. The process that sets it runs them, and only that one may write."""
        return self._owner

    @owner.setter
    def owner(self, owner: Owner | None) -> None:
        self._owner = owner
        self.process = os.getpid()

    @patient
    def delete_study(self, study_id: int) -> None:
        """Delete a study with its trials, their attempts and changes, and its agents."""
        with self.transaction() as session:
            delete_study(session, study_id)

    def attempt_of(self, trial_id: int) -> int:
        """The attempt under which this storage runs a trial; LeaseLostError if it doesn't."""
        return self._lease_of(trial_id).attempt

    def _lease_of(self, trial_id: int) -> Held:
        try:
            return self._held[trial_id]
        except KeyError:
            raise lease_lost(trial_id) from None

    def _attempt(self, trial_id: int) -> int | None:
        held = self._held.get(trial_id)
        return None if held is None else held.attempt

    def forget(self, trial_id: int) -> None:
        """Forget the lease of a trial, if it is lost, say: no more beats for it, and reads of it work again."""
        self._held.pop(trial_id, None)
        self._untouched.pop(trial_id, None)  # another process may have written to the trial

    def keep_untouched(self, trial: FrozenTrial) -> None:
        """Let the next read of a held trial return this copy, unless this storage writes to a trial before."""
        self._untouched = {id_of_trial(trial): trial}

    def _fence(self, conn: ledger.Executor, trial_id: int) -> None:
        """Check that this storage may write to the trial, and lock its lease until the transaction's end."""
        if self.owner is None:
            return
        attempt = self._attempt(trial_id)
        if attempt is None:
            query = sa.select(TRIALS.c.state).where(TRIALS.c.trial_id == trial_id)
            state = cast("TrialState | None", conn.execute(query).scalar())
            if state is None or state.is_finished():
                return  # Optuna itself refuses the write
        elif ledger.holds(conn, trial_id, attempt):
            return
        raise lease_lost(trial_id)

    def _explain_refusal(self, trial_id: int) -> None:
        """Raise the error that explains why a write was refused; none if it only left an existing row as it is."""
        with self.transaction() as session:
            self._fence(session, trial_id)
            trial = models.TrialModel.find_or_raise_by_id(trial_id, session)
            self.check_trial_is_updatable(trial_id, cast("TrialState", trial.state))

    def hold(self, lease: ledger.Lease) -> None:
        """Take over a lease that was taken in this process's name."""
        self._untouched.clear()  # a copy may be from an earlier attempt, read before this process was forked
        self._hold(*lease)

    @patient
    def hand_over(self, trial_id: int) -> None:
        """Store the current owner as the holder of a held trial: the process that was to train it has died.

        Raises:
            LeaseLostError: Another attempt has the trial.
        """
        assert self.owner is not None
        with self.transaction() as session:
            if not ledger.hand_over(session, trial_id, self.attempt_of(trial_id), self.owner):
                raise lease_lost(trial_id)

    def _hold(self, trial_id: int, attempt: int) -> None:
        self._held[trial_id] = Held(attempt)

    @patient
    def forget_reports(self, trial_id: int, after: int) -> None:
        """Delete what a held trial has reported after a step.

        Raises:
            LeaseLostError: Another attempt has the trial.
        """
        with self.transaction() as session:
            self._fence(session, trial_id)
            session.execute(sa.delete(REPORTS).where(REPORTS.c.trial_id == trial_id, REPORTS.c.step > after))

    @patient
    def attempts_of_trial(self, trial_id: int) -> list[ledger.Attempt]:
        """Every attempt of one trial, oldest first."""
        with self.engine.connect() as conn:
            return ledger.attempts_of_trial(conn, trial_id)

    def held_for(self, trial_id: int) -> float:
        """Seconds since this storage took a trial; LeaseLostError if it doesn't hold the trial."""
        return self._lease_of(trial_id).seconds

    def _took(self, held: Held) -> float:
        """Seconds that count as the attempt's duration."""
        return held.seconds - self.excused_s()

    def beat(self) -> list[ledger.Lease]:
        """Beat for all held trials in one transaction; returns the leases that are lost."""
        leases = list(self._held.items())
        held = [beats.Beat(ledger.Lease(trial_id, each.attempt), self._took(each)) for trial_id, each in leases]
        if not held:
            return []
        with self._writing(), self.engine.begin() as conn:
            lost = beats.give(conn, held)
        # A trial that has been finished in the meantime is no longer held.
        return [lease for lease in lost if self._attempt(lease.trial_id) == lease.attempt]


def lease_lost(trial_id: int) -> LeaseLostError:
    """The error of a write or read by a process that does not hold the trial."""
    return LeaseLostError(f"trial {trial_id} (database id) isn't held by this worker: nothing is stored for it")
