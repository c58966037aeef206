"""Defines how a paused trial is stored, for code that reads trials and code that builds statements.

A paused trial's row stays RUNNING, so no tool's ``ask`` takes it, but no process holds its lease. The attribute
``hpo:paused`` marks it: the transaction that ends the lease adds the mark, and the one that gives the trial to the
worker that resumes it removes the mark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.storage.attributes import PAUSE_AT_ATTR, PAUSED_ATTR
from hpo.storage.optuna_private import TRIAL_USER_ATTRS, TRIALS

if TYPE_CHECKING:
    from sqlalchemy import orm

#: The outcome of an attempt that ends with a pause, and of the trial as long as it is paused.
PAUSED: Final = "paused"
#: Condition on a RUNNING row of Optuna's trials: the trial is paused.
IS_PAUSED: Final = sa.exists().where(
    TRIAL_USER_ATTRS.c.trial_id == TRIALS.c.trial_id, TRIAL_USER_ATTRS.c.key == PAUSED_ATTR
)
# Statements are built once, because building one costs more than executing it.
_TRIAL = sa.bindparam("trial", type_=sa.Integer)
_LOCK = sa.select(TRIALS.c.state).where(TRIALS.c.trial_id == _TRIAL).with_for_update()
_PAUSED = sa.select(IS_PAUSED).where(TRIALS.c.trial_id == _TRIAL)
_MARK = sa.delete(TRIAL_USER_ATTRS).where(TRIAL_USER_ATTRS.c.trial_id == _TRIAL)
_FORGET = _MARK.where(TRIAL_USER_ATTRS.c.key == PAUSED_ATTR)
_FORGET_BOTH = _MARK.where(TRIAL_USER_ATTRS.c.key.in_([PAUSED_ATTR, PAUSE_AT_ATTR]))


def paused_at(trial: FrozenTrial) -> int | None:
    """The epoch after which a trial is paused; None for a trial that is not paused."""
    return trial.user_attrs.get(PAUSED_ATTR) if trial.state == TrialState.RUNNING else None


def pruned_at_end(trial: FrozenTrial) -> int | None:
    """The epoch after which a trial was paused when its study's end pruned it; None for any other trial."""
    return trial.user_attrs.get(PAUSED_ATTR) if trial.state == TrialState.PRUNED else None


def lock_paused(session: orm.Session, trial_id: int) -> bool:
    """Lock a trial until the transaction's end; returns whether it is paused."""
    locked = session.execute(_LOCK, {"trial": trial_id}).scalar()
    return locked == TrialState.RUNNING and bool(session.execute(_PAUSED, {"trial": trial_id}).scalar())


def forget_pause(session: orm.Session, trial_id: int, *, decision: bool) -> None:
    """Delete the mark of a paused trial that this transaction takes or ends.

    Args:
        session: The transaction; it has locked the trial.
        trial_id: The trial.
        decision: Also delete the scheduler's decision to pause it.
    """
    session.execute(_FORGET_BOTH if decision else _FORGET, {"trial": trial_id})
