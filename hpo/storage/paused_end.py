"""The end of a paused trial: it is pruned at its last epoch."""

from __future__ import annotations

import math

import sqlalchemy as sa
from optuna.trial import TrialState
from sqlalchemy import orm

from hpo.storage.guarded import set_state
from hpo.storage.optuna_private import REPORTS, models
from hpo.storage.pausing import lock_paused


def prune_paused_trial(session: orm.Session, trial_id: int, *, single: bool = True) -> int | None:
    """Store a paused trial as pruned, with the value that it has reported last, as `optuna.Study.tell` does.

    Args:
        session: The transaction.
        trial_id: The trial.
        single: Whether the study has a single objective; with several, or if the value is NaN, no value is stored.

    Returns:
        The last epoch that it has reported, 0 if none; None if it is not paused, and nothing is stored.
    """
    if not lock_paused(session, trial_id):
        return None
    columns = (REPORTS.c.step, REPORTS.c.intermediate_value, REPORTS.c.intermediate_value_type)
    latest = sa.select(*columns).where(REPORTS.c.trial_id == trial_id).order_by(REPORTS.c.step.desc()).limit(1)
    row = session.execute(latest).one_or_none()
    stored_as = models.TrialIntermediateValueModel.stored_repr_to_intermediate_value
    values = [] if row is None or not single else [stored_as(row[1], row[2])]
    set_state(session, trial_id, TrialState.PRUNED, [] if any(map(math.isnan, values)) else values)
    return 0 if row is None else int(row[0])
