"""The members of a population, from the study's trials: which are alive, which are lost, and which lead."""

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
        curves: The trials' curves, by number.
        every: Epochs between two looks at a member, at which it may be replaced.
    """

    curves: Sequence[Curve]
    every: int

    @cached_property
    def alive(self) -> int:
        """How many members train, wait, may resume or have trained to their end.

        A trial that a person has retried after a fork had taken its place does not count.
        """
        return len(self.curves) - len(self._gone | self._replaced)

    @cached_property
    def _replaced(self) -> set[int]:
        return replaced([curve.seen for curve in self.curves])

    @cached_property
    def _gone(self) -> set[int]:
        """Members that can't train any more and have not trained to their end."""
        diverged = {curve.number for curve in self.curves if curve.seen.state == "paused" and not curve.resumable}
        return diverged | left_early([curve.seen for curve in self.curves])

    def lost(self) -> Iterator[Curve]:
        """Members that can't train any more and that no fork has replaced, the one that came furthest first.

        A member that was lost while nothing could be forked stays on this list; by the next loss it is far behind.
        """
        lost = self._gone - self._replaced
        for curve in sorted(self.curves, key=lambda each: (each.seen.epochs, each.number), reverse=True):
            if curve.number in lost:
                yield curve

    def resumable(self) -> list[Curve]:
        """The members that may resume, by number of epochs and then by number."""
        paused = [curve for curve in self.curves if curve.resumable]
        return sorted(paused, key=lambda curve: (curve.seen.epochs, curve.number))

    def has_place(self, curve: Curve) -> bool:
        """Whether a member still has its place: no fork has taken it."""
        return curve.number not in self._replaced

    def steps_up_to(self, curve: Curve) -> Iterator[int]:
        """The epochs of the looks that a member has reached, the last one first."""
        yield from range(curve.seen.epochs // self.every * self.every, 0, -self.every)

    def best(self, step: int, quantile: float) -> list[Curve]:
        """The best members at an epoch that can be forked: as many as the share of those there, at least one."""
        there = self._there(step)
        sound = [curve for curve in there if self._can_be_forked(curve, step)]
        return sound[: max(1, math.floor(quantile * len(there)))]

    def leaders(self, curve: Curve, step: int, quantile: float) -> list[Curve]:
        """The members to fork in a member's place; empty unless it is in the worst share at its epoch."""
        if step % self.every:  # paused here because the budget of epochs was used up; this is no look
            return []
        there = self._there(step)
        count = math.floor(quantile * len(there))
        if not count or curve not in there[-count:]:
            return []
        return [best for best in self.best(step, quantile) if best.rank_at(step)[:2] < curve.rank_at(step)[:2]]

    def _there(self, step: int) -> list[Curve]:
        """Members that have trained epoch ``step`` themselves, the best first."""
        there = [curve for curve in self.curves if curve.seen.inherited < step <= curve.seen.epochs]
        return sorted(there, key=lambda curve: curve.rank_at(step))

    def _can_be_forked(self, curve: Curve, step: int) -> bool:
        """Whether a member is sound, and has a checkpoint at this epoch."""
        seen = curve.seen
        on_its_way = seen.state in ("waiting", "running") and seen.until == step
        sound = math.isfinite(curve.at(step)) and math.isfinite(curve.last) and not seen.failed
        return sound and not on_its_way and not seen.taken_over
