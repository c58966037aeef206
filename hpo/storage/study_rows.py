"""Reads a study's own rows, each in one statement and without Optuna's object-relational mapper.

The first query to the mapper sets up all of Optuna's classes, which takes longer than everything else that a
command reads.
"""

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from optuna.study import StudyDirection

from hpo.storage.optuna_private import (
    STUDIES,
    STUDY_DIRECTIONS,
    STUDY_SYSTEM_ATTRS,
    STUDY_USER_ATTRS,
    models,
)

_STUDY = sa.bindparam("study", type_=sa.Integer)
_ID = sa.select(STUDIES.c.study_id).where(STUDIES.c.study_name == sa.bindparam("name", type_=sa.String))
_NAME = sa.select(STUDIES.c.study_name).where(STUDIES.c.study_id == _STUDY)
_DIRECTIONS = (
    sa.select(STUDY_DIRECTIONS.c.direction)
    .where(STUDY_DIRECTIONS.c.study_id == _STUDY)
    .order_by(STUDY_DIRECTIONS.c.objective)
)


def study_id(conn: sa.Connection, name: str) -> int:
    """The id of the study of this name; KeyError if there is none."""
    return int(_only(conn, _ID, {"name": name}))


def study_name(conn: sa.Connection, study: int) -> str:
    """The name of a study; KeyError if there is none of this id."""
    return str(_only(conn, _NAME, {"study": study}))


def study_directions(conn: sa.Connection, study: int) -> list[StudyDirection]:
    """The directions of a study's objectives, in their order; KeyError if there is no such study."""
    found = list(conn.execute(_DIRECTIONS, {"study": study}).scalars())
    if not found:  # each study has one at least
        raise KeyError(models.NOT_FOUND_MSG)
    return found


def _attrs_of(table: sa.Table) -> sa.Select[tuple[Any, ...]]:
    """The statement for a study's attributes; it returns one row without a key if the study has none."""
    return (
        sa.select(table.c.key, table.c.value_json)
        .outerjoin_from(STUDIES, table, table.c.study_id == STUDIES.c.study_id)
        .where(STUDIES.c.study_id == _STUDY)
    )


_USER_ATTRS, _SYSTEM_ATTRS = _attrs_of(STUDY_USER_ATTRS), _attrs_of(STUDY_SYSTEM_ATTRS)


def study_user_attrs(conn: sa.Connection, study: int) -> dict[str, Any]:
    """A study's user attributes; KeyError if there is no such study."""
    return _attrs(conn, _USER_ATTRS, study)


def study_system_attrs(conn: sa.Connection, study: int) -> dict[str, Any]:
    """A study's system attributes; KeyError if there is no such study."""
    return _attrs(conn, _SYSTEM_ATTRS, study)


def _attrs(conn: sa.Connection, query: sa.Select[tuple[Any, ...]], study: int) -> dict[str, Any]:
    rows = conn.execute(query, {"study": study}).all()
    if not rows:
        raise KeyError(models.NOT_FOUND_MSG)
    return {key: json.loads(value) for key, value in rows if key is not None}


def _only(conn: sa.Connection, query: sa.Select[tuple[Any]], parameters: Mapping[str, Any]) -> Any:
    found = conn.execute(query, parameters).first()
    if found is None:
        raise KeyError(models.NOT_FOUND_MSG)
    return found[0]
