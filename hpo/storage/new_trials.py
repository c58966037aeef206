"""Rows of new trials: inserts them, and finds out whether an earlier try has inserted one after all."""

import copy
import json
from datetime import datetime
from typing import Any, cast

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import orm

from hpo.storage.attributes import IMPORTED_ATTR
from hpo.storage.optuna_private import PARAMS, TRIAL_SYSTEM_ATTRS, TRIAL_USER_ATTRS, TRIALS, models, started_utc


def marked(template: FrozenTrial, *, budgeted: bool) -> FrozenTrial:
    """The template of a new trial, with the mark of an imported trial if it should have it, and without it if not.

    Only imports into a study with a budget are marked: elsewhere a trial is stored exactly as it was given.
    """
    imported = budgeted and template.state.is_finished()
    if imported == (IMPORTED_ATTR in template.system_attrs):
        return template
    attrs = {key: value for key, value in template.system_attrs.items() if key != IMPORTED_ATTR}
    changed = copy.copy(template)
    changed.system_attrs = attrs | {IMPORTED_ATTR: True} if imported else attrs
    return changed


def insert_running(session: orm.Session, study_id: int, number: int) -> models.TrialModel:
    """Add a trial without parameters that runs from now on, in one statement.

    Returns:
        Its row, which the session does not know.
    """
    trial = models.TrialModel(
        number=number, study_id=study_id, state=TrialState.RUNNING, datetime_start=datetime.now()
    )
    row = {
        "number": number,
        "study_id": study_id,
        "state": TrialState.RUNNING,
        "datetime_start": started_utc(trial),
    }
    result = cast("sa.CursorResult[tuple[()]]", session.execute(sa.insert(TRIALS), row))
    trial.trial_id = cast("tuple[int]", result.inserted_primary_key)[0]
    return trial


def as_shown(row: models.TrialModel) -> FrozenTrial:
    """The FrozenTrial of a running trial that has no content yet."""
    return FrozenTrial(
        trial_id=cast("int", row.trial_id),
        number=cast("int", row.number),
        state=TrialState.RUNNING,
        value=None,
        datetime_start=row.datetime_start,
        datetime_complete=None,
        params={},
        distributions={},
        user_attrs={},
        system_attrs={},
        intermediate_values={},
    )


def is_stored_as(session: orm.Session, trial_id: int, study_id: int, template: FrozenTrial | None) -> bool:
    """Whether a trial is the one that was added with this template; None: without content.

    The id alone does not prove it: a server that has crashed reuses the ids of rows that were not committed. A
    queued trial, which has content, may have been taken by a worker by now, which may have stored more.
    """
    row = session.get(models.TrialModel, trial_id)
    state = TrialState.RUNNING if template is None else template.state
    content = _content(template)
    may_be_taken = state == TrialState.WAITING and any(map(len, content.values()))
    if row is None or row.study_id != study_id or not (may_be_taken or row.state == state):
        return False
    for (key, value), given in content.items():
        query = sa.select(key, value).where(key.table.c.trial_id == trial_id)
        found = dict(cast("list[tuple[str, object]]", session.execute(query).all()))
        if not (found.items() >= given.items() if may_be_taken else found == given):
            return False
    return True


def _content(template: FrozenTrial | None) -> dict[tuple[sa.Column[Any], sa.Column[Any]], dict[str, Any]]:
    """What is stored of a template, by the columns that hold the names and the values."""
    params, user, system = (
        ({}, {}, {}) if template is None else (_internal(template), template.user_attrs, template.system_attrs)
    )
    attrs = {TRIAL_USER_ATTRS: user, TRIAL_SYSTEM_ATTRS: system}
    return {(PARAMS.c.param_name, PARAMS.c.param_value): params} | {
        (table.c.key, table.c.value_json): {key: json.dumps(value) for key, value in each.items()}
        for table, each in attrs.items()
    }


def _internal(template: FrozenTrial) -> dict[str, Any]:
    return {name: template.distributions[name].to_internal_repr(value) for name, value in template.params.items()}
