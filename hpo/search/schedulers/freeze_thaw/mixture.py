"""The mixture: which of breadth, successive halving and the model decides."""

from __future__ import annotations

import math
from typing import Final

from hpo.search.schedulers.freeze_thaw.choice import ModelChoice
from hpo.search.schedulers.freeze_thaw.study_view import StudyView
from hpo.search.schedulers.rungs import ladder, promotion
from hpo.search.schedulers.scheduler import New, Next, Wait, Why

#: Of so many that have come to a rung one is promoted.
_FACTOR: Final = 3
#: Trials before the model is asked, at least; and trials with a finite report.
_INITIAL: Final = 6
_SEEN: Final = 4
#: How often successive halving decides in place of the model.
_HEDGE: Final = 0.25
#: The first rung.
_FIRST: Final = 3


class Mixture:
    """One decision.

    Args:
        view: The study.
    """

    def __init__(self, view: StudyView) -> None:
        self._view = view

    def first_rung(self) -> int | None:
        """Where a trial that a person has enqueued pauses first."""
        return self._view.until(_FIRST)

    def answer(self) -> Next:
        """What a free worker does."""
        if self._view.standing.epochs_left == 0:
            return Wait()
        return self._initial() or self._granted() or self._last_resort()

    def _initial(self) -> New | None:
        if len(self._view.own) < max(self._view.standing.workers, _INITIAL):
            return self._view.even(_FIRST, "initial")
        return None

    def _granted(self) -> Next | None:
        if self._view.rng.random() < _HEDGE:
            return self._halving() or self._model()
        return self._model() or self._halving()

    def _model(self) -> Next | None:
        if sum(math.isfinite(curve.best) for curve in self._view.curves) < _SEEN:
            return None
        return ModelChoice(self._view, _FIRST).best()

    def _halving(self) -> Next | None:
        rungs = ladder(self._view.horizon, _FACTOR, _FIRST)
        if found := promotion(self._view.curves, rungs, _FACTOR):
            return self._view.resume(*found, Why("promotion"))
        return self._view.even(_FIRST, "breadth")

    def _last_resort(self) -> Next:
        """The space is used up, and nothing is paused that might win: the study's sampler draws a duplicate."""
        if self._view.may_start:
            return New(None, self._view.until(_FIRST), Why("breadth"))
        return Wait()
