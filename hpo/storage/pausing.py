"""What it means that a trial is paused, for who reads trials and who writes statements.

A paused trial's row stays RUNNING, so no tool's ``ask`` takes it, and no process holds its lease. The attribute
``hpo:paused`` marks it: the transaction that ends the lease adds it, the one that gives the
trial to the worker that resumes it removes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.storage.attributes import PAUSE_AT_ATTR, PAUSED_ATTR
from hpo.storage.optuna_private import TRIAL_USER_ATTRS, TRIALS

if TYPE_CHECKING:
    from sqlalchemy import orm

#: The outcome of the attempt that ends with it, and of the trial as long as it is paused.
PAUSED: Final = "paused"
#: Of a row of Optuna's trials that is RUNNING: whether the trial is paused.
IS_PAUSED: Final = sa.exists().where(
    TRIAL_USER_ATTRS.c.trial_id == TRIALS.c.trial_id, TRIAL_USER_ATTRS.c.key == PAUSED_ATTR
)
# Statements are built once: building one costs more than to execute it.
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
    """The epoch after which a trial was paused when its study ended, which pruned it; None for any other."""
    return trial.user_attrs.get(PAUSED_ATTR) if trial.state == TrialState.PRUNED else None


def lock_paused(session: orm.Session, trial_id: int) -> bool:
    """Lock a trial until the transaction's end; whether it is paused."""
    locked = session.execute(_LOCK, {"trial": trial_id}).scalar()
    return locked == TrialState.RUNNING and bool(session.execute(_PAUSED, {"trial": trial_id}).scalar())


def forget_pause(session: orm.Session, trial_id: int, *, decision: bool) -> None:
    """Delete the mark of a trial that this transaction takes or ends.

    Args:
        session: The transaction; it has locked the trial.
        trial_id: The trial.
        decision: Delete the scheduler's decision, too.
    """
    session.execute(_FORGET_BOTH if decision else _FORGET, {"trial": trial_id})
