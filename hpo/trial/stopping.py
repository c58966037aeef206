"""Requests to stop: a trial's supervisor asks for its end, or another attempt has taken its lease."""

from __future__ import annotations

from hpo.errors import LeaseLostError
from hpo.storage.ledger import Lease
from hpo.storage.settling import Verdict


class StopRequest:
    """Requests to a worker, which a trial's session checks after each batch.

    Any thread may make them, and a signal handler may interrupt another request, so there is no lock. A verdict or
    a lost lease is about one attempt at one trial: it does not affect the worker's next trial, nor a later attempt
    at the same trial.
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
        """Whether the worker was asked to leave."""
        return self._leave

    def end(self, lease: Lease, verdict: Verdict) -> None:
        """Ask to end an attempt and its trial with a verdict."""
        self._verdicts[lease] = verdict

    def verdict(self, lease: Lease) -> Verdict | None:
        """The verdict with which an attempt was asked to end, if any."""
        return self._verdicts.get(lease)

    def lose(self, lease: Lease) -> None:
        """Record that a lease is lost."""
        self._lost.add(lease)

    def stops(self, number: int, lease: Lease) -> bool:
        """Whether this attempt at trial ``number`` must stop now.

        Raises:
            LeaseLostError: Another attempt has it.
        """
        if lease in self._lost:
            raise LeaseLostError(f"trial {number} has been taken from this worker")
        return self._leave or lease in self._verdicts
