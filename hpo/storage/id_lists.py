"""Lists of ids in a statement's condition, and how many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import sqlalchemy as sa

#: Ids in one statement: far below what any database takes, and enough for the statement's own cost not to count.
AT_ONCE: Final = 500

_Item = TypeVar("_Item")


def in_chunks(items: Sequence[_Item], size: int | None = None) -> list[Sequence[_Item]]:
    """The items in chunks of one size, the last one smaller; None: that of ids in one statement."""
    size = size or AT_ONCE
    return [items[start : start + size] for start in range(0, len(items), size)]


def in_list(column: sa.Column[Any], name: str) -> sa.ColumnElement[bool]:
    """Whether a column of integers is one of those that a statement is given under a name.

    They are written into the statement: to pass each as a parameter takes a driver longer than the database needs
    for the answer.
    """
    return column.in_(sa.bindparam(name, expanding=True, literal_execute=True, type_=sa.Integer))
