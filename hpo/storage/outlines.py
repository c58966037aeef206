"""Reads a study's trials without their curves, each statement for all trials at once.

Tens of thousands of trials have millions of reported values, which neither a table of trials nor a count shows.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.storage.attributes import (
    BEST_ATTR,
    CONDEMNED_ATTR,
    CONSTRAINT_ATTR,
    FORK_ATTR,
    IMPORTED_ATTR,
    OUTCOME_ATTR,
    PAUSED_ATTR,
    SAME_AS_ATTR,
)
from hpo.storage.changes import changes_since, latest_change
from hpo.storage.id_lists import in_chunks, in_list
from hpo.storage.optuna_private import (
    ARTIFACTS_ATTR_PREFIX,
    PARAMS,
    REPORTS,
    TRIAL_SYSTEM_ATTRS,
    TRIAL_USER_ATTRS,
    TRIALS,
    VALUES,
    id_of_trial,
)
from hpo.storage.outage import patient
from hpo.storage.progress import Cursor
from hpo.storage.reader import ReadingStorage
from hpo.storage.trial_rows import Entry, TrialRow, trial_rows, trials_of

_STUDY: Final = sa.bindparam("study", type_=sa.Integer)
_OF_STUDY: Final = sa.and_(
    TRIALS.c.study_id == _STUDY, TRIALS.c.trial_id > sa.bindparam("after", type_=sa.Integer)
)
_SOME: Final = in_list(TRIALS.c.trial_id, "trials")
#: A statement that reads something about many trials.
Query = sa.Select[tuple[Any, ...]]


class _Queries(NamedTuple):
    """The statements that read trials: values, steps, user attributes, system attributes and parameters."""

    values: Query
    steps: Query
    user: Query
    system: Query
    params: Query | None = None


def _joined(table: sa.Table, whose: sa.ColumnElement[bool], *columns: Any) -> Query:
    return sa.select(table.c.trial_id, *columns).join(TRIALS, TRIALS.c.trial_id == table.c.trial_id).where(whose)


def _values(whose: sa.ColumnElement[bool]) -> Query:
    kind = sa.cast(VALUES.c.value_type, sa.String(16))
    return _joined(VALUES, whose, VALUES.c.objective, kind, VALUES.c.value, sa.null())


def _user(whose: sa.ColumnElement[bool]) -> Query:
    return _joined(TRIAL_USER_ATTRS, whose, TRIAL_USER_ATTRS.c.key, TRIAL_USER_ATTRS.c.value_json)


def _system(whose: sa.ColumnElement[bool]) -> Query:
    return _joined(TRIAL_SYSTEM_ATTRS, whose, TRIAL_SYSTEM_ATTRS.c.key, TRIAL_SYSTEM_ATTRS.c.value_json)


def _outline(whose: sa.ColumnElement[bool]) -> _Queries:
    """The statements for what decides how a trial counts: complete ones rank by value, others by best epoch."""
    deciding = TRIAL_USER_ATTRS.c.key.in_([OUTCOME_ATTR, FORK_ATTR, SAME_AS_ATTR])
    ranking = sa.and_(TRIAL_USER_ATTRS.c.key == BEST_ATTR, TRIALS.c.state != TrialState.COMPLETE)
    key = TRIAL_SYSTEM_ATTRS.c.key
    counted = sa.or_(key.in_([IMPORTED_ATTR, CONDEMNED_ATTR]), key.startswith(CONSTRAINT_ATTR))
    # One index lookup for each trial.
    last = sa.select(sa.func.max(REPORTS.c.step)).where(REPORTS.c.trial_id == TRIALS.c.trial_id).scalar_subquery()
    return _Queries(
        _values(whose),
        sa.select(TRIALS.c.trial_id, last, sa.null()).where(whose),
        _user(whose).where(sa.or_(deciding, ranking)),
        _system(whose).where(counted),
    )


def _without_curves(best: Any) -> _Queries:
    steps = _joined(REPORTS, _OF_STUDY, sa.func.max(REPORTS.c.step), best(REPORTS.c.intermediate_value))
    columns = (PARAMS.c.param_id, PARAMS.c.param_name, PARAMS.c.param_value, PARAMS.c.distribution_json)
    params = _joined(PARAMS, _OF_STUDY, *columns)
    system = _system(_OF_STUDY).where(~TRIAL_SYSTEM_ATTRS.c.key.startswith(ARTIFACTS_ATTR_PREFIX))
    return _Queries(_values(_OF_STUDY), steps.group_by(REPORTS.c.trial_id), _user(_OF_STUDY), system, params)


# Statements are built once: building one takes as long as a small database takes to answer it.
_OUTLINES: Final = _outline(_OF_STUDY)
_SOME_OUTLINES: Final = _outline(_SOME)
_WITH_LEAST: Final = _without_curves(sa.func.min)
_WITH_LARGEST: Final = _without_curves(sa.func.max)
_IDS: Final = sa.select(TRIALS.c.trial_id).where(TRIALS.c.study_id == _STUDY).order_by(TRIALS.c.trial_id.desc())


@patient
def outlined_trials(storage: ReadingStorage, study_id: int) -> list[FrozenTrial]:
    """A study's trials by number, with what decides how each counts: enough to count and to rank them.

    They have no parameters. Of their attributes they have only outcome, pause, fork, bounds, the pruner's
    decision, the trial whose result they took over and, if it stands for their value, the best epoch. Instead of
    the curve they have its last step, with the value NaN.
    """
    with storage.single_statements() as conn:
        rows = trial_rows(conn, study_id, after=-1, among=())
        return _trials(conn, rows, {"study": study_id, "after": -1}, _OUTLINES)


class KeptOutlines:
    """Keeps the outlines of `outlined_trials` between looks: trials that have ended or are paused are read once.

    Args:
        storage: The study's storage.
        study_id: The study.
    """

    def __init__(self, storage: ReadingStorage, study_id: int) -> None:
        self._reader, self._study = storage, study_id
        self._cursor = Cursor()
        self._kept: dict[int, FrozenTrial] = {}

    def look(self) -> list[FrozenTrial]:
        """The trials now, by number."""
        read = _changed(self._reader, self._study, self._cursor)
        self._kept |= {id_of_trial(trial): trial for trial in read}
        return sorted(self._kept.values(), key=lambda trial: trial.number)


@patient
def _changed(storage: ReadingStorage, study_id: int, cursor: Cursor) -> list[FrozenTrial]:
    """The outlines that may have changed since the last look, which ended at the cursor; moves the cursor."""
    with storage.single_statements() as conn:
        # Rows first: whatever belongs to a trial that was finished or paused by then no longer changes.
        if cursor.change is None:
            change = latest_change(conn, study_id)
            rows = trial_rows(conn, study_id, after=-1, among=())
            read = _trials(conn, rows, {"study": study_id, "after": -1}, _OUTLINES)
        else:
            change, changed = changes_since(conn, study_id, cursor.change)
            known = {each for each in changed if each <= cursor.last_id} | cursor.open_ids
            rows, read = trial_rows(conn, study_id, after=cursor.last_id, among=known), []
            for chunk in in_chunks(rows):
                read += _trials(conn, chunk, {"trials": [row.trial_id for row in chunk]}, _SOME_OUTLINES)
    cursor.change, cursor.last_id = change, max((row.trial_id for row in rows), default=cursor.last_id)
    cursor.open_ids = {row.trial_id for row in rows if not row.state.is_finished() and row.pause is None}
    return read


@patient
def trials_without_curves(
    storage: ReadingStorage, study_id: int, *, minimize: bool, after: int = -1
) -> list[FrozenTrial]:
    """A study's trials with an id above ``after``, by number, with everything but their curves and files.

    Instead of the curve they have its last step, with the best finite value of all steps, or NaN if there is none.
    """
    with storage.single_statements() as conn:
        rows = trial_rows(conn, study_id, after=after, among=())
        whose = {"study": study_id, "after": after}
        return _trials(conn, rows, whose, _WITH_LEAST if minimize else _WITH_LARGEST)


@patient
def id_before_last(storage: ReadingStorage, study_id: int, count: int) -> int:
    """The id above which a study has ``count`` trials; -1 if it has no more than that."""
    with storage.single_statements() as conn:
        found = conn.execute(_IDS.limit(1).offset(count), {"study": study_id}).scalar()
    return -1 if found is None else int(found)


def _trials(
    conn: sa.Connection, rows: Sequence[TrialRow], whose: Mapping[str, Any], queries: _Queries
) -> list[FrozenTrial]:
    """The trials of these rows, by number; the rows were read first, and the rest is read here."""
    drawn = {} if queries.params is None else _entries(conn, queries.params, whose)
    values = _entries(conn, queries.values, whose)
    reports = {
        trial_id: {last: math.nan if best is None else best}
        for trial_id, last, best in _rows(conn, queries.steps, whose)
        if last is not None
    }
    user, system = _attrs(conn, queries.user, whose), _attrs(conn, queries.system, whose)
    for row in rows:
        if row.paused is not None:
            user.setdefault(row.trial_id, {})[PAUSED_ATTR] = json.loads(row.paused)
    return sorted(trials_of(rows, drawn, values, reports, user, system), key=lambda trial: trial.number)


def _rows(conn: sa.Connection, query: Query, whose: Mapping[str, Any]) -> Sequence[Any]:
    return conn.execute(query, whose).all()


def _entries(conn: sa.Connection, query: Query, whose: Mapping[str, Any]) -> dict[int, list[Entry]]:
    found = defaultdict[int, list[Entry]](list)
    for trial_id, *entry in _rows(conn, query, whose):
        found[trial_id].append(tuple(entry))
    return found


def _attrs(conn: sa.Connection, query: Query, whose: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    found = defaultdict[int, dict[str, Any]](dict)
    for trial_id, key, text in _rows(conn, query, whose):
        found[trial_id][key] = json.loads(text)
    return found
