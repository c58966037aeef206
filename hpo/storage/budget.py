"""The study's budget: how many trials it may have, and which of them count.

A trial's row is its claim on the budget, so there is no counter that could get out of step. Trials that were
finished elsewhere and added (`optuna.Study.add_trial`) carry a mark and don't count.
"""

import json
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple, cast

import sqlalchemy as sa
from optuna.trial import TrialState
from sqlalchemy import orm

from hpo.errors import BudgetExhaustedError
from hpo.storage.attributes import BUDGET_ATTR, EPOCHS_ATTR, IMPORTED_ATTR
from hpo.storage.ledger import Executor
from hpo.storage.optuna_private import STUDIES, STUDY_USER_ATTRS, TRIAL_SYSTEM_ATTRS, TRIALS, models

#: A study's budgets of trials and of epochs, by the attributes that hold them; None means no limit. A budget that
#: the study has never been given is missing.
Budgets = Mapping[str, int | None]
_KEYS: Final = (BUDGET_ATTR, EPOCHS_ATTR)
_LOCK = (
    sa.select(STUDIES.c.study_id)
    .where(STUDIES.c.study_id == sa.bindparam("study", type_=sa.Integer))
    .with_for_update()
)


def lock_study(session: orm.Session, study_id: int) -> None:
    """Lock a study's row until the transaction's end, so no other process numbers a trial; KeyError if none."""
    if session.execute(_LOCK, {"study": study_id}).first() is None:
        raise KeyError(models.NOT_FOUND_MSG)


def budgets_of(conn: Executor, study_id: int) -> Budgets:
    """The study's budgets."""
    query = sa.select(STUDY_USER_ATTRS.c.key, STUDY_USER_ATTRS.c.value_json)
    rows = conn.execute(query.where(*_are_budgets(study_id)))
    return {row.key: json.loads(row.value_json) for row in rows}


def store_budgets(session: orm.Session, study_id: int, budgets: Budgets) -> None:
    """Store both of a study's budgets, in a transaction that holds its lock."""
    session.execute(sa.delete(STUDY_USER_ATTRS).where(*_are_budgets(study_id)))
    rows = [{"study_id": study_id, "key": key, "value_json": json.dumps(budgets[key])} for key in _KEYS]
    session.execute(sa.insert(STUDY_USER_ATTRS), rows)


def _are_budgets(study_id: int) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return STUDY_USER_ATTRS.c.study_id == study_id, STUDY_USER_ATTRS.c.key.in_(_KEYS)


class Room(NamedTuple):
    """How far a study's budget of trials is raised for a trial that is added.

    Attributes:
        most: The highest that the budget may become.
        beside: Raise it by one even if there is room: the trial is not among those that the budget was made for.
    """

    most: int
    beside: bool


def make_room(session: orm.Session, study_id: int, room: Room) -> None:
    """Raise the study's budget for one more trial, if ``room`` allows, in a transaction that holds its lock."""
    budget, (left, _) = budgets_of(session, study_id).get(BUDGET_ATTR), _left_and_trials(session, study_id)
    if budget is None or left is None:
        return
    raised = budget - left + 1 if left <= 0 else budget + room.beside
    if budget < raised <= room.most:
        of_trials = (STUDY_USER_ATTRS.c.study_id == study_id, STUDY_USER_ATTRS.c.key == BUDGET_ATTR)
        session.execute(sa.update(STUDY_USER_ATTRS).where(*of_trials).values(value_json=json.dumps(raised)))


def refuse_beyond_budget(session: orm.Session, study_id: int) -> int:
    """Check that the study may have one more trial; imported ones don't count.

    The caller holds the study's row lock (SQLite: the write lock), so no other process is numbering a trial.

    Returns:
        How many trials the study has.

    Raises:
        BudgetExhaustedError: It may not have one more.
    """
    left, trials = _left_and_trials(session, study_id)
    if left is not None and left <= 0:
        raise BudgetExhaustedError(f"all {trials} trials of the study have been claimed")
    return trials


def claimable(conn: Executor, study_id: int) -> int:
    """How many trials workers could take: those that wait, and new ones within the budget, if that has a limit."""
    left, _ = _left_and_trials(conn, study_id, exactly=True)
    return count_trials(conn, study_id, [TrialState.WAITING]) + max(0, left or 0)


def count_trials(conn: Executor, study_id: int, states: Collection[TrialState]) -> int:
    """How many of a study's trials are in these states."""
    query = sa.select(sa.func.count()).where(TRIALS.c.study_id == study_id, TRIALS.c.state.in_(states))
    return cast("int", conn.execute(query).scalar_one())


def _left_and_trials(conn: Executor, study_id: int, *, exactly: bool = False) -> tuple[int | None, int]:
    """How many trials may still be created (None: any number), and how many there are.

    The first is negative if the budget was lowered. If it is positive, imported trials have been counted as well,
    which makes it too small, unless ``exactly``.
    """
    budget = sa.select(STUDY_USER_ATTRS.c.value_json).where(
        STUDY_USER_ATTRS.c.study_id == study_id, STUDY_USER_ATTRS.c.key == BUDGET_ATTR
    )
    count = sa.select(sa.func.count()).select_from(TRIALS).where(TRIALS.c.study_id == study_id)
    row = conn.execute(sa.select(budget.scalar_subquery(), count.scalar_subquery())).one()
    stored, trials = cast("tuple[str | None, int]", tuple(row))
    number = None if stored is None else json.loads(stored)
    if number is None or (trials < number and not exactly):
        return None if number is None else number - trials, trials
    imported = (
        sa.select(sa.func.count())
        .join_from(TRIALS, TRIAL_SYSTEM_ATTRS, TRIAL_SYSTEM_ATTRS.c.trial_id == TRIALS.c.trial_id)
        .where(TRIALS.c.study_id == study_id, TRIAL_SYSTEM_ATTRS.c.key == IMPORTED_ATTR)
    )
    return number - trials + cast("int", conn.execute(imported).scalar_one()), trials
