"""Requests to stop: a trial's supervisor asks for its end, or another attempt has taken its lease."""

from __future__ import annotations

from hpo.errors import LeaseLostError
from hpo.storage.ledger import Lease
from hpo.storage.recovery import Verdict


class StopRequest:
    """What others want of a worker. Any thread may set it, and a signal's handler inside of another one, so there
    is no lock; a trial's session looks after each batch.

    A verdict or a lost lease is about one attempt at one trial: it does nothing to the next trial, should this one
    end first, nor to this one when it resumes, should it pause first.
    """

    def __init__(self) -> None:
        self._leave = False
        self._verdicts: dict[Lease, Verdict] = {}
        self._lost: set[Lease] = set()

    def leave(self) -> None:
        """Ask the worker to requeue its trial and to take no other."""
        self._leave = True

    @property
    def leaving(self) -> bool:
        """Whether the worker is to take no other trial."""
        return self._leave

    def end(self, lease: Lease, verdict: Verdict) -> None:
        """Ask that an attempt, and its trial, ends with a verdict."""
        self._verdicts[lease] = verdict

    def verdict(self, lease: Lease) -> Verdict | None:
        """How an attempt is to end, if that was requested."""
        return self._verdicts.get(lease)

    def lose(self, lease: Lease) -> None:
        """Say that a lease is lost."""
        self._lost.add(lease)

    def stops(self, number: int, lease: Lease) -> bool:
        """Whether this attempt at trial ``number`` is to stop now.

        Raises:
            LeaseLostError: Another attempt has it.
        """
        if lease in self._lost:
            raise LeaseLostError(f"trial {number} has been taken from this worker")
        return self._leave or lease in self._verdicts
