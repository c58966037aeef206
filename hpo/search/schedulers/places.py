"""Places in a population: which trials have left theirs early, and in which a fork stands."""

from __future__ import annotations

from collections.abc import Sequence

from hpo.search.schedulers.seen import Seen


def left_early(trials: Sequence[Seen]) -> set[int]:
    """Numbers of the trials that ended before their training did, and whose places a fork may take.

    A fork that ended before its first epoch was perhaps lost, or its parameters did not fit the machine: another
    one is tried in its place, with other parameters. Where that one ends so too, there is no third: code that
    fails with each fork would use up the study.
    """
    at_once = {each.number for each in trials if _ended_at_once(each)}
    given_up = {each.number for each in trials if each.number in at_once and each.replaces in at_once}
    return {each.number for each in trials if each.state == "ended" and not each.whole} - given_up


def replaced(trials: Sequence[Seen]) -> set[int]:
    """Numbers of the trials in whose places forks stand, or stood."""
    return {each.replaces for each in trials if each.replaces is not None}


def _ended_at_once(seen: Seen) -> bool:
    """Whether it is a fork that ended before its first epoch, but not by diverging in it."""
    return seen.state == "ended" and 0 < seen.inherited == seen.epochs and not seen.diverged
