"""Beats of trial processes: the agent beats for all of them, and each beats for itself when the agent does not.

A thread of each trial process shows in shared memory that the process runs, and which lease it holds. The agent
beats for every process that has shown this lately, in one transaction with its own beat; so a process that is
stopped or swapped out gets no beat. A process that sees that its agent has not beaten for it (the agent is dead,
stopped, busy, or cut off from the database) beats for itself until the agent does so again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from hpo.execution.messages import Lost
from hpo.execution.pulse import ALIVE, BEATEN, Pulse
from hpo.storage import beats
from hpo.storage.beats import Beat, Heartbeat
from hpo.storage.ledger import Lease
from hpo.storage.study_storage import StudyStorage

if TYPE_CHECKING:
    from hpo.execution.launchers.launcher import Worker
    from hpo.execution.registered import Registered
    from hpo.trial.stopping import StopRequest

#: Beats within the silence after which a worker counts as dead.
_BEATS: Final = 6
#: Longest time between two beats, in seconds.
_SLOWEST: Final = 10.0
#: Intervals without a beat after which a trial process beats for itself.
_LATE: Final = 2
#: How many times per interval a trial process shows that it runs.
_SHOWN: Final = 4
#: Seconds without a statement after which a trial process closes its connection. Opening one costs the server as
#: much as a dozen reports, so a process that reports every ten seconds keeps its connection.
_IDLE: Final = 20.0


def beat_interval(lost_after: float) -> float:
    """Seconds between two beats of a worker that counts as dead after ``lost_after`` seconds of silence."""
    return min(_SLOWEST, lost_after / _BEATS)


class AgentBeats:
    """Gives an agent's own beats and those of its trial processes.

    Args:
        storage: The study's storage.
        registered: The agent's own row; None if it has none.
        interval: Seconds; a process that last showed longer ago that it runs gets no beat.
    """

    def __init__(self, storage: StudyStorage, registered: Registered | None, interval: float) -> None:
        self._storage = storage
        self._registered = registered
        self._interval = interval
        self._told: set[Lease] = set()

    def give(self, workers: Iterable[Worker]) -> None:
        """Beat for all running trial processes in one transaction; notify those that have lost their lease."""
        now = time.monotonic()
        shown = [(worker, held) for worker in workers if (held := worker.held) is not None]
        running = [(worker, held) for worker, held in shown if now - held.alive_at <= self._interval]
        lost = self._store([Beat(held.lease, now - held.since - held.excused_s) for _, held in running])
        for worker, held in running:
            if held.lease not in lost:
                worker.show_beaten(now)
            elif held.lease not in self._told:
                worker.ask(Lost(held.lease))
        self._told = lost

    def _store(self, given: list[Beat]) -> set[Lease]:
        if not given and self._registered is None:
            return set()
        with self._storage.one_transaction() as conn:
            if self._registered is not None:
                self._registered.look(conn)
            return set(beats.give(conn, given))


class _OwnBeats:
    """Shows that a trial process runs, and beats for it when its agent is late."""

    def __init__(self, storage: StudyStorage, pulse: Pulse, interval: float) -> None:
        self._storage = storage
        self._pulse = pulse
        self._interval = interval
        self._began = time.monotonic()
        self._at = -interval

    def is_due(self) -> bool:
        now = self._pulse[ALIVE] = time.monotonic()
        self._storage.rest_if_idle(_IDLE)
        is_late = now - max(self._began, self._pulse[BEATEN]) > _LATE * self._interval
        return is_late and now - self._at >= self._interval

    def give(self) -> list[Lease]:
        self._at = time.monotonic()
        return self._storage.beat()


def trial_heartbeat(storage: StudyStorage, pulse: Pulse, request: StopRequest, lost_after: float) -> Heartbeat:
    """The thread of a trial process that shows that it runs.

    Args:
        storage: Holds the trial.
        pulse: Memory shared with the agent.
        request: Notified when this thread finds that the lease is lost or the database is gone.
        lost_after: Seconds of silence after which the process counts as dead.
    """
    interval = beat_interval(lost_after)
    own = _OwnBeats(storage, pulse, interval)
    return Heartbeat(
        own.give,
        interval=interval / _SHOWN,
        is_due=own.is_due,
        on_lost=request.lose,
        on_gone=request.leave,
    )
