"""Optuna's own contract for storages on ours: directly, and wrapped in Optuna's cache as studies use it."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from optuna.storages import BaseStorage, _CachedStorage
from optuna.storages._rdb import models
from optuna.study import StudyDirection
from optuna.testing.pytest_storages import StorageTestCase

from hpo import ledger
from hpo.storage import StudyStorage, open_storage
from tests.hpo.databases import PostgresServer


def empty(storage: StudyStorage) -> None:
    """Delete all rows but the schema's version: faster than making the tables anew."""
    keep = models.VersionInfoModel.__table__
    with storage.engine.begin() as conn:
        conn.execute(sa.delete(ledger.ATTEMPTS))
        for table in reversed(models.BaseModel.metadata.sorted_tables):
            if table is not keep:
                conn.execute(sa.delete(table))


@pytest.fixture(scope="module")
def sqlite_storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StudyStorage]:
    file: Path = tmp_path_factory.mktemp("contract") / "study.db"
    storage = open_storage(f"sqlite:///{file}", create=True)
    yield storage
    storage.close()


@pytest.fixture(scope="module")
def postgres_storage(postgres_server: PostgresServer) -> Iterator[StudyStorage]:
    storage = open_storage(postgres_server.new_database(ready=True), create=True)
    yield storage
    storage.close()


class Contract(StorageTestCase):
    def test_pickle_storage(self, storage: BaseStorage) -> None:
        """As Optuna's test, but the copy's connections are closed."""
        study_id = storage.create_new_study(directions=[StudyDirection.MINIMIZE])
        storage.set_study_system_attr(study_id, "key", "pickle")
        restored = pickle.loads(pickle.dumps(storage))
        assert restored.get_study_system_attrs(study_id) == {"key": "pickle"}
        getattr(restored, "_backend", restored).close()


class TestPostgres(Contract):
    @pytest.fixture
    def storage(self, postgres_storage: StudyStorage) -> BaseStorage:
        empty(postgres_storage)
        return postgres_storage


class TestSqliteCached(Contract):
    @pytest.fixture
    def storage(self, sqlite_storage: StudyStorage) -> BaseStorage:
        empty(sqlite_storage)
        return _CachedStorage(sqlite_storage)
