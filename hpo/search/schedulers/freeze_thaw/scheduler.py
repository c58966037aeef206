"""`FreezeThaw`: decides which trial a free worker trains next, by a model of all curves and by halving."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpo.search.one_thread import one_thread
from hpo.search.schedulers.granting import GrantScheduler
from hpo.search.schedulers.scheduler import Next, Standing


@dataclass(frozen=True)
class FreezeThaw(GrantScheduler):
    """Trials pause at rungs; a curve model, breadth and successive halving share the study's epochs.

    The study itself sets the shares. Trials at evenly drawn points show how well the rank at one rung agrees with
    the next: where the first epochs say little, new trials pause later, and more of the even ones run on without a
    look at their values; where those that were promoted keep their ranks, fewer are promoted and more are tried. A
    model of all curves resumes paused trials or proposes new points; the less often its proposals are ahead of
    even points, the more decisions successive halving among the even points has. Where parameters depend on
    others, one in four new trials is at an even point.

    Kinds of its grants: ``"initial"`` and ``"breadth"`` (a new trial at an even point), ``"earlier"`` (a new
    trial with the parameters of one of the best of an earlier study), ``"whole"`` (an even one
    runs on unjudged), ``"promotion"`` (by successive halving), ``"model"`` and ``"rest"`` (nothing else is left
    to be done, and epochs are left, or no trial is complete).

    Attributes:
        switch: Epochs that could be trained in the time that starting or resuming a trial takes; the model stays
            on a trial rather than switch for little. None: measured by the study, to a power of four.
    """

    switch: float | None = None

    def __post_init__(self) -> None:
        """Refuse a ``switch`` that is out of range."""
        if self.switch is not None and not 0 <= self.switch < math.inf:
            raise ValueError(f"switch={self.switch} must be 0 or more epochs, and finite")

    def first(self, standing: Standing) -> int | None:
        """The first rung."""
        # SciPy takes a quarter of a second to import; opening a study need not wait for it.
        from hpo.search.schedulers.freeze_thaw.mixture import Mixture
        from hpo.search.schedulers.freeze_thaw.study_view import StudyView

        return Mixture(StudyView(standing, self.switch)).first_rung()

    def next(self, standing: Standing) -> Next:
        """What a free worker does; see `Scheduler`."""
        from hpo.search.schedulers.freeze_thaw.mixture import Mixture
        from hpo.search.schedulers.freeze_thaw.study_view import StudyView

        with one_thread():
            return Mixture(StudyView(standing, self.switch)).answer()
