"""The study's budget: how many trials it may have, and which of them count.

A trial's row is its claim; there is no counter that could leak. Trials that were finished elsewhere and added
(`optuna.Study.add_trial`) carry a mark and don't count.
"""

import copy
import json
from typing import cast

import sqlalchemy as sa
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial
from sqlalchemy import orm

from hpo.errors import BudgetExhaustedError

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
    count = sa.select(sa.func.count()).select_from(_TRIALS).where(_TRIALS.c.study_id == study_id)
    query = sa.select(_STUDY_ATTRS.c.value_json, count.scalar_subquery()).where(
        _STUDY_ATTRS.c.study_id == study_id, _STUDY_ATTRS.c.key == BUDGET_ATTR
    )
    row = session.execute(query).first()
    budget = None if row is None else json.loads(row[0])
    if row is None or budget is None or row[1] < budget:
        return
    imported = (
        sa.select(sa.func.count())
        .join_from(_TRIALS, _SYSTEM_ATTRS, _SYSTEM_ATTRS.c.trial_id == _TRIALS.c.trial_id)
        .where(_TRIALS.c.study_id == study_id, _SYSTEM_ATTRS.c.key == IMPORTED_ATTR)
    )
    if row[1] - session.execute(imported).scalar_one() >= budget:
        raise BudgetExhaustedError(f"all {budget} trials of the study have been claimed")
