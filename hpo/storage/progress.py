"""How far trials have come, read without their curves: what budgets and rungs need of very many trials."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.storage.attributes import (
    CONSTRAINT_ATTR,
    FORK_ATTR,
    GRANTS_ATTR,
    IMPORTED_ATTR,
    ORIGIN_ATTR,
    OUTCOME_ATTR,
    PAUSED_ATTR,
)
from hpo.storage.changes import changes_since, latest_change
from hpo.storage.id_lists import in_list
from hpo.storage.optuna_private import REPORTS, TRIAL_SYSTEM_ATTRS, TRIAL_USER_ATTRS, TRIALS, VALUES
from hpo.storage.outage import patient
from hpo.storage.reader import ReadingStorage

#: Ids in one statement.
_AT_ONCE: Final = 500
#: Trials whose rows are held at a time: more would count as new objects, which start long garbage collections.
_BLOCK: Final = 5_000
T = TypeVar("T")
_STUDY: Final = TRIALS.c.study_id == sa.bindparam("study", type_=sa.Integer)
_SOME: Final = in_list(TRIALS.c.trial_id, "trials")
_BETWEEN: Final = TRIALS.c.trial_id.between(
    sa.bindparam("first", type_=sa.Integer), sa.bindparam("last", type_=sa.Integer)
)
_AFTER: Final = TRIALS.c.trial_id > sa.bindparam("after", type_=sa.Integer)


class Progress(NamedTuple):
    """A trial.

    Attributes:
        trial_id: Its id.
        number: Its number.
        state: Its state.
        value: Its value, if it has an outcome of its own; None: there is none, or it is not finite.
        last: The last step with a report; None: there is none.
        best: The best finite value that it has reported; None: there is none.
        last_not_finite: The last step whose value is not finite.
        is_paused: Whether it has the mark of a paused trial.
        grants: How many grants it has had.
        until: The epoch to which it was granted last; None: its end, or nothing was granted.
        attrs: Other attributes of it that decide where it stands, user and system ones; most trials have none.
    """

    trial_id: int
    number: int
    state: TrialState
    value: float | None
    last: int | None
    best: float | None
    last_not_finite: int | None
    is_paused: bool
    grants: int
    until: int | None
    attrs: Mapping[str, Any]


class _Statement(NamedTuple):
    """A statement about all trials of a study whose ids lie in a range, and about some trials by their ids."""

    where_all: sa.Executable
    where_some: sa.Executable


@dataclass
class Cursor:
    """Up to where a study's trials are known; looks continue there.

    Attributes:
        last_id: All trials up to this id have been read.
        change: All changes of paused trials up to this one (`hpo.storage.changes`) are known; None: nothing is.
        open_ids: Trials among them that were neither finished nor paused: they change without a note.
    """

    last_id: int = -1
    change: int | None = None
    open_ids: set[int] = field(default_factory=set)


#: A row of any of the statements: a tuple.
Row = Any

# A state as it is stored: SQLAlchemy takes as long for it as for the rest of the row.
_STATE: Final = sa.type_coerce(TRIALS.c.state, sa.String)
_ROWS: Final = sa.select(TRIALS.c.trial_id, TRIALS.c.number, _STATE)


def _attrs_in(table: sa.Table, among: sa.ColumnElement[bool], whose: sa.ColumnElement[bool]) -> sa.Select[Any]:
    attrs = sa.select(table.c.trial_id, table.c.key, table.c.value_json)
    return attrs.join(TRIALS, TRIALS.c.trial_id == table.c.trial_id).where(among, whose)


def _attrs(whose: sa.ColumnElement[bool]) -> sa.CompoundSelect[Any]:
    user = TRIAL_USER_ATTRS.c.key.in_([PAUSED_ATTR, GRANTS_ATTR, OUTCOME_ATTR, FORK_ATTR])
    system = TRIAL_SYSTEM_ATTRS.c.key
    deciding = sa.or_(system.in_([IMPORTED_ATTR, ORIGIN_ATTR]), system.startswith(CONSTRAINT_ATTR))
    return sa.union_all(_attrs_in(TRIAL_USER_ATTRS, user, whose), _attrs_in(TRIAL_SYSTEM_ATTRS, deciding, whose))


# The value counts beside an outcome only: an attempt may have died between the two.
_VALUES: Final = (
    _ROWS.with_only_columns(TRIALS.c.trial_id, VALUES.c.value)
    .join(VALUES, sa.and_(VALUES.c.trial_id == TRIALS.c.trial_id, VALUES.c.objective == 0))
    .join(
        TRIAL_USER_ATTRS,
        sa.and_(TRIAL_USER_ATTRS.c.trial_id == TRIALS.c.trial_id, TRIAL_USER_ATTRS.c.key == OUTCOME_ATTR),
    )
)
_NOT_FINITE: Final = sa.case((REPORTS.c.intermediate_value_type != "FINITE", REPORTS.c.step))


def _reported(best: Any) -> sa.Select[tuple[Any, ...]]:
    columns = (sa.func.max(REPORTS.c.step), best(REPORTS.c.intermediate_value), sa.func.max(_NOT_FINITE))
    return (
        sa.select(REPORTS.c.trial_id, *columns)
        .join(TRIALS, TRIALS.c.trial_id == REPORTS.c.trial_id)
        .group_by(REPORTS.c.trial_id)
    )


_AT: Final = (
    sa.select(REPORTS.c.trial_id, REPORTS.c.step, REPORTS.c.intermediate_value)
    .join(TRIALS, TRIALS.c.trial_id == REPORTS.c.trial_id)
    .where(in_list(REPORTS.c.step, "steps"))
)
_UP_TO: Final = (
    sa.select(REPORTS.c.trial_id, REPORTS.c.step, REPORTS.c.intermediate_value)
    .join(TRIALS, TRIALS.c.trial_id == REPORTS.c.trial_id)
    .where(REPORTS.c.step <= sa.bindparam("step", type_=sa.Integer))
    .order_by(REPORTS.c.step)
)
# Statements are built once: building one costs as much as a small database takes to answer it.
_STATEMENTS: Final[Mapping[str, _Statement]] = {
    name: _Statement(statement.where(_STUDY, _BETWEEN), statement.where(_SOME))
    for name, statement in {
        "rows": _ROWS.order_by(TRIALS.c.trial_id),
        "values": _VALUES,
        "least": _reported(sa.func.min),
        "largest": _reported(sa.func.max),
        "at": _AT,
        "up to": _UP_TO,
    }.items()
} | {"attrs": _Statement(_attrs(sa.and_(_STUDY, _BETWEEN)), _attrs(_SOME))}
_NEWER: Final = _ROWS.where(_STUDY, _AFTER).order_by(TRIALS.c.trial_id)
_NEWER_OR_SOME: Final = _ROWS.where(_STUDY, sa.or_(_AFTER, _SOME)).order_by(TRIALS.c.trial_id)
#: Each grant's end, in a trial's grants as JSON: no other part of them has this key, and a quote within a text is
#: escaped. To decode all would take ten times as long.
_UNTIL: Final = re.compile(r'"until": (\d+|null)')
_NO_ATTRS: Final[Mapping[str, Any]] = {}


@patient
def read_progress(
    storage: ReadingStorage, study_id: int, cursor: Cursor, of: Callable[[Progress], T], *, minimize: bool
) -> list[T]:
    """The trials that may have changed since the last look, by id; the first look reads all.

    Args:
        storage: Where the study is.
        study_id: The study.
        cursor: Where the last look ended; it is moved.
        of: What is kept of a trial.
        minimize: Whether the least value is the best.
    """
    every, last_id, open_ids = cursor.change is None, cursor.last_id, set[int]()
    found: list[T] = []
    with storage.single_statements() as conn:
        # The rows come first: what belongs to one that was finished or paused by then changes no more.
        if cursor.change is None:
            change, rows, known = latest_change(conn, study_id), [], []
        else:
            change, changed = changes_since(conn, study_id, cursor.change)
            known = sorted(each for each in changed | cursor.open_ids if each <= last_id)
            rows = _some(conn, "rows", known[_AT_ONCE:])
        some = {"study": study_id, "after": last_id, "trials": known[:_AT_ONCE]}
        rows += conn.execute(_NEWER_OR_SOME if known else _NEWER, some).all()
        for start in range(0, len(rows), _BLOCK):
            for trial in _progress(conn, study_id, rows[start : start + _BLOCK], every=every, minimize=minimize):
                found.append(of(trial))
                last_id = max(last_id, trial.trial_id)
                if not (trial.is_paused or trial.state.is_finished()):
                    open_ids.add(trial.trial_id)
    cursor.change, cursor.last_id, cursor.open_ids = change, last_id, open_ids
    return found


@patient
def values_at(
    storage: ReadingStorage, study_id: int, epochs: Collection[int], ids: Sequence[int], *, every: bool
) -> list[tuple[int, int, float]]:
    """The trial, the epoch and the value of each report at one of these epochs; NaN for a value not finite.

    ``ids``: of these trials, by id; ``every``: they are all of the study.
    """
    found: list[tuple[int, int, float]] = []
    with storage.single_statements() as conn:
        for start in range(0, len(ids), _BLOCK):
            block = ids[start : start + _BLOCK]
            rows = _read(conn, "at", study_id, block, every=every, steps=list(epochs))
            found += [(each, step, math.nan if value is None else value) for each, step, value in rows]
    return found


@patient
def last_values_up_to(storage: ReadingStorage, epoch: int, ids: Sequence[int]) -> dict[int, float]:
    """By id, the value of each trial's last report up to an epoch; NaN for a value that is not finite."""
    with storage.single_statements() as conn:
        rows = _some(conn, "up to", ids, step=epoch)
    return {trial_id: math.nan if value is None else value for trial_id, _, value in rows}


def _progress(
    conn: sa.Connection, study_id: int, rows: Sequence[Row], *, every: bool, minimize: bool
) -> Iterator[Progress]:
    """The trials of these rows, by id; ``every``: no other trial of the study has an id between theirs."""
    ids = [row[0] for row in rows]
    paused, grants, attrs = set[int](), dict[int, str](), defaultdict[int, dict[str, Any]](dict)
    for trial_id, key, text in _read(conn, "attrs", study_id, ids, every=every):
        if key == GRANTS_ATTR:
            grants[trial_id] = text
        elif key == PAUSED_ATTR:
            paused.add(trial_id)
        else:
            attrs[trial_id][key] = json.loads(text)
    judged = any(OUTCOME_ATTR in each for each in attrs.values())
    values = dict(_read(conn, "values", study_id, ids, every=every)) if judged else {}
    name = "least" if minimize else "largest"
    reported = {each: rest for each, *rest in _read(conn, name, study_id, ids, every=every)}
    for trial_id, number, state in rows:
        last, best, last_not_finite = reported.get(trial_id, (None, None, None))
        ends = _UNTIL.findall(grants[trial_id]) if trial_id in grants else ()
        yield Progress(
            trial_id,
            number,
            TrialState[state],
            values.get(trial_id),
            last,
            best,
            last_not_finite,
            trial_id in paused,
            len(ends),
            int(ends[-1]) if ends and ends[-1] != "null" else None,
            attrs.get(trial_id, _NO_ATTRS),
        )


def _read(
    conn: sa.Connection, name: str, study_id: int, ids: Sequence[int], *, every: bool, **more: Any
) -> Sequence[Row]:
    """What a statement finds of these trials, by id; ``every``: as of `_progress`."""
    if not every:
        return _some(conn, name, ids, **more)
    between = {"study": study_id, "first": ids[0], "last": ids[-1]}
    return conn.execute(_STATEMENTS[name].where_all, between | more).all()


def _some(conn: sa.Connection, name: str, ids: Sequence[int], **more: Any) -> list[Row]:
    found: list[Row] = []
    for start in range(0, len(ids), _AT_ONCE):
        some = {"trials": list(ids[start : start + _AT_ONCE])}
        found += conn.execute(_STATEMENTS[name].where_some, some | more).all()
    return found
