"""`FreezeThaw`: which trial a free worker trains next, by a curve model and by successive halving."""

from __future__ import annotations

from dataclasses import dataclass

import optuna

from hpo.search.schedulers.scheduler import Decision, Next, Standing


@dataclass(frozen=True)
class FreezeThaw:
    """Trials pause at rungs; a curve model, breadth and successive halving share the study's epochs.

    Kinds of its grants: ``"initial"``, ``"breadth"`` (a new trial, drawn evenly), ``"promotion"``, ``"model"``.
    """

    def decide(self, trial: optuna.Trial, step: int) -> Decision:  # noqa: ARG002 - nothing stops below a rung
        """CONTINUE; see `Scheduler`."""
        return Decision.CONTINUE

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

        return Mixture(StudyView(standing)).answer()
