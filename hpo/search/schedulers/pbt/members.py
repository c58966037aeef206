"""A population as its trials show it: who is alive, who is lost, and who leads at an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpo.search.schedulers.places import left_early, replaced
from hpo.search.schedulers.seen import Curve


@dataclass(frozen=True)
class Members:
    """The study's own trials as members of a population.

    Attributes:
        curves: Each of them, by number.
        every: Epochs between two looks at a member.
    """

    curves: Sequence[Curve]
    every: int

    @cached_property
    def alive(self) -> int:
        """Members that train, wait or may resume, and those that have trained to their end.

        One that a person has let train again after a fork has taken its place is in no place.
        """
        return len(self.curves) - len(self._gone | self._replaced)

    @cached_property
    def _replaced(self) -> set[int]:
        return replaced([curve.seen for curve in self.curves])

    @cached_property
    def _gone(self) -> set[int]:
        """Members that can't train any more, and did not come to their end."""
        diverged = {curve.number for curve in self.curves if curve.seen.state == "paused" and not curve.resumable}
        return diverged | left_early([curve.seen for curve in self.curves])

    def lost(self) -> Iterator[Curve]:
        """Members that can't train any more and that no fork has replaced, the one that came furthest first.

        One that was lost when nothing could be forked yet stays among them: it is far behind by the next loss.
        """
        lost = self._gone - self._replaced
        for curve in sorted(self.curves, key=lambda each: (each.seen.epochs, each.number), reverse=True):
            if curve.number in lost:
                yield curve

    def resumable(self) -> list[Curve]:
        """The paused members, that with the fewest epochs first, the earlier of equals."""
        paused = [curve for curve in self.curves if curve.resumable]
        return sorted(paused, key=lambda curve: (curve.seen.epochs, curve.number))

    def has_place(self, curve: Curve) -> bool:
        """Whether a fork may take a member's place: none has taken it."""
        return curve.number not in self._replaced

    def steps_up_to(self, curve: Curve) -> Iterator[int]:
        """The epochs of looks that a member has come to, the last one first."""
        yield from range(curve.seen.epochs // self.every * self.every, 0, -self.every)

    def best(self, step: int, quantile: float) -> list[Curve]:
        """Of the members that have come to an epoch as many as the share, one at least: the best to be forked."""
        there = self._there(step)
        sound = [curve for curve in there if self._can_be_forked(curve, step)]
        return sound[: max(1, math.floor(quantile * len(there)))]

    def leaders(self, curve: Curve, step: int, quantile: float) -> list[Curve]:
        """Whom to fork in a member's place; empty where it is not among the worst share at its epoch."""
        if step % self.every:  # where the epochs of the study were used up: it was looked at before
            return []
        there = self._there(step)
        count = math.floor(quantile * len(there))
        if not count or curve not in there[-count:]:
            return []
        return [best for best in self.best(step, quantile) if best.rank_at(step)[:2] < curve.rank_at(step)[:2]]

    def _there(self, step: int) -> list[Curve]:
        """Members that have trained the epoch before ``step`` themselves, the best first."""
        there = [curve for curve in self.curves if curve.seen.inherited < step <= curve.seen.epochs]
        return sorted(there, key=lambda curve: curve.rank_at(step))

    def _can_be_forked(self, curve: Curve, step: int) -> bool:
        """Whether a member is sound, and has paused or ended with a checkpoint there."""
        seen = curve.seen
        on_its_way = seen.state in ("waiting", "running") and seen.until == step
        sound = math.isfinite(curve.at(step)) and math.isfinite(curve.last) and not seen.failed
        return sound and not on_its_way and not seen.taken_over
