"""Lists of ids in a statement's condition."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa


def in_list(column: sa.Column[Any], name: str) -> sa.ColumnElement[bool]:
    """Whether a column of integers is one of those that a statement is given under a name.

    They are written into the statement: to pass each as a parameter takes a driver longer than the database needs
    for the answer.
    """
    return column.in_(sa.bindparam(name, expanding=True, literal_execute=True, type_=sa.Integer))
