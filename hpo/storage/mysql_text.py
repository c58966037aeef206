"""Makes text columns on MariaDB and MySQL behave as on other databases: compared exactly, and of any length.

With the server's usual collation "lr" equals "LR", and "lr" equals "lr " with a space: two studies with such names
would be one study, and of two such parameters the second would not be stored. Its TEXT holds at most 65,535 bytes.
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
    """Tables, Optuna's and ours, whose text is limited or not compared exactly; none on other databases."""
    if conn.dialect.name != "mysql":
        return []
    wrong = set(conn.execute(_WRONG, {"collation": _collation(conn)}).scalars())
    tables = (*models.BaseModel.metadata.sorted_tables, *ledger.metadata.sorted_tables)
    return [table for table in tables if table.name in wrong]


def convert_text(conn: sa.Connection) -> None:
    """Convert the tables that `tables_of_other_text` finds; their content stays."""
    for table in tables_of_other_text(conn):
        to = f"CONVERT TO CHARACTER SET utf8mb4 COLLATE {_collation(conn)}"
        conn.execute(sa.text(f"ALTER TABLE {table.name} {', '.join([to, *_widened(table)])}"))


def _widened(table: sa.Table) -> Iterator[str]:
    for column in table.columns:
        if isinstance(column.type, sa.Text):
            yield f"MODIFY {column.name} LONGTEXT{'' if column.nullable else ' NOT NULL'}"


def _collation(conn: sa.Connection) -> str:
    """The collation that compares by code points, including spaces at the end."""
    return "utf8mb4_nopad_bin" if getattr(conn.dialect, "is_mariadb", False) else "utf8mb4_0900_bin"
