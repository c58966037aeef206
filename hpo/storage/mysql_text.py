"""Text on MariaDB and MySQL as on every other database: told apart by each letter, and of any length.

The server's usual collation takes "lr" and "LR" for one, or "lr" and "lr " with a space: two studies of such names
were one study, and of two such parameters the second was not stored. Its TEXT ends at 65,535 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import sqlalchemy as sa

from hpo.storage import ledger
from hpo.storage.optuna_private import models

_KINDS: Final = ("varchar", "text", "mediumtext", "longtext")
_WRONG: Final = sa.text(
    "SELECT table_name FROM information_schema.columns WHERE table_schema = DATABASE()"
    " AND data_type IN :kinds AND (collation_name <> :collation OR data_type = 'text')"
).bindparams(sa.bindparam("kinds", _KINDS, expanding=True))


def tables_of_other_text(conn: sa.Connection) -> list[sa.Table]:
    """Tables, Optuna's and ours, whose text is short or not told apart by each letter; none on other servers."""
    if conn.dialect.name != "mysql":
        return []
    wrong = set(conn.execute(_WRONG, {"collation": _collation(conn)}).scalars())
    tables = (*models.BaseModel.metadata.sorted_tables, *ledger.metadata.sorted_tables)
    return [table for table in tables if table.name in wrong]


def convert_text(conn: sa.Connection) -> None:
    """Mend the tables that `tables_of_other_text` finds; what is stored in them stays."""
    for table in tables_of_other_text(conn):
        to = f"CONVERT TO CHARACTER SET utf8mb4 COLLATE {_collation(conn)}"
        conn.execute(sa.text(f"ALTER TABLE {table.name} {', '.join([to, *_widened(table)])}"))


def _widened(table: sa.Table) -> Iterator[str]:
    for column in table.columns:
        if isinstance(column.type, sa.Text):
            yield f"MODIFY {column.name} LONGTEXT{'' if column.nullable else ' NOT NULL'}"


def _collation(conn: sa.Connection) -> str:
    """The collation that compares by code points, and spaces at the end, too."""
    return "utf8mb4_nopad_bin" if getattr(conn.dialect, "is_mariadb", False) else "utf8mb4_0900_bin"
