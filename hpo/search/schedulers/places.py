"""Places in a population of trials: which trials left theirs early, and which places forks have taken."""

from __future__ import annotations

from collections.abc import Sequence

from hpo.search.schedulers.seen import Seen


def left_early(trials: Sequence[Seen]) -> set[int]:
    """Numbers of the trials that ended before their training did, and whose places a fork may take.

    A fork that ended before its first epoch was perhaps lost, or its parameters did not fit the machine, so a
    second fork with other parameters may take its place. If that one also ends before its first epoch, there is no
    third: code that fails in each fork would use up the study.
    """
    at_once = {each.number for each in trials if _ended_at_once(each)}
    given_up = {each.number for each in trials if each.number in at_once and each.replaces in at_once}
    return {each.number for each in trials if each.state == "ended" and not each.whole} - given_up


def replaced(trials: Sequence[Seen]) -> set[int]:
    """Numbers of the trials whose places forks have taken."""
    return {each.replaces for each in trials if each.replaces is not None}


def _ended_at_once(seen: Seen) -> bool:
    """Whether a trial is a fork that ended before its first epoch, but not by diverging in it."""
    return seen.state == "ended" and 0 < seen.inherited == seen.epochs and not seen.diverged
