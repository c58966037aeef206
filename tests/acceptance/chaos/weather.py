"""What a storm is made of, and how hard it blows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Fault(StrEnum):
    """What can happen."""

    WORKER_KILLED = "worker killed"
    WORKER_STOPPED = "worker stopped for a while"
    WORKER_TERMINATED = "worker asked to end"
    SUPERVISOR_KILLED = "supervisor killed"
    SUPERVISOR_STOPPED = "supervisor stopped for a while"
    SUPERVISOR_TERMINATED = "supervisor asked to end"
    SUPERVISOR_TERMINATED_TWICE = "supervisor asked twice"
    ALL_KILLED = "supervisor and workers killed"
    DATABASE_RESTARTED = "database restarted"
    FAILED_RETRIED = "failed trials retried"
    MINE = "worker killed between two callbacks"


#: How often each is drawn; the database is restarted, and failed trials are retried, as often as one asks, and
#: workers step on mines by chance.
_SHARES: Final[Mapping[Fault, int]] = MappingProxyType(
    {
        Fault.WORKER_KILLED: 6,
        Fault.WORKER_STOPPED: 5,
        Fault.WORKER_TERMINATED: 3,
        Fault.SUPERVISOR_KILLED: 2,
        Fault.SUPERVISOR_STOPPED: 1,
        Fault.SUPERVISOR_TERMINATED: 1,
        Fault.SUPERVISOR_TERMINATED_TWICE: 1,
        Fault.ALL_KILLED: 1,
    }
)


@dataclass(frozen=True)
class Weather:
    """How a storm blows.

    Attributes:
        kills: Faults, restarts of the database, retries and mines aside.
        restarts: Restarts of the database.
        retries: How often a person has all trials that have failed retried, as `hpo retry --failed` does.
        seed: Of the kinds of faults, their times and their victims.
        workers: Of each supervisor.
        pause: Seconds between two faults, at least and at most.
        longest_stop: Seconds for which a process is stopped, at most.
        delay: Seconds that each batch sleeps.
        pauses: Whether the study's trials are paused and resumed, by `tests.acceptance.chaos.pausing.PauseOften`.
        mines: How likely a worker kills itself in each of the hooks where that would hurt most.
        limit: Seconds after which a storm that does not end has failed.
    """

    kills: int
    restarts: int = 0
    retries: int = 0
    seed: int = 0
    workers: int = 2
    pause: tuple[float, float] = (0.05, 1.0)
    longest_stop: float = 6.0
    delay: float = 0.01
    pauses: bool = False
    mines: float = 0.005
    limit: float = 600.0


def faults(weather: Weather, chance: random.Random) -> Iterator[Fault]:
    """The faults in their order: each deck of cards is dealt whole before it is shuffled again."""
    deck: list[Fault] = []
    restarts = Counter(chance.randrange(weather.kills) for _ in range(weather.restarts))
    retries = Counter(chance.randrange(weather.kills) for _ in range(weather.retries))
    for at in range(weather.kills):
        yield from [Fault.DATABASE_RESTARTED] * restarts[at]
        yield from [Fault.FAILED_RETRIED] * retries[at]
        if not deck:
            deck = [fault for fault, share in _SHARES.items() for _ in range(share)]
            chance.shuffle(deck)
        yield deck.pop()
