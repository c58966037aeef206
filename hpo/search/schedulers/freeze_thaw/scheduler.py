"""`FreezeThaw`: which trial a free worker trains next, by a curve model and by successive halving."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from threadpoolctl import ThreadpoolController

from hpo.search.schedulers.granting import GrantScheduler
from hpo.search.schedulers.scheduler import Next, Standing


@dataclass(frozen=True)
class FreezeThaw(GrantScheduler):
    """Trials pause at rungs; a curve model, breadth and successive halving share the study's epochs.

    Kinds of its grants: ``"initial"``, ``"breadth"`` (a new trial, drawn evenly), ``"promotion"``, ``"model"``.
    """

    def first(self, standing: Standing) -> int | None:
        """The first rung."""
        # SciPy takes a quarter of a second to import, which opening a study needs not wait for.
        from hpo.search.schedulers.freeze_thaw.mixture import Mixture
        from hpo.search.schedulers.freeze_thaw.study_view import StudyView

        return Mixture(StudyView(standing)).first_rung()

    def next(self, standing: Standing) -> Next:
        """What a free worker does; see `Scheduler`."""
        from hpo.search.schedulers.freeze_thaw.mixture import Mixture
        from hpo.search.schedulers.freeze_thaw.study_view import StudyView

        with _libraries().limit(limits=1, user_api="blas"):
            return Mixture(StudyView(standing)).answer()


@functools.cache
def _libraries() -> ThreadpoolController:
    """Of numerics. The model's matrices are small: threads would cost more than they bring."""
    return ThreadpoolController()
