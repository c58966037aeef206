"""Lists of ids in the condition of a statement, in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import sqlalchemy as sa

#: Ids in one statement: far fewer than any database's limit, but enough that the statement's own cost is
#: negligible.
AT_ONCE: Final = 500

_Item = TypeVar("_Item")


def in_chunks(items: Sequence[_Item], size: int | None = None) -> list[Sequence[_Item]]:
    """The items in chunks of ``size``, the last one maybe smaller; None: `AT_ONCE`."""
    size = size or AT_ONCE
    return [items[start : start + size] for start in range(0, len(items), size)]


def in_list(column: sa.Column[Any], name: str) -> sa.ColumnElement[bool]:
    """The condition that a column of integers is in the list that the statement gets as the parameter ``name``.

    The numbers are written into the statement's text: passing each as a parameter would take the driver longer
    than the database needs for the answer.
    """
    return column.in_(sa.bindparam(name, expanding=True, literal_execute=True, type_=sa.Integer))
