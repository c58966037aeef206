"""A pulse: numbers in memory that a supervisor shares with a worker and its trial process.

Each number has one writer and is read whole, so no lock is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from hpo.storage.ledger import Lease

#: The monotonic clock when the worker last finished a batch, or took a trial.
BEAT: Final = 0
#: 1 when the worker has finished an epoch of its trial, else 0.
ADVANCED: Final = 1
#: Process id of the worker's trial process; 0 while it has none.
PROCESS: Final = 2
#: The lease that the trial process holds, as one number; 0 while it holds none.
LEASE: Final = 3
#: The monotonic clock when the trial process took over this lease.
SINCE: Final = 4
#: The monotonic clock when a thread of the trial process last ran, which shows that the process is not stopped.
ALIVE: Final = 5
#: The monotonic clock when the supervisor last beat for this lease; the supervisor writes this number.
BEATEN: Final = 6
#: Process id of the previous trial's process while it ends; 0 once it is gone.
ENDING: Final = 7
#: 1 while the trial is at the end of its grant and waits for the decision whether it trains on, else 0.
DECIDING: Final = 8
#: Total seconds in which the worker's trials could not advance, so they do not count; the supervisor writes this.
EXCUSED: Final = 9
#: The value of EXCUSED when the trial process took over its lease.
EXCUSED_BEFORE: Final = 10
#: How many numbers a pulse has.
PULSE_LENGTH: Final = 11

#: How many attempts of a trial a lease's number has room for; a double holds that number exactly for any trial id.
_ATTEMPTS: Final = 2**20


class Pulse(Protocol):
    """Numbers in shared memory, at the places above."""

    def __getitem__(self, place: int) -> float: ...

    def __setitem__(self, place: int, value: float) -> None: ...


@dataclass(frozen=True)
class Held:
    """The lease that a trial process shows in its pulse.

    Attributes:
        lease: Its lease.
        since: The monotonic clock when it took the lease over.
        alive_at: The monotonic clock when it last ran.
        excused_s: Seconds since then that do not count as the trial's.
    """

    lease: Lease
    since: float
    alive_at: float
    excused_s: float = 0.0


def show_held(pulse: Pulse, lease: Lease, now: float) -> None:
    """Show that this process holds a lease from now on."""
    pulse[SINCE] = pulse[ALIVE] = now
    pulse[EXCUSED_BEFORE] = pulse[EXCUSED]
    pulse[LEASE] = float(lease.trial_id * _ATTEMPTS + lease.attempt)


def show_free(pulse: Pulse) -> None:
    """Show that this process holds no lease any more."""
    pulse[LEASE] = 0.0


def held_by(pulse: Pulse) -> Held | None:
    """What a trial process holds; None if it holds nothing."""
    lease = int(pulse[LEASE])
    if not lease:
        return None
    return Held(Lease(*divmod(lease, _ATTEMPTS)), pulse[SINCE], pulse[ALIVE], excused_in(pulse))


def excused_in(pulse: Pulse) -> float:
    """Seconds since a trial process took over its lease that do not count as the trial's."""
    return pulse[EXCUSED] - pulse[EXCUSED_BEFORE]
