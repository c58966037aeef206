"""The study's budget: how many trials it may have, and which of them count.

A trial's row is its claim; there is no counter that could leak. Trials that were finished elsewhere and added
(`optuna.Study.add_trial`) carry a mark and don't count.
"""

import copy
import json
from typing import cast

import sqlalchemy as sa
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import orm

from hpo.errors import BudgetExhaustedError
from hpo.ledger import Executor

BUDGET_ATTR = "hpo:n_trials"
IMPORTED_ATTR = "hpo:imported"

_TRIALS = cast("sa.Table", models.TrialModel.__table__)
_STUDY_ATTRS = cast("sa.Table", models.StudyUserAttributeModel.__table__)
_SYSTEM_ATTRS = cast("sa.Table", models.TrialSystemAttributeModel.__table__)


def marked(template: FrozenTrial, *, budgeted: bool) -> FrozenTrial:
    """The template of a new trial with the mark that it should have.

    Only a budgeted study's imports are marked: elsewhere a trial is stored exactly as it was given.
    """
    imported = budgeted and template.state.is_finished()
    if imported == (IMPORTED_ATTR in template.system_attrs):
        return template
    attrs = {key: value for key, value in template.system_attrs.items() if key != IMPORTED_ATTR}
    changed = copy.copy(template)
    changed.system_attrs = attrs | {IMPORTED_ATTR: True} if imported else attrs
    return changed


def refuse_beyond_budget(session: orm.Session, study_id: int) -> None:
    """BudgetExhaustedError if the study's trials, imported ones aside, have reached its number.

    The caller holds the study's row lock (SQLite: the write lock), so nobody else is numbering a trial.
    """
    left = unclaimed(session, study_id)
    if left is not None and left <= 0:
        raise BudgetExhaustedError("all trials of the study have been claimed")


def unclaimed(conn: Executor, study_id: int) -> int | None:
    """How many trials may still be created, below zero where the budget was lowered; None without a budget."""
    count = sa.select(sa.func.count()).select_from(_TRIALS).where(_TRIALS.c.study_id == study_id)
    query = sa.select(_STUDY_ATTRS.c.value_json, count.scalar_subquery()).where(
        _STUDY_ATTRS.c.study_id == study_id, _STUDY_ATTRS.c.key == BUDGET_ATTR
    )
    row = cast("tuple[str, int] | None", conn.execute(query).first())
    budget = None if row is None else json.loads(row[0])
    if row is None or budget is None:
        return None
    if row[1] < budget:
        return int(budget - row[1])
    imported = (
        sa.select(sa.func.count())
        .join_from(_TRIALS, _SYSTEM_ATTRS, _SYSTEM_ATTRS.c.trial_id == _TRIALS.c.trial_id)
        .where(_TRIALS.c.study_id == study_id, _SYSTEM_ATTRS.c.key == IMPORTED_ATTR)
    )
    return int(budget - row[1] + cast("int", conn.execute(imported).scalar_one()))


def claimable(conn: Executor, study_id: int) -> int:
    """How many trials a worker could take: those that wait, and those that nobody has claimed yet."""
    waiting = sa.select(sa.func.count()).where(
        _TRIALS.c.study_id == study_id, _TRIALS.c.state == TrialState.WAITING
    )
    return cast("int", conn.execute(waiting).scalar_one()) + max(0, unclaimed(conn, study_id) or 0)
