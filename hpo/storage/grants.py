"""Grants: how many epochs a scheduler lets a trial train, stored with the claim on the trial.

The grants of a study are numbered. A grant is stored only if its number is the next, in the transaction that gives
the trial to a worker. So each was decided with knowledge of all earlier ones, and no two workers spend the same
epochs. A failed trial that is retried may train its granted epochs again, so a grant that was decided before that
is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import sqlalchemy as sa
from optuna.trial import FrozenTrial
from sqlalchemy import orm

from hpo.storage.attributes import FORK_ATTR, GRANTED_ATTR, GRANTS_ATTR, RETRIES_ATTR, SCHEDULER_ATTR
from hpo.storage.budget import lock_study
from hpo.storage.changes import note_change
from hpo.storage.guarded import set_attr
from hpo.storage.ledger import Executor, changed_rows
from hpo.storage.lineage import Forked
from hpo.storage.optuna_private import (
    FIXED_PARAMS_ATTR,
    STUDY_USER_ATTRS,
    TRIAL_SYSTEM_ATTRS,
    TRIAL_USER_ATTRS,
    TRIALS,
)
from hpo.storage.paused_end import prune_paused_trial
from hpo.storage.pausing import forget_pause


class OldGrantError(Exception):
    """Another grant was stored, or a trial retried, after the state was read from which this one was decided."""


class Granted(TypedDict):
    """A grant as it is stored with its trial.

    Attributes:
        number: Its number in the study, from 0.
        until: The epoch after which the trial pauses; None: it trains to its end.
        why: Why, see `hpo.search.schedulers.scheduler.Why`; for a fork also where it begins
            (`hpo.storage.lineage.Forked`).
    """

    number: int
    until: int | None
    why: dict[str, Any]


#: Called when a trial's grant ends; returns the next grant, or None if the trial pauses. The argument holds the
#: values, by epoch, that the trial has reported and that are not stored yet; it stores them with a grant, and
#: without one it leaves them to the caller.
Extend = Callable[[Mapping[int, float]], Granted | None]


@dataclass(frozen=True)
class Grant:
    """A grant to store.

    Attributes:
        study_id: Optuna's id of the study.
        granted: What is stored with the trial.
        params: The parameters of a new trial; None: its sampler draws them.
        state: What the scheduler stores for its later decisions; None: the stored state stays.
        fork: For a new trial that is a fork, where it begins; else None.
        cuts: Whether it cuts the grant that a waiting trial already has.
        retries: How many trials had been retried when it was decided; None: do not check.
    """

    study_id: int
    granted: Granted
    params: Mapping[str, Any] | None = None
    state: Mapping[str, Any] | None = None
    fork: Forked | None = None
    cuts: bool = False
    retries: int | None = None


def grants_of(trial: FrozenTrial) -> Sequence[Granted]:
    """A trial's grants, the first one first; none in a study without a scheduler."""
    return cast("Sequence[Granted]", trial.user_attrs.get(GRANTS_ATTR, ()))


def granted_until(trial: FrozenTrial) -> int | None:
    """The epoch after which a trial pauses; None if it trains to its end."""
    grants = grants_of(trial)
    return grants[-1]["until"] if grants else None


def granted_after(grants: Sequence[Granted]) -> int:
    """The epoch after which the last of a trial's grants begins."""
    last = grants[-1]["until"] if grants else None
    # An earlier grant that does not end before the last one was cut by it, and does not count.
    ends = (end for grant in grants[:-1] if (end := grant["until"]) is not None and (last is None or end < last))
    return max(ends, default=inherited_by(grants))


def inherited_by(grants: Sequence[Granted]) -> int:
    """Epochs that a trial with these grants has from its parent; 0 for one that is no fork."""
    return int(grants[0]["why"].get("epoch", 0)) if grants else 0


def begin_grants(session: orm.Session, study_id: int) -> None:
    """Prepare a study for numbered grants, from 0 if it has none; several processes may do so at the same time."""
    lock_study(session, study_id)
    for key in (GRANTED_ATTR, RETRIES_ATTR):
        if session.execute(sa.select(STUDY_USER_ATTRS.c.key).where(_is(study_id, key))).first() is None:
            _add(session, study_id, key, 0)


def store_grant(session: orm.Session, trial_id: int, grant: Grant) -> None:
    """Store a grant in the transaction that gives its trial to a worker.

    Raises:
        OldGrantError: It is not the study's next one.
    """
    add_grant(session, trial_id, grant)
    if grant.params is not None:
        set_attr(session, TRIAL_SYSTEM_ATTRS, trial_id, FIXED_PARAMS_ATTR, dict(grant.params))
    if grant.fork is not None:
        _store_fork(session, trial_id, grant.study_id, grant.fork)


def add_grant(conn: Executor, trial_id: int, grant: Grant) -> None:
    """Store a grant that brings no parameters and no fork, in a transaction that holds its trial.

    Raises:
        OldGrantError: It is not the study's next one.
    """
    number, more = grant.granted["number"], json.dumps(grant.granted)
    if not changed_rows(
        conn, _NEXT, {"study": grant.study_id, "was": json.dumps(number), "now": json.dumps(number + 1)}
    ):
        raise OldGrantError(f"grant {number} is not the study's next one")
    if grant.retries not in (None, _retries(conn, grant.study_id)):
        raise OldGrantError(f"a trial was retried after grant {number} was decided")
    if not changed_rows(conn, _APPEND, {"trial": trial_id, "more": f", {more}]"}):
        conn.execute(_FIRST, {"trial_id": trial_id, "key": GRANTS_ATTR, "value_json": f"[{more}]"})
    if grant.state is not None:
        state = {"study": grant.study_id, "now": json.dumps(grant.state)}
        if not changed_rows(conn, _SET_STATE, state):
            _add(conn, grant.study_id, SCHEDULER_ATTR, grant.state)


def note_retry(session: orm.Session, study_id: int) -> None:
    """Make grants that were decided before this refused: they do not count what the retried trial may train."""
    now = json.dumps(_retries(session, study_id) + 1)
    if not changed_rows(session, _SET_RETRIES, {"study": study_id, "now": now}):
        _add(session, study_id, RETRIES_ATTR, 1)


def _retries(conn: Executor, study_id: int) -> int:
    """How many trials were retried; locks this number until the transaction's end."""
    return int(json.loads(cast("str", conn.execute(_RETRIES, {"study": study_id}).scalar() or "0")))


def is_granted(session: orm.Session, trial_id: int) -> bool:
    """Whether a trial has a grant."""
    return bool(_stored(session, trial_id))


def has_grant(conn: Executor, trial_id: int, grant: Grant) -> bool:
    """Whether an earlier try has stored this grant after all."""
    return grant.granted in _stored(conn, trial_id)


def _store_fork(session: orm.Session, trial_id: int, study_id: int, fork: Forked) -> None:
    set_attr(session, TRIAL_USER_ATTRS, trial_id, FORK_ATTR, fork)
    of_study = (TRIALS.c.study_id == study_id, TRIALS.c.number == fork["replaces"])
    replaced = session.execute(sa.select(TRIALS.c.trial_id).where(*of_study)).scalar()
    if replaced is not None and prune_paused_trial(session, replaced) is not None:
        forget_pause(session, replaced, decision=False)  # so a larger budget does not pause it again
        note_change(session, study_id, replaced)


def _stored(conn: Executor, trial_id: int) -> list[Granted]:
    found = conn.execute(_GRANTS, {"trial": trial_id}).scalar()
    return [] if found is None else cast("list[Granted]", json.loads(cast("str", found)))


# Statements are built once: building one costs more than to execute it.
_OF_TRIAL = (
    TRIAL_USER_ATTRS.c.trial_id == sa.bindparam("trial", type_=sa.Integer),
    TRIAL_USER_ATTRS.c.key == GRANTS_ATTR,
)
_TEXT = TRIAL_USER_ATTRS.c.value_json
_GRANTS = sa.select(_TEXT).where(*_OF_TRIAL)
#: Appends a grant to the JSON list: the text of ``more`` replaces the closing bracket.
_APPEND = (
    sa.update(TRIAL_USER_ATTRS)
    .where(*_OF_TRIAL)
    .values(
        value_json=sa.func.substr(_TEXT, 1, sa.func.char_length(_TEXT) - 1, type_=sa.String)
        + sa.bindparam("more", type_=sa.String)
    )
)
_FIRST = sa.insert(TRIAL_USER_ATTRS).inline()


def _change(key: str) -> sa.Update:
    """A statement that changes an attribute of a study, if the study has it."""
    study = STUDY_USER_ATTRS.c.study_id == sa.bindparam("study", type_=sa.Integer)
    now = sa.bindparam("now", type_=sa.String)
    return sa.update(STUDY_USER_ATTRS).where(study, STUDY_USER_ATTRS.c.key == key).values(value_json=now)


_NEXT = _change(GRANTED_ATTR).where(STUDY_USER_ATTRS.c.value_json == sa.bindparam("was", type_=sa.String))
_SET_STATE = _change(SCHEDULER_ATTR)
_SET_RETRIES = _change(RETRIES_ATTR)
_RETRIES = (
    sa.select(STUDY_USER_ATTRS.c.value_json)
    .where(STUDY_USER_ATTRS.c.study_id == sa.bindparam("study", type_=sa.Integer))
    .where(STUDY_USER_ATTRS.c.key == RETRIES_ATTR)
    .with_for_update()
)


def _is(study_id: int, key: str) -> sa.ColumnElement[bool]:
    return (STUDY_USER_ATTRS.c.study_id == study_id) & (STUDY_USER_ATTRS.c.key == key)


def _add(conn: Executor, study_id: int, key: str, value: object) -> None:
    conn.execute(sa.insert(STUDY_USER_ATTRS).values(study_id=study_id, key=key, value_json=json.dumps(value)))
