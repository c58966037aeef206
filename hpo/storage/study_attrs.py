"""Changes several attributes of a study together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from hpo.errors import StudyError
from hpo.storage.optuna_private import STUDY_USER_ATTRS


def replace_study_attrs(
    engine: sa.Engine, study_id: int, attrs: Mapping[str, Any], known: tuple[str, Any]
) -> None:
    """Store user attributes of a study in one transaction.

    Args:
        engine: The database.
        study_id: The study.
        attrs: The new values by key.
        known: The key and the current value of one of them.

    Raises:
        StudyError: The stored value is no longer the known one: another process was faster. Nothing is stored.
    """
    table, (key, value) = STUDY_USER_ATTRS, known
    mine = (table.c.study_id == study_id, table.c.key == key, table.c.value_json == json.dumps(value))
    with engine.begin() as conn:
        changed = conn.execute(sa.update(table).where(*mine).values(value_json=json.dumps(attrs[key])))
        if changed.rowcount != 1:
            raise StudyError("another process has changed the study's config\n  fix: run the command again")
        for name in sorted(attrs.keys() - {key}):
            conn.execute(sa.delete(table).where(table.c.study_id == study_id, table.c.key == name))
            row = {"study_id": study_id, "key": name, "value_json": json.dumps(attrs[name])}
            conn.execute(sa.insert(table).values(row))
