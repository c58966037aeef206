"""Reads trials from Optuna's tables in two statements, without its object-relational mapper.

Optuna reads a trial in six statements, and builds an object for every row. Here the first statement reads the
trials, the second everything that belongs to them. A finished trial's rows no longer change, so a trial that the
first statement found finished is read consistently.
"""

import functools
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from optuna.distributions import json_to_distribution
from optuna.trial import FrozenTrial, TrialState

from hpo.storage import changes, id_lists, sample
from hpo.storage.attributes import PAUSED_ATTR
from hpo.storage.id_lists import in_chunks, in_list
from hpo.storage.optuna_private import (
    PARAMS,
    REPORTS,
    TRIAL_SYSTEM_ATTRS,
    TRIAL_USER_ATTRS,
    TRIALS,
    VALUES,
    models,
)

# Trials that are read whole in one statement. A server may read each table once per statement, and the client
# holds the whole answer: fewer trials would cost the server more work, more trials the client more memory.
_WHOLE_AT_ONCE: Final = 2_000
# Rows held at a time: more of them would be so many new objects that they trigger long garbage collections.
_FETCHED: Final = 200
_FINITE: Final = "FINITE"
_NOT_FINITE: Final = {"INF_POS": math.inf, "INF_NEG": -math.inf, "NAN": math.nan}
_EPOCH: Final = datetime(1970, 1, 1)

#: A parameter or value of a trial: position, name or kind, number, text.
Entry = tuple[int, str, Any, Any]


class TrialRow(NamedTuple):
    """A trial's own row; times are naive UTC, as stored.

    ``paused`` is the stored mark of a trial that is paused, or was when its study's end pruned it; else None.
    """

    trial_id: int
    number: int
    state: TrialState
    started: datetime | None
    completed: datetime | None
    paused: str | None

    @property
    def pause(self) -> str | None:
        """The mark of a paused trial, else None; a trial that resumes and pauses again has another mark."""
        return self.paused if self.state == TrialState.RUNNING else None


_ROW = (
    TRIALS.c.trial_id,
    TRIALS.c.number,
    TRIALS.c.state,
    TRIALS.c.datetime_start,
    TRIALS.c.datetime_complete,
    sa.select(TRIAL_USER_ATTRS.c.value_json)
    .where(TRIAL_USER_ATTRS.c.trial_id == TRIALS.c.trial_id, TRIAL_USER_ATTRS.c.key == PAUSED_ATTR)
    .scalar_subquery(),
)

# Statements are built once: building one takes as long as a small database takes to answer it.
_AFTER = TRIALS.c.trial_id > sa.bindparam("after", type_=sa.Integer)
_STUDY = TRIALS.c.study_id == sa.bindparam("study", type_=sa.Integer)
_OF_STUDY = sa.select(*_ROW).where(_STUDY)
# All trials of a study joined with the marks of paused ones: a subquery per trial takes a server much longer.
_MARK = TRIAL_USER_ATTRS.alias("mark")
_WITH_MARK = (
    sa.select(*_ROW)
    .outerjoin_from(TRIALS, _MARK, sa.and_(_MARK.c.trial_id == TRIALS.c.trial_id, _MARK.c.key == PAUSED_ATTR))
    .where(_STUDY)
    .order_by(TRIALS.c.trial_id)
)
_ROWS_AFTER = _OF_STUDY.where(_AFTER).order_by(TRIALS.c.trial_id)
_ROWS_OR_AMONG = _OF_STUDY.where(
    sa.or_(
        _AFTER,
        in_list(TRIALS.c.trial_id, "among"),
    )
).order_by(TRIALS.c.trial_id)
_NO_CHANGE = _OF_STUDY.add_columns(sa.literal_column("0").label("change_id"))
_CHANGED = (
    _OF_STUDY.add_columns(changes.CHANGES.c.change_id)
    .join_from(TRIALS, changes.CHANGES, changes.CHANGES.c.trial_id == TRIALS.c.trial_id)
    .where(changes.SINCE)
)
_ROWS_AFTER_SINCE = sa.union_all(_NO_CHANGE.where(_AFTER), _CHANGED)
_ROWS_OR_AMONG_SINCE = sa.union_all(
    _NO_CHANGE.where(_AFTER), _NO_CHANGE.where(in_list(TRIALS.c.trial_id, "among")), _CHANGED
)
_ROWS_OF = sa.select(*_ROW).where(in_list(TRIALS.c.trial_id, "trials")).order_by(TRIALS.c.trial_id)
_ROW_OF_ONE = sa.select(*_ROW).where(TRIALS.c.trial_id == sa.bindparam("trial", type_=sa.Integer))


def trial_row(conn: sa.Connection, trial_id: int) -> TrialRow:
    """One trial's row.

    Raises:
        KeyError: There is no such trial.
    """
    row = conn.execute(_ROW_OF_ONE, {"trial": trial_id}).first()
    if row is None:
        raise KeyError(models.NOT_FOUND_MSG)
    return TrialRow._make(row)


def trial_rows(conn: sa.Connection, study_id: int, *, after: int, among: Collection[int]) -> list[TrialRow]:
    """The rows of a study's trials whose id is above ``after`` or in ``among``, by id."""
    asked = _asked(study_id, after, among)
    rows = conn.execute(_ROWS_OR_AMONG if asked["among"] else _ROWS_AFTER, asked).all()
    return [row for row in map(TrialRow._make, rows) if row.trial_id > after or row.trial_id in among]


def rows_since(
    conn: sa.Connection, study_id: int, change: int, *, after: int, among: Collection[int]
) -> tuple[int, set[int], list[TrialRow]]:
    """The latest change, the trials with a change after ``change``, and the rows of these and of `trial_rows`."""
    asked = _asked(study_id, after, among) | {"change": change}
    rows, changed = dict[int, TrialRow](), set[int]()
    for *row, of_change in conn.execute(_ROWS_OR_AMONG_SINCE if asked["among"] else _ROWS_AFTER_SINCE, asked):
        found = TrialRow._make(row)
        if of_change:
            change = max(change, of_change)
            changed.add(found.trial_id)
        if of_change or found.trial_id > after or found.trial_id in among:
            rows[found.trial_id] = found
    return change, changed, [rows[trial_id] for trial_id in sorted(rows)]


def sampled_rows(conn: sa.Connection, study_id: int, *, most: int, maximize: bool) -> tuple[int, list[TrialRow]]:
    """The highest id of a study's trials, and their rows; for a very large study, those of a sample."""
    trials, last = sample.extent(conn, study_id)
    if trials <= most:
        return last, trial_rows(conn, study_id, after=-1, among=())
    best = sample.best_ids(conn, study_id, maximize=maximize)
    query = _WITH_MARK.where(sample.in_sample(sample.stride(trials, most), best, _MARK.c.trial_id))
    return last, [TrialRow._make(row) for row in conn.execute(query, {"study": study_id})]


def _asked(study_id: int, after: int, among: Collection[int]) -> dict[str, Any]:
    """Parameters of a statement about trials above an id or in a list; for a long list, all above its least id."""
    if len(among) <= id_lists.AT_ONCE:
        return {"study": study_id, "after": after, "among": list(among)}
    return {"study": study_id, "after": min(min(among) - 1, after), "among": []}


def rows_of(conn: sa.Connection, trial_ids: Sequence[int]) -> list[TrialRow]:
    """The rows of some trials, by id."""
    chunks = in_chunks(sorted(trial_ids))
    return [TrialRow._make(row) for chunk in chunks for row in conn.execute(_ROWS_OF, {"trials": chunk})]


def whole_trials(conn: sa.Connection, rows: Sequence[TrialRow]) -> list[FrozenTrial]:
    """The trials of these rows with everything that belongs to them, in the same order."""
    return [trial for chunk in in_chunks(rows, _WHOLE_AT_ONCE) for trial in _whole(conn, chunk)]


def system_attrs(conn: sa.Connection, trial_id: int) -> dict[str, Any]:
    """A trial's system attributes.

    Raises:
        KeyError: There is no such trial.
    """
    rows = conn.execute(_SYSTEM_ATTRS_OF_ONE, {"trial": trial_id}).all()
    if not rows:
        raise KeyError(models.NOT_FOUND_MSG)
    return {key: json.loads(value) for key, value in rows if key is not None}


_SYSTEM_ATTRS_OF_ONE = (
    sa.select(TRIAL_SYSTEM_ATTRS.c.key, TRIAL_SYSTEM_ATTRS.c.value_json)
    .outerjoin_from(TRIALS, TRIAL_SYSTEM_ATTRS, TRIAL_SYSTEM_ATTRS.c.trial_id == TRIALS.c.trial_id)
    .where(TRIALS.c.trial_id == sa.bindparam("trial", type_=sa.Integer))
)


def _entries(
    table: sa.Table, order: str | None, name: str, number: str | None, text: str | None
) -> sa.Select[tuple[Any, ...]]:
    """The statement for what one table holds about some trials, with the same columns for all tables."""
    return sa.select(
        sa.literal_column(f"'{table.name}'").label("source"),
        table.c.trial_id,
        sa.literal_column("0").label("place") if order is None else table.c[order].label("place"),
        sa.cast(table.c[name], sa.String(models.MAX_INDEXED_STRING_LENGTH)).label("name"),
        (sa.null() if number is None else table.c[number]).label("number"),
        (sa.null() if text is None else table.c[text]).label("text"),
    ).where(in_list(table.c.trial_id, "trials"))


# The first query has a value in every column, because databases take the columns' types from it.
_ALL_ENTRIES = sa.union_all(
    _entries(PARAMS, "param_id", "param_name", "param_value", "distribution_json"),
    _entries(VALUES, "objective", "value_type", "value", None),
    _entries(REPORTS, "step", "intermediate_value_type", "intermediate_value", None),
    _entries(TRIAL_USER_ATTRS, None, "key", None, "value_json"),
    _entries(TRIAL_SYSTEM_ATTRS, None, "key", None, "value_json"),
)


def _whole(conn: sa.Connection, rows: Sequence[TrialRow]) -> list[FrozenTrial]:
    params, values = defaultdict[int, list[Entry]](list), defaultdict[int, list[Entry]](list)
    reports = defaultdict[int, dict[int, float]](dict)
    user_attrs, system = defaultdict[int, dict[str, Any]](dict), defaultdict[int, dict[str, Any]](dict)
    for found in conn.execute(_ALL_ENTRIES, {"trials": [row.trial_id for row in rows]}).partitions(_FETCHED):
        for table, trial_id, place, name, number, text in found:
            if table == REPORTS.name:
                reports[trial_id][place] = number if name == _FINITE else _NOT_FINITE[name]
            elif table == PARAMS.name:
                params[trial_id].append((place, name, number, text))
            elif table == VALUES.name:
                values[trial_id].append((place, name, number, text))
            else:
                (user_attrs if table == TRIAL_USER_ATTRS.name else system)[trial_id][name] = json.loads(text)
    return trials_of(rows, params, values, reports, user_attrs, system)


def trials_of(
    rows: Iterable[TrialRow],
    params: dict[int, list[Entry]],
    values: dict[int, list[Entry]],
    reports: dict[int, dict[int, float]],
    user_attrs: dict[int, dict[str, Any]],
    system_attrs: dict[int, dict[str, Any]],
) -> list[FrozenTrial]:
    """Build the trials of these rows with what belongs to each; removes it from the mappings (by trial id)."""
    return [
        _trial_of(
            row,
            sorted(params.pop(row.trial_id, ())),
            sorted(values.pop(row.trial_id, ())),
            intermediate_values=reports.pop(row.trial_id, {}),
            user_attrs=user_attrs.pop(row.trial_id, {}),
            system_attrs=system_attrs.pop(row.trial_id, {}),
        )
        for row in rows
    ]


def _trial_of(row: TrialRow, params: list[Entry], values: list[Entry], **others: dict[Any, Any]) -> FrozenTrial:
    """Build a trial from its row, its parameters and values, both in order, and its other fields."""
    distributions = {name: _distribution(text) for _, name, _, text in params}
    return FrozenTrial(
        number=row.number,
        state=row.state,
        value=None,
        values=[number if kind == _FINITE else _NOT_FINITE[kind] for _, kind, number, _ in values] or None,
        datetime_start=_local(row.started),
        datetime_complete=_local(row.completed),
        params={name: distributions[name].to_external_repr(number) for _, name, number, _ in params},
        distributions=distributions,
        trial_id=row.trial_id,
        **others,
    )


# Trials share distribution objects: a study has only a few, and they are never changed.
_distribution = functools.lru_cache(maxsize=1024)(json_to_distribution)


def _local(stored: datetime | None) -> datetime | None:
    """Optuna stores naive UTC and shows naive local time."""
    # This takes a tenth of the time of converting aware times, and each trial has two times.
    return None if stored is None else datetime.fromtimestamp((stored - _EPOCH).total_seconds())
