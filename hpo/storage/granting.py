"""The part of the storage that stores grants, in the transactions that give trials to workers."""

import contextlib
import threading
from collections.abc import Iterator

from sqlalchemy import orm

from hpo.storage.grants import Grant, begin_grants, is_granted, store_grant
from hpo.storage.leased import LeasedStorage
from hpo.storage.ledger import Owner
from hpo.storage.outage import patient


class _Granting(threading.local):
    """The grant that the current thread stores with the next trial: Optuna's methods have no argument for it."""

    grant: Grant | None = None


class GrantingStorage(LeasedStorage):
    """A `LeasedStorage` that stores grants with the trials that it takes.

    Args:
        url: See `LeasedStorage`.
        owner: See `LeasedStorage`.
    """

    def __init__(self, url: str, owner: Owner | None) -> None:
        self._granting = _Granting()
        super().__init__(url, owner)

    @patient
    def begin_grants(self, study_id: int) -> None:
        """Prepare the study for numbered grants; see `hpo.storage.grants`."""
        with self.transaction() as session:
            begin_grants(session, study_id)

    @contextlib.contextmanager
    def granting(self, grant: Grant | None) -> Iterator[None]:
        """Store a grant with the trial taken inside; with a waiting trial only if it has none, or this cuts it.

        The method that takes the trial raises OldGrantError, and takes nothing, if the grant is not the study's
        next.
        """
        self._granting.grant = grant
        try:
            yield
        finally:
            self._granting.grant = None

    @property
    def is_granting(self) -> bool:
        """Whether this thread is inside `granting`, with a grant."""
        return self._granting.grant is not None

    def _store_grant(self, session: orm.Session, trial_id: int, *, only_first: bool = False) -> None:
        """Store the thread's grant, if any, in the transaction that takes the trial.

        ``only_first``: only if the trial has no grant yet, or this one cuts the grant that it has.
        """
        grant = self._granting.grant
        if grant is not None and not (only_first and not grant.cuts and is_granted(session, trial_id)):
            store_grant(session, trial_id, grant)
