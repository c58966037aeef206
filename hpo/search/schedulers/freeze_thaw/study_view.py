"""`StudyView`: what one decision of the freeze-thaw scheduler reads of a study, and how it makes grants."""

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
    """A study at one decision; its properties are computed when first used.

    Args:
        standing: The study now.
        switch: The cost of a switch of trials, in epochs; None: as measured.
    """

    def __init__(self, standing: Standing, switch: float | None = None) -> None:
        self.standing = standing
        self.switch = standing.switch if switch is None else switch
        self.rng = np.random.default_rng((standing.seed, standing.decision))

    @cached_property
    def curves(self) -> list[Curve]:
        """Every trial except those of earlier studies, by number."""
        return curves_of(self.standing)

    @cached_property
    def earlier(self) -> dict[str, list[Curve]]:
        """The trials of earlier studies that have reported, by the name of their study."""
        return earlier_curves(self.standing)

    @cached_property
    def own(self) -> list[Curve]:
        """The trials that were not imported."""
        return [curve for curve in self.curves if not curve.seen.imported]

    @cached_property
    def twins(self) -> set[int]:
        """The numbers of the study's trials that another trial represents: these are not resumed."""
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
        """The encoded search space."""
        return Encoding(self.standing.space, self.standing.conditions, self.standing.where)

    @cached_property
    def proposals(self) -> Proposals:
        """Generates new points."""
        return Proposals(self.encoding, {self.encoding.key(curve.seen.params) for curve in self.own}, self.rng)

    @property
    def may_start(self) -> bool:
        """Whether the budget allows a new trial."""
        return self.standing.new_left != 0

    @property
    def may_end(self) -> bool:
        """Whether the study may end with paused trials: no new trial is allowed and epochs are not counted."""
        return not self.may_start and self.standing.epochs_left is None

    def as_value(self, loss: float) -> float:
        """A loss in the metric's own direction."""
        return loss if self.standing.minimize else -loss

    def reach(self, curve: Curve) -> int:
        """The last epoch that a trial has finished or, while it runs, has been granted."""
        return self.goal(curve) if curve.seen.state == "running" else curve.done

    def goal(self, curve: Curve) -> int:
        """The epoch at which a running trial pauses next."""
        return max(curve.done, self.horizon if curve.seen.until is None else curve.seen.until)

    def until(self, goal: int, done: int = 0) -> int | None:
        """A goal within the budget, in the form in which a grant stores it."""
        return until(self.standing, self.curves, affordable(self.standing, done, goal))

    def even(self, goal: int, kind: str) -> New | None:
        """A new trial at the next point of the even sequence; None where the budget or the space is used up."""
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
