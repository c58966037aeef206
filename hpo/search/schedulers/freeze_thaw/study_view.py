"""A study at one decision of the freeze-thaw scheduler, and the grants that it may answer with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from hpo.search.schedulers.curves import affordable, curves_of, earlier_curves, horizon_of, until
from hpo.search.schedulers.freeze_thaw.earlier import Earlier, earlier_of
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.freeze_thaw.proposals import Proposals
from hpo.search.schedulers.freeze_thaw.twins import twins
from hpo.search.schedulers.scheduler import New, Resume, Standing, Why
from hpo.search.schedulers.seen import Curve


class StudyView:
    """What one decision reads of a study, each thing computed when it is first asked for.

    Args:
        standing: The study now.
        switch: Epochs that a switch of trials takes; None: as measured.
    """

    def __init__(self, standing: Standing, switch: float | None = None) -> None:
        self.standing = standing
        self.switch = standing.switch if switch is None else switch
        self.rng = np.random.default_rng((standing.seed, standing.decision))

    @cached_property
    def curves(self) -> list[Curve]:
        """Every trial but those of earlier studies, by number."""
        return curves_of(self.standing)

    @cached_property
    def earlier(self) -> dict[str, list[Curve]]:
        """The trials of earlier studies that have reported, by the study's name."""
        return earlier_curves(self.standing)

    @cached_property
    def own(self) -> list[Curve]:
        """The trials that were not imported."""
        return [curve for curve in self.curves if not curve.seen.imported]

    @cached_property
    def twins(self) -> set[int]:
        """The numbers of the study's trials that another one stands for: they are not resumed."""
        return twins(self.own)

    @cached_property
    def horizon(self) -> int:
        """Epochs of a whole trial, or a guess."""
        return horizon_of(self.standing, self.curves)

    @cached_property
    def learnt(self) -> Earlier:
        """What was learnt from the trials of earlier studies."""
        return earlier_of(self.earlier, self.encoding, self.horizon, self.standing.state.get("earlier", {}))

    @cached_property
    def encoding(self) -> Encoding:
        """The space."""
        return Encoding(self.standing.space, self.standing.conditions, self.standing.where)

    @cached_property
    def proposals(self) -> Proposals:
        """Where new points come from."""
        return Proposals(self.encoding, {self.encoding.key(curve.seen.params) for curve in self.own}, self.rng)

    @property
    def may_start(self) -> bool:
        """Whether the budget allows a new trial."""
        return self.standing.new_left != 0

    @property
    def may_end(self) -> bool:
        """Whether the study may end before all of its trials have: it has had them all, and counts no epochs."""
        return not self.may_start and self.standing.epochs_left is None

    def as_value(self, loss: float) -> float:
        """A loss in the metric's own direction."""
        return loss if self.standing.minimize else -loss

    def reach(self, curve: Curve) -> int:
        """The last epoch that a trial has had, or has been granted."""
        return self.goal(curve) if curve.seen.state == "running" else curve.done

    def goal(self, curve: Curve) -> int:
        """Where a running trial pauses next."""
        return max(curve.done, self.horizon if curve.seen.until is None else curve.seen.until)

    def until(self, goal: int, done: int = 0) -> int | None:
        """A goal within the budget, as a grant has it."""
        return until(self.standing, self.curves, affordable(self.standing, done, goal))

    def even(self, goal: int, kind: str) -> New | None:
        """A new trial at the next point of an even sequence; None where the budget or the space is used up."""
        if not self.may_start:
            return None
        params = self.proposals.spread(len(self.own), self.standing.seed)
        return None if params is None else self.new(params, goal, Why(kind))

    def new(self, params: Mapping[str, Any], goal: int, why: Why, state: Mapping[str, Any] | None = None) -> New:
        """A grant for a new trial."""
        return New(params, self.until(goal), why, state)

    def resume(self, curve: Curve, goal: int, why: Why, state: Mapping[str, Any] | None = None) -> Resume:
        """A grant for a paused trial."""
        return Resume(curve.number, self.until(goal, curve.done), why, state)
