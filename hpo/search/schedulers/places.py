"""Places in a population: which trials have left theirs early, and in which a fork stands."""

from __future__ import annotations

from collections.abc import Sequence

from hpo.search.schedulers.seen import Seen


def left_early(trials: Sequence[Seen]) -> set[int]:
    """Numbers of the trials that ended before their training did, and whose places a fork may take.

    A fork that ended before its first epoch is not among them: what would take its place may fail as well, again
    and again.
    """
    return {
        each.number
        for each in trials
        if each.state == "ended" and not each.whole and not _has_failed_at_once(each)
    }


def replaced(trials: Sequence[Seen]) -> set[int]:
    """Numbers of the trials in whose places forks stand, or stood."""
    return {each.replaces for each in trials if each.replaces is not None}


def _has_failed_at_once(seen: Seen) -> bool:
    return seen.state == "ended" and 0 < seen.inherited == seen.epochs
