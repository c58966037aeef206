"""Reads and checks the settings after ``slurm:`` in `--on`: options of sbatch, and a few of our own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pydantic_core import PydanticCustomError

from hpo.config.schema_types import MAX_PROCESSES, in_seconds
from hpo.execution.engines.by_name import Address

#: Options of sbatch that are passed on unchanged.
_PASSED: Final = (
    "partition",
    "account",
    "qos",
    "reservation",
    "constraint",
    "nodelist",
    "exclude",
    "gres",
    "licenses",
)
_EXCLUSIVE: Final = "exclusive"
#: The keys of `--on slurm:…`.
KEYS: Final = (*_PASSED, _EXCLUSIVE, "nodes", "time", "grace")
#: Options that a driver does not get, because it trains nothing.
OF_AGENTS: Final = (_EXCLUSIVE, "gres", "licenses")
_GRACE: Final = 120
_MOST_GRACE: Final = 65_535  # of sbatch --signal
#: Slurm's form DAYS-HOURS:MINUTES:SECONDS; its shorter forms mean something else to Slurm than to a person.
_CLOCK: Final = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")


@dataclass(frozen=True)
class Settings:
    """Where and how agents are placed.

    Attributes:
        options: Options of sbatch; an empty value means an option without one.
        agents: How many agents there are by default: the value of the key `nodes`.
        time: Seconds that a job may take; None: as long as its partition allows.
        grace: Slurm warns an agent this many seconds before the end of that time.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    agents: int = 1
    time: int | None = None
    grace: int = _GRACE


def settings_of(address: Address) -> Settings:
    """The settings of an address.

    Raises:
        InputError: A value does not fit.
    """
    if address.place:
        fix = f"write slurm:partition={address.place}, or slurm alone for the default partition"
        raise address.error(f"`{address.place}` is no key with a value", fix)
    options = {key: value for key, value in address.options.items() if key in _PASSED}
    if any(mark in options.get("nodelist", "") for mark in ",[/"):
        fix = "name one node; `exclude`, `constraint` and `partition` choose among several"
        raise address.error("each agent runs on one node, and a job gets all that are listed", fix, key="nodelist")
    if _EXCLUSIVE in address.options:
        options |= _exclusive(address, address.options[_EXCLUSIVE])
    time = _seconds(address, "time") if "time" in address.options else None
    grace = _seconds(address, "grace") if "grace" in address.options else _GRACE
    if grace > _MOST_GRACE:
        fix = f"give {_MOST_GRACE} s at most, which is Slurm's most"
        raise address.error(f"Slurm can't warn an agent {grace} s before its end", fix, key="grace")
    if time is not None and grace >= time:
        fix = "give a time well above the grace in which an agent checkpoints, such as time=4h,grace=2m"
        raise address.error(f"an agent of {time} s would be warned {grace} s before its end", fix, key="time")
    return Settings(options, _nodes(address), time, grace)


def _nodes(address: Address) -> int:
    value = address.options.get("nodes", "1")
    if not value.isdecimal() or not 0 < int(value) <= MAX_PROCESSES:
        fix = f"write a number from 1 to {MAX_PROCESSES}: of agents, each on one node"
        raise address.error(f"{value!r} is not a number of nodes", fix, key="nodes")
    return int(value)


def _exclusive(address: Address, value: str) -> dict[str, str]:
    if value not in ("yes", "no"):
        fix = "write exclusive=yes for agents that have their node to themselves"
        raise address.error(f"{value!r} is neither yes nor no", fix, key=_EXCLUSIVE)
    return {_EXCLUSIVE: ""} if value == "yes" else {}


def _seconds(address: Address, key: str) -> int:
    value = address.options[key]
    if clock := _CLOCK.fullmatch(value):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    try:
        length = in_seconds(value)
    except PydanticCustomError:
        length = 0
    if length < 1 or value.isdecimal():  # a bare number means seconds in a study file, but minutes to sbatch
        fix = f"write {key}=4h, {key}=1h30m or {key}=1:30:00"
        raise address.error(f"{value!r} is not a duration", fix, key=key)
    return round(length)
