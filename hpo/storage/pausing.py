"""What it means that a trial is paused.

A paused trial's row stays RUNNING, so no tool's ``ask`` takes it, and nobody holds its lease. The attribute
``hpo:paused`` tells it from a trial that runs: the transaction that ends the lease adds it, the one that gives the
trial to the worker that resumes it removes it.
"""

from __future__ import annotations

from optuna.trial import FrozenTrial, TrialState

from hpo.storage.attributes import PAUSED_ATTR


def paused_at(trial: FrozenTrial) -> int | None:
    """The epoch after which a trial is paused; None for a trial that is not paused."""
    return trial.user_attrs.get(PAUSED_ATTR) if trial.state == TrialState.RUNNING else None
