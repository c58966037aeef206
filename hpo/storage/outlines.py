"""Reading a study's trials without their curves: each statement answers for all trials at once.

Tens of thousands of trials have millions of reported values, and neither a table of trials nor a count shows them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any, Final

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
)
from hpo.storage.optuna_private import PARAMS, REPORTS, TRIAL_SYSTEM_ATTRS, TRIAL_USER_ATTRS, TRIALS, VALUES
from hpo.storage.outage import patient
from hpo.storage.reader import Part, ReadingStorage, trial_of, trial_rows

_STUDY: Final = sa.bindparam("study", type_=sa.Integer)
_OF_STUDY: Final = sa.and_(
    TRIALS.c.study_id == _STUDY, TRIALS.c.trial_id > sa.bindparam("after", type_=sa.Integer)
)


def _joined(table: sa.Table, *columns: Any) -> sa.Select[tuple[Any, ...]]:
    return (
        sa.select(table.c.trial_id, *columns).join(TRIALS, TRIALS.c.trial_id == table.c.trial_id).where(_OF_STUDY)
    )


_VALUES: Final = _joined(
    VALUES, VALUES.c.objective, sa.cast(VALUES.c.value_type, sa.String(16)), VALUES.c.value, sa.null()
)
_PARAMS: Final = _joined(
    PARAMS, PARAMS.c.param_id, PARAMS.c.param_name, PARAMS.c.param_value, PARAMS.c.distribution_json
)
_USER: Final = _joined(TRIAL_USER_ATTRS, TRIAL_USER_ATTRS.c.key, TRIAL_USER_ATTRS.c.value_json)
_SYSTEM: Final = _joined(TRIAL_SYSTEM_ATTRS, TRIAL_SYSTEM_ATTRS.c.key, TRIAL_SYSTEM_ATTRS.c.value_json)
# What decides how a trial counts. A complete one is ranked by its values, any other by its best epoch.
_COUNTED_USER: Final = _USER.where(
    sa.or_(
        TRIAL_USER_ATTRS.c.key.in_([OUTCOME_ATTR, FORK_ATTR]),
        sa.and_(TRIAL_USER_ATTRS.c.key == BEST_ATTR, TRIALS.c.state != TrialState.COMPLETE),
    )
)
_COUNTED_SYSTEM: Final = _SYSTEM.where(
    sa.or_(
        TRIAL_SYSTEM_ATTRS.c.key.in_([IMPORTED_ATTR, CONDEMNED_ATTR]),
        TRIAL_SYSTEM_ATTRS.c.key.startswith(CONSTRAINT_ATTR),
    )
)
# One look into the index for each trial.
_LAST_STEP: Final = sa.select(
    TRIALS.c.trial_id,
    sa.select(sa.func.max(REPORTS.c.step)).where(REPORTS.c.trial_id == TRIALS.c.trial_id).scalar_subquery(),
    sa.null(),
).where(_OF_STUDY)


def _last_and_best(best: Any) -> sa.Select[tuple[Any, ...]]:
    found = _joined(REPORTS, sa.func.max(REPORTS.c.step), best(REPORTS.c.intermediate_value))
    return found.group_by(REPORTS.c.trial_id)


_IDS: Final = sa.select(TRIALS.c.trial_id).where(TRIALS.c.study_id == _STUDY).order_by(TRIALS.c.trial_id.desc())
_LAST_AND_LEAST: Final = _last_and_best(sa.func.min)
_LAST_AND_LARGEST: Final = _last_and_best(sa.func.max)


@patient
def outlined_trials(storage: ReadingStorage, study_id: int) -> list[FrozenTrial]:
    """A study's trials by number, with what decides how each counts: enough to count and to rank them.

    They have no parameters, and of their attributes only outcome, pause, fork, bounds, the pruner's decision and,
    where it stands for their value, the best epoch. In place of the curve is its last step, with NaN for a value.
    """
    with storage.single_statements() as conn:
        return _trials(conn, study_id, -1, _LAST_STEP, (_COUNTED_USER, _COUNTED_SYSTEM), params=False)


@patient
def trials_without_curves(
    storage: ReadingStorage, study_id: int, *, minimize: bool, after: int = -1
) -> list[FrozenTrial]:
    """A study's trials by number, with all but their curves; those with an id above ``after``.

    In place of a curve is its last step, with the best finite value of all steps, NaN where there is none.
    """
    steps = _LAST_AND_LEAST if minimize else _LAST_AND_LARGEST
    with storage.single_statements() as conn:
        return _trials(conn, study_id, after, steps, (_USER, _SYSTEM), params=True)


@patient
def id_before_last(storage: ReadingStorage, study_id: int, count: int) -> int:
    """The id above which a study has so many trials; -1 where it has no more."""
    with storage.single_statements() as conn:
        found = conn.execute(_IDS.limit(1).offset(count), {"study": study_id}).scalar()
    return -1 if found is None else int(found)


def _trials(
    conn: sa.Connection,
    study_id: int,
    after: int,
    steps: sa.Select[tuple[Any, ...]],
    attrs: tuple[sa.Select[tuple[Any, ...]], sa.Select[tuple[Any, ...]]],
    *,
    params: bool,
) -> list[FrozenTrial]:
    # The rows come first: what belongs to one that was finished by then changes no more.
    rows = trial_rows(conn, study_id, after=after, among=())
    of_study = {"study": study_id, "after": after}
    drawn = _parts(conn, _PARAMS, of_study) if params else {}
    values = _parts(conn, _VALUES, of_study)
    reports = {
        trial_id: {last: math.nan if best is None else best}
        for trial_id, last, best in conn.execute(steps, of_study)
        if last is not None
    }
    user, system = (_attrs(conn, query, of_study) for query in attrs)
    for row in rows:
        if row.paused is not None:
            user.setdefault(row.trial_id, {})[PAUSED_ATTR] = json.loads(row.paused)
    found = [
        trial_of(
            row,
            sorted(drawn.get(row.trial_id, ())),
            sorted(values.get(row.trial_id, ())),
            intermediate_values=reports.get(row.trial_id, {}),
            user_attrs=user.get(row.trial_id, {}),
            system_attrs=system.get(row.trial_id, {}),
        )
        for row in rows
    ]
    return sorted(found, key=lambda trial: trial.number)


def _parts(conn: sa.Connection, query: sa.Select[tuple[Any, ...]], whose: dict[str, int]) -> dict[int, list[Part]]:
    found = defaultdict[int, list[Part]](list)
    for trial_id, *part in conn.execute(query, whose):
        found[trial_id].append(tuple(part))
    return found


def _attrs(
    conn: sa.Connection, query: sa.Select[tuple[Any, ...]], whose: dict[str, int]
) -> dict[int, dict[str, Any]]:
    found = defaultdict[int, dict[str, Any]](dict)
    for trial_id, key, text in conn.execute(query, whose):
        found[trial_id][key] = json.loads(text)
    return found
