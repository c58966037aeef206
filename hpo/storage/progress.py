"""Reads how far trials have come, without their curves: what budgets and rungs need of very many trials."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa

from hpo.storage.attributes import (
    BUDGET_ATTR,
    CONSTRAINT_ATTR,
    EPOCHS_ATTR,
    FORK_ATTR,
    GRANTS_ATTR,
    IMPORTED_ATTR,
    MAX_EPOCHS_ATTR,
    NEARER_ATTR,
    ORIGIN_ATTR,
    OUTCOME_ATTR,
    PAUSED_ATTR,
    RETRIES_ATTR,
    SAME_AS_ATTR,
    SCHEDULER_ATTR,
)
from hpo.storage.changes import CHANGES, SINCE, latest_change
from hpo.storage.id_lists import in_chunks, in_list
from hpo.storage.optuna_private import (
    REPORTS,
    STUDY_USER_ATTRS,
    TRIAL_SYSTEM_ATTRS,
    TRIAL_USER_ATTRS,
    TRIALS,
    VALUES,
    models,
)
from hpo.storage.outage import patient
from hpo.storage.reader import ReadingStorage

#: Trials whose rows are held at a time: more of them would be so many new objects that they trigger long garbage
#: collections.
_BLOCK: Final = 5_000
#: Above every id.
_NO_ID: Final = 2**31 - 1


@dataclass
class Cursor:
    """How far a study's trials have been read; the next look continues there.

    Attributes:
        last_id: All trials up to this id have been read.
        change: All changes up to this one (`hpo.storage.changes`) are known; None before the first look.
        open_ids: Trials up to ``last_id`` that were neither finished nor paused: they change without a note.
    """

    last_id: int = -1
    change: int | None = None
    open_ids: set[int] = field(default_factory=set)


#: The trial, the epoch and the value of a report; NaN for a value that is not finite.
Report = tuple[int, int, float]
#: A row of any of the statements: a tuple.
Row = Any


@dataclass
class Progress:
    """Trials as parallel lists, one entry for each trial, in the order of their ids.

    Attributes:
        trial_id: Its id.
        number: Its number.
        state: The name of its state.
        last: The last step with a report; None if there is none.
        last_not_finite: The last step whose value is not finite; None if there is none.
        best: The best finite value that it has reported; None if there is none.
        is_paused: Whether it has the mark of a paused trial.
        grants: How many grants it has had.
        until: The epoch at which its last grant ends; None: the trial's end, or it has no grant.
        attrs: By id, other user and system attributes that decide how a trial counts; most trials have none.
        values: By id, the value of a trial that has the attribute of an outcome; None if it is not finite.
        reports: The reports at the requested epochs.
        study: The study's attributes that budgets and schedulers need.
    """

    trial_id: list[int] = field(default_factory=list)
    number: list[int] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    last: list[int | None] = field(default_factory=list)
    last_not_finite: list[int | None] = field(default_factory=list)
    best: list[float | None] = field(default_factory=list)
    is_paused: list[bool] = field(default_factory=list)
    grants: list[int] = field(default_factory=list)
    until: list[int | None] = field(default_factory=list)
    attrs: dict[int, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    values: dict[int, float | None] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    study: dict[str, Any] = field(default_factory=dict)

    def add(self, rows: Sequence[Row]) -> None:
        """Take in rows of `_trials`, by id."""
        if not rows:
            return
        _, trial_id, number, last, last_not_finite, best, state, grants, paused = zip(*rows, strict=True)
        self.trial_id += trial_id
        self.number += number
        self.state += state
        self.last += last
        self.last_not_finite += last_not_finite
        self.best += best
        self.is_paused += [mark is not None for mark in paused]
        ends = [() if text is None else _UNTIL.findall(text) for text in grants]
        self.grants += map(len, ends)
        self.until += [int(each[-1]) if each and each[-1] != "null" else None for each in ends]

    @property
    def open_ids(self) -> set[int]:
        """Ids of the trials that change without a note."""
        each = zip(self.trial_id, self.state, self.is_paused, strict=True)
        return {trial_id for trial_id, state, paused in each if not paused and state in _OPEN}


_OPEN: Final = frozenset({"RUNNING", "WAITING"})
#: Finds each grant's end in a trial's grants as JSON: no other part has this key, and quotes in texts are escaped.
#: Decoding the JSON would take ten times as long.
_UNTIL: Final = re.compile(r'"until": (\d+|null)')

# ---------------------------------------------------------------------------- statements
# They are built once: building one takes as long as a small database takes to answer it.

_STUDY_ID: Final = sa.bindparam("study", type_=sa.Integer)
_STUDY: Final = TRIALS.c.study_id == _STUDY_ID
_NULL: Final = sa.null()
_TEXT: Final = sa.String(models.MAX_INDEXED_STRING_LENGTH)
#: The trials that a look asks for, shared by its queries: new ones, some by their ids, and those with a noted
#: change. A trial that is found in several of these ways is there once.
_ROW: Final = sa.select(TRIALS.c.trial_id, TRIALS.c.number, TRIALS.c.state)
_LOOKED_AT: Final = sa.union(
    _ROW.where(_STUDY, TRIALS.c.trial_id > sa.bindparam("after", type_=sa.Integer)),
    _ROW.where(in_list(TRIALS.c.trial_id, "trials")),
    _ROW.join_from(TRIALS, CHANGES, CHANGES.c.trial_id == TRIALS.c.trial_id).where(SINCE),
).cte("looked_at")
_NOT_FINITE: Final = sa.case((REPORTS.c.intermediate_value_type != "FINITE", REPORTS.c.step))
_STEPS: Final = in_list(REPORTS.c.step, "steps")


def _between(table: sa.FromClause) -> sa.ColumnElement[bool]:
    """Condition: a row's trial id lies between two ids. Each table of a join needs it: servers don't infer it."""
    first, last = (sa.bindparam(name, type_=sa.Integer) for name in ("first", "last"))
    return table.c.trial_id.between(first, last)


def _kind(name: str) -> sa.ColumnElement[str]:
    return sa.literal_column(f"'{name}'").label("kind")


def _trials(of: sa.FromClause, best: Any) -> sa.Select[Any]:
    """The statement for a row per trial: a summary of its reports, its grants, its mark of a pause.

    What belongs to a trial that is finished or paused in this row no longer changes.
    """

    def attr(key: str) -> sa.ScalarSelect[Any]:
        mine = (TRIAL_USER_ATTRS.c.trial_id == of.c.trial_id, TRIAL_USER_ATTRS.c.key == key)
        return sa.select(TRIAL_USER_ATTRS.c.value_json).where(*mine).scalar_subquery()

    reported = (sa.func.max(REPORTS.c.step), sa.func.max(_NOT_FINITE), best(REPORTS.c.intermediate_value))
    return (
        sa.select(
            *(_kind("trial"), of.c.trial_id, of.c.number, *reported),
            *(sa.cast(of.c.state, _TEXT), attr(GRANTS_ATTR), attr(PAUSED_ATTR)),
        )
        .outerjoin_from(of, REPORTS, REPORTS.c.trial_id == of.c.trial_id)
        .group_by(of.c.trial_id, of.c.number, of.c.state)
    )


def _attrs(of: sa.FromClause) -> tuple[sa.Select[Any], sa.Select[Any]]:
    def having(table: sa.Table, deciding: sa.ColumnElement[bool]) -> sa.Select[Any]:
        unused = (_NULL, _NULL, _NULL, _NULL)
        columns = (_kind("attr"), of.c.trial_id, *unused, table.c.key, table.c.value_json, _NULL)
        return sa.select(*columns).join_from(of, table, table.c.trial_id == of.c.trial_id).where(deciding)

    key = TRIAL_SYSTEM_ATTRS.c.key
    system = sa.or_(key.in_([IMPORTED_ATTR, ORIGIN_ATTR, NEARER_ATTR]), key.startswith(CONSTRAINT_ATTR))
    user = TRIAL_USER_ATTRS.c.key.in_([OUTCOME_ATTR, FORK_ATTR, SAME_AS_ATTR])
    return having(TRIAL_USER_ATTRS, user), having(TRIAL_SYSTEM_ATTRS, system)


def _reports(of: sa.FromClause, which: sa.ColumnElement[bool]) -> sa.Select[Any]:
    unused = (_NULL, _NULL, _NULL)
    columns = (REPORTS.c.trial_id, REPORTS.c.step, _NULL, _NULL, REPORTS.c.intermediate_value, *unused)
    join = sa.select(_kind("report"), *columns).join_from(of, REPORTS, REPORTS.c.trial_id == of.c.trial_id)
    return join.where(which)


#: The study's attributes as rows of a look, without a trial.
_STUDY_ATTRS: Final = sa.select(
    *(_kind("study"), _NULL, _NULL, _NULL, _NULL, _NULL),
    *(STUDY_USER_ATTRS.c.key, STUDY_USER_ATTRS.c.value_json, _NULL),
).where(
    STUDY_USER_ATTRS.c.study_id == _STUDY_ID,
    STUDY_USER_ATTRS.c.key.in_([BUDGET_ATTR, EPOCHS_ATTR, MAX_EPOCHS_ATTR, RETRIES_ATTR, SCHEDULER_ATTR]),
)
_LATEST_CHANGE: Final = sa.select(
    *(_kind("change"), _NULL, sa.func.max(CHANGES.c.change_id), _NULL, _NULL, _NULL, _NULL, _NULL, _NULL)
).where(SINCE)


def _look(best: Any) -> sa.CompoundSelect[Any]:
    """The statement that reads the study and some of its trials as of one moment.

    Its first query has a value in every column, because databases take the columns' types from it.
    """
    trials = (_trials(_LOOKED_AT, best), *_attrs(_LOOKED_AT), _reports(_LOOKED_AT, _STEPS))
    return sa.union_all(*trials, _STUDY_ATTRS, _LATEST_CHANGE)


def _block(best: Any) -> sa.Select[Any]:
    """The statement for the rows of `_trials` for all trials between two ids, reading each table once."""
    of = REPORTS.c.trial_id
    reported = (sa.func.max(REPORTS.c.step), sa.func.max(_NOT_FINITE), best(REPORTS.c.intermediate_value))
    named = [column.label(name) for column, name in zip(reported, ("last", "not_finite", "best"), strict=True)]
    curves = sa.select(of, *named).where(_between(REPORTS)).group_by(of).subquery()
    found: Any = TRIALS.outerjoin(curves, curves.c.trial_id == TRIALS.c.trial_id)
    attrs = []
    for key in (GRANTS_ATTR, PAUSED_ATTR):
        attr = TRIAL_USER_ATTRS.alias()
        mine = sa.and_(attr.c.trial_id == TRIALS.c.trial_id, attr.c.key == key, _between(attr))
        found = found.outerjoin(attr, mine)
        attrs.append(attr.c.value_json)
    columns = (TRIALS.c.trial_id, TRIALS.c.number, curves.c.last, curves.c.not_finite, curves.c.best)
    query = sa.select(_kind("trial"), *columns, sa.cast(TRIALS.c.state, _TEXT), *attrs).select_from(found)
    return query.where(_STUDY, _between(TRIALS)).order_by(TRIALS.c.trial_id)


_LOOKS: Final = {True: _look(sa.func.min), False: _look(sa.func.max)}
_BLOCKS: Final = {True: _block(sa.func.min), False: _block(sa.func.max)}
_ALL_ATTRS: Final = sa.union_all(
    *(
        each.where(_STUDY, _between(table))
        for each, table in zip(_attrs(TRIALS), (TRIAL_USER_ATTRS, TRIAL_SYSTEM_ATTRS), strict=True)
    )
)
_ALL_REPORTS: Final = _reports(TRIALS, _STEPS).where(_STUDY, _between(REPORTS))
_IDS: Final = sa.select(TRIALS.c.trial_id).where(_STUDY).order_by(TRIALS.c.trial_id)
_VALUES: Final = sa.select(VALUES.c.trial_id, VALUES.c.value).where(
    VALUES.c.objective == 0, in_list(VALUES.c.trial_id, "trials")
)
_UP_TO: Final = (
    sa.select(REPORTS.c.trial_id, REPORTS.c.intermediate_value)
    .where(REPORTS.c.step <= sa.bindparam("step", type_=sa.Integer), in_list(REPORTS.c.trial_id, "trials"))
    .order_by(REPORTS.c.step)
)


@patient
def read_progress(
    storage: ReadingStorage, study_id: int, cursor: Cursor, epochs: Collection[int], *, minimize: bool
) -> Progress:
    """The study, and its trials that may have changed since the last look; the first look reads all trials.

    Args:
        storage: The study's storage.
        study_id: The study.
        cursor: Where the last look ended; this moves it.
        epochs: Reports at these epochs are read too, except at the first look (see `reports_at`).
        minimize: Whether the smallest value is the best.
    """
    with storage.single_statements() as conn:
        if cursor.change is None:
            change = latest_change(conn, study_id)
            found = _every(conn, study_id, minimize=minimize)
        else:
            found, change = _some(conn, study_id, cursor, cursor.change, epochs, minimize=minimize)
        judged = [trial_id for trial_id, attrs in found.attrs.items() if OUTCOME_ATTR in attrs]
        # A value counts only with an outcome: an attempt may have died after it stored one of the two.
        found.values = dict(_chunked(conn, _VALUES, judged))
    cursor.change = change
    cursor.last_id = max(cursor.last_id, found.trial_id[-1] if found.trial_id else -1)
    cursor.open_ids = found.open_ids
    return found


@patient
def reports_at(storage: ReadingStorage, study_id: int, epoch: int, ids: Sequence[int]) -> list[Report]:
    """The reports of a study's trials at an epoch; ``ids``: the ids of all its trials, ascending."""
    found: list[Report] = []
    with storage.single_statements() as conn:
        for rows in conn.execute(_ALL_REPORTS, _all(study_id, ids) | {"steps": [epoch]}).partitions(_BLOCK):
            found += map(_report, rows)
    return found


@patient
def last_values_up_to(storage: ReadingStorage, epoch: int, ids: Sequence[int]) -> dict[int, float]:
    """By id, the value of each trial's last report up to an epoch; NaN for a value that is not finite."""
    with storage.single_statements() as conn:
        rows = _chunked(conn, _UP_TO, ids, step=epoch)
    return {trial_id: math.nan if value is None else value for trial_id, value in rows}


def _every(conn: sa.Connection, study_id: int, *, minimize: bool) -> Progress:
    found = Progress(study=_study(conn.execute(_STUDY_ATTRS, {"study": study_id})))
    ids = conn.execute(_IDS, {"study": study_id}).scalars().all()
    for block in _blocks(study_id, ids):
        found.add(conn.execute(_BLOCKS[minimize], block).all())
    # After the trials: whatever belongs to one that had ended by then no longer changes.
    _add_attrs(found, conn.execute(_ALL_ATTRS, _all(study_id, ids)))
    return found


def _some(
    conn: sa.Connection, study_id: int, cursor: Cursor, change: int, epochs: Collection[int], *, minimize: bool
) -> tuple[Progress, int]:
    """The trials that may have changed since the last look and its change ``change``; and the latest change."""
    found, trials, ids = Progress(), dict[int, Row](), sorted(cursor.open_ids)
    latest = change
    # The first chunk's statement also reads the new trials and those with a noted change.
    since = {"after": cursor.last_id, "change": change}
    for chunk in in_chunks(ids) or [[]]:
        some = {"study": study_id, "trials": chunk, "steps": [*epochs]}
        by_kind = defaultdict[str, list[Row]](list)
        for row in conn.execute(_LOOKS[minimize], some | since):
            by_kind[row[0]].append(row)
        since = {"after": _NO_ID, "change": _NO_ID}
        trials |= {row[1]: row for row in by_kind["trial"]}
        found.reports += map(_report, by_kind["report"])
        _add_attrs(found, by_kind["attr"])
        found.study = found.study or _study(by_kind["study"])  # of the first statement, as the changes are
        latest = max(latest, by_kind["change"][0][2] or 0)
    found.add([trials[trial_id] for trial_id in sorted(trials)])
    return found, latest


def _blocks(study_id: int, ids: Sequence[int]) -> Iterator[dict[str, int]]:
    """For each block of these ids, the parameters of a statement about all trials of the block."""
    for chunk in in_chunks(ids, _BLOCK):
        yield _all(study_id, chunk)


def _all(study_id: int, ids: Sequence[int]) -> dict[str, int]:
    """Parameters of a statement about all trials with these ids, which ascend."""
    return {"study": study_id, "first": ids[0] if ids else 0, "last": ids[-1] if ids else 0}


def _chunked(conn: sa.Connection, statement: sa.Executable, ids: Sequence[int], **more: Any) -> list[Row]:
    return [row for chunk in in_chunks(ids) for row in conn.execute(statement, {"trials": chunk} | more)]


def _study(rows: Iterable[Row]) -> dict[str, Any]:
    return {key: json.loads(text) for *_, key, text, _ in rows}


def _add_attrs(found: Progress, rows: Iterable[Row]) -> None:
    for _, trial_id, *_, key, text, _ in rows:
        found.attrs[trial_id][key] = json.loads(text)


def _report(row: Row) -> Report:
    _, trial_id, step, _, _, value, *_ = row
    return trial_id, step, math.nan if value is None else value
