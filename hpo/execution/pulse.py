"""Memory that a worker and the process of its trial share with their supervisor: what they show it, and it them.

Each number is written by one side alone, and read whole: no number belongs to another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from hpo.storage.ledger import Lease

#: The monotonic clock when the worker last finished a batch, or took a trial.
BEAT: Final = 0
#: 1 when it has finished an epoch of its trial, else 0.
ADVANCED: Final = 1
#: Process id of its trial process; 0 while it has none.
PROCESS: Final = 2
#: The lease that its trial process holds, as one number; 0 while it holds none.
LEASE: Final = 3
#: The monotonic clock when the trial process took that over.
SINCE: Final = 4
#: The monotonic clock when a thread of the trial process last ran: it is not stopped.
ALIVE: Final = 5
#: The monotonic clock when the supervisor last beat for that lease; the supervisor writes this one.
BEATEN: Final = 6
#: Process id of the process of the trial before, while it ends; 0 once it is gone.
ENDING: Final = 7
#: 1 while it is decided whether its trial trains on where its grant ends, else 0.
DECIDING: Final = 8
#: Seconds in all that do not count as its trials', for they could not advance; the supervisor writes this one.
EXCUSED: Final = 9
#: What that was when the trial process took over its lease.
EXCUSED_BEFORE: Final = 10
#: Numbers in a pulse.
PULSE_LENGTH: Final = 11

#: Attempts of a trial that fit into a lease's number, which a double holds exactly for any id of a trial.
_ATTEMPTS: Final = 2**20


class Pulse(Protocol):
    """Numbers in shared memory, at the places above."""

    def __getitem__(self, place: int) -> float: ...

    def __setitem__(self, place: int, value: float) -> None: ...


@dataclass(frozen=True)
class Held:
    """What a trial process holds, as it shows it.

    Attributes:
        lease: Its lease.
        since: The monotonic clock when it took that over.
        alive_at: The monotonic clock when it last ran.
        excused_s: Seconds since it took that over that do not count as the trial's.
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
    """What a trial process holds, None where that is nothing."""
    lease = int(pulse[LEASE])
    if not lease:
        return None
    return Held(Lease(*divmod(lease, _ATTEMPTS)), pulse[SINCE], pulse[ALIVE], excused_in(pulse))


def excused_in(pulse: Pulse) -> float:
    """Seconds since a trial process took over its lease that do not count as the trial's."""
    return pulse[EXCUSED] - pulse[EXCUSED_BEFORE]
