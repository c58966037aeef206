"""Single statements that write to a trial only if it may be written to.

Optuna reads the trial, checks its state in Python and then writes: up to four statements, during which no other
process can write to a SQLite file. Here the checks (the trial is unfinished; the writer holds its lease) are the
condition of an ``INSERT … SELECT … ON CONFLICT``, so a write is one statement and holds the write lock only
briefly.
"""

import functools
import importlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, cast

import sqlalchemy as sa
from optuna.trial import TrialState
from sqlalchemy import orm

from hpo.storage.ledger import ATTEMPTS
from hpo.storage.optuna_private import TRIALS, VALUES, models

# An execution option: each statement is a transaction of its own, so that SQLite needs no BEGIN around it.
SINGLE = "hpo_single"

#: Not `in_`: SQLAlchemy expands a list anew at each execution, and can't in a statement that stores several rows.
_UNFINISHED = sa.or_(TRIALS.c.state == TrialState.RUNNING, TRIALS.c.state == TrialState.WAITING)
_SET_STATE = (
    sa.update(TRIALS)
    .where(
        TRIALS.c.trial_id == sa.bindparam("trial", type_=sa.Integer),
        _UNFINISHED,
    )
    .values(state=sa.bindparam("new_state"), datetime_complete=sa.bindparam("new_completed"))
)
_ADD_VALUE = sa.insert(VALUES)


@functools.cache
def guarded_insert(
    dialect: str, table: sa.Table, columns: tuple[str, ...], key: str, *, replace: bool, fenced: bool
) -> sa.Executable:
    """A statement that stores one row of a trial.

    Its parameters are ``new_<column>`` for each column, ``trial`` and, if fenced, ``attempt``. It affects no row
    if the trial is missing or finished, or ``attempt`` is not its lease.

    Args:
        dialect: ``sqlite``, ``postgresql`` or ``mysql``.
        table: One of Optuna's tables whose rows belong to a trial.
        columns: The columns to fill, besides ``trial_id``.
        key: The column that is unique within the trial.
        replace: Whether an existing row with the same key gets the new values; otherwise it stays as it is.
        fenced: Whether the writer must hold the trial's lease.
    """
    names = ["trial_id", *columns]
    source = _allowed_trial(table, columns, fenced=fenced)
    updated = [column for column in columns if column != key]
    # Imported by name: importing a dialect's modules takes time, and a process needs only one dialect.
    insert: Any = importlib.import_module(f"sqlalchemy.dialects.{dialect}").insert(table)
    insert = insert.from_select(names, source)
    if dialect == "mysql":
        updates = {name: insert.inserted[name] if replace else table.c[name] for name in updated}
        insert = insert.on_duplicate_key_update(updates)
    else:
        index = [table.c.trial_id, table.c[key]]
        if replace:
            updates = {name: insert.excluded[name] for name in updated}
            insert = insert.on_conflict_do_update(index_elements=index, set_=updates)
        else:
            insert = insert.on_conflict_do_nothing(index_elements=index)
    # Without preserve_rowcount PostgreSQL's driver returns -1, and a refusal would go unnoticed.
    statement: sa.Executable = insert.inline().execution_options(preserve_rowcount=True)
    return statement


def _allowed_trial(table: sa.Table, columns: tuple[str, ...], *, fenced: bool) -> sa.Select[tuple[Any, ...]]:
    """The new row, or nothing if the trial may not be written to."""
    new = [sa.bindparam(f"new_{name}", type_=table.c[name].type) for name in columns]
    trial = sa.bindparam("trial", type_=sa.Integer)
    if not fenced:
        return sa.select(TRIALS.c.trial_id, *new).where(TRIALS.c.trial_id == trial, _UNFINISHED)
    writable = sa.exists().where(TRIALS.c.trial_id == trial, _UNFINISHED)
    source = sa.select(ATTEMPTS.c.trial_id, *new).where(
        ATTEMPTS.c.trial_id == trial,
        ATTEMPTS.c.attempt == sa.bindparam("attempt", type_=sa.Integer),
        ATTEMPTS.c.ended_at.is_(None),
        writable,
    )
    # With the lock, a requeue waits for this write, and this write for a requeue, after which the lease has ended.
    # The trial is in a subquery so that only the lease is locked: a requeue, too, locks the lease first.
    return source.with_for_update()


def set_attr(session: orm.Session, table: sa.Table, trial_id: int, key: str, value: Any) -> None:
    """Set an attribute of an unfinished trial in the caller's transaction, which has locked the trial.

    Args:
        session: The transaction.
        table: The table of trials' user attributes or of their system attributes.
        trial_id: The trial.
        key: The attribute.
        value: Its new value.
    """
    dialect = session.get_bind().dialect.name
    statement = guarded_insert(dialect, table, ("key", "value_json"), "key", replace=True, fenced=False)
    session.execute(statement, {"trial": trial_id, "new_key": key, "new_value_json": json.dumps(value)})


def set_state(session: orm.Session, trial_id: int, state: TrialState, values: Sequence[float]) -> bool:
    """Set the state and values of an unfinished trial; False if it is finished or missing."""
    completed = datetime.now(UTC).replace(tzinfo=None) if state.is_finished() else None
    row: dict[str, Any] = {"trial": trial_id, "new_state": state, "new_completed": completed}
    changed = cast("sa.CursorResult[tuple[()]]", session.execute(_SET_STATE, row))
    if not changed.rowcount:
        return False
    for objective, value in enumerate(values):
        stored, kind = models.TrialValueModel.value_to_stored_repr(value)
        row = {"trial_id": trial_id, "objective": objective, "value": stored, "value_type": kind}
        session.execute(_ADD_VALUE, row)
    return True
