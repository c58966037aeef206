"""What a worker does on the storage before it forks the processes of its trials."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from hpo.storage.ledger import Owner
from hpo.storage.study_storage import StudyStorage
from tests.support.owners import load, make_study, opened


def tables(storage: StudyStorage) -> dict[str, list[Any]]:
    """Every row of the database."""
    metadata = sa.MetaData()
    metadata.reflect(storage.engine)
    with storage.engine.connect() as conn:
        return {
            name: sorted(map(repr, conn.execute(sa.select(table)).all()))
            for name, table in metadata.tables.items()
        }


def test_a_rehearsal_changes_nothing_and_leaves_the_statements_of_a_trial_compiled(ready_url: str) -> None:
    make_study(ready_url, 3, enqueued=1)
    with opened(ready_url, owner=Owner.current()) as storage:
        load(storage, 0).ask()
        before = tables(storage)
        storage.rehearse()
        assert tables(storage) == before
        assert storage.beat() == [], "only the trial is held, and it is still"
        storage.rehearse()  # whatever a refusal leads to is compiled by now
        cache: Any = storage.engine._compiled_cache
        compiled = set(cache)
        storage.rehearse()
        assert set(cache) == compiled
        trial = load(storage, 0).ask()
        asked = set(cache)
        trial.report(0.5, 1)
        trial.set_user_attr("colour", "red")
        assert set(cache) == asked
