"""Optuna's own contract for storages on ours: directly, and through the cache as studies use it."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from optuna.storages import BaseStorage
from optuna.storages._rdb import models
from optuna.study import StudyDirection
from optuna.testing.pytest_storages import StorageTestCase

from hpo.storage import ledger
from hpo.storage.cache import StudyCache
from hpo.storage.opening import open_storage
from hpo.storage.study_storage import StudyStorage
from tests.support.databases import server_of


def empty(storage: StudyStorage) -> None:
    """Delete all rows but the schema's version: faster than making the tables anew."""
    keep = models.VersionInfoModel.__table__
    with storage.engine.begin() as conn:
        conn.execute(sa.delete(ledger.ATTEMPTS))
        for table in reversed(models.BaseModel.metadata.sorted_tables):
            if table is not keep:
                conn.execute(sa.delete(table))


@pytest.fixture(scope="module")
def backend(kind: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A storage on one kind of database, for all tests of a class."""
    if kind == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('contract') / 'study.db'}"
    else:
        url = server_of(kind, request).new_database(ready=True)
    storage = open_storage(url, create=True)
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


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"], scope="module")
class TestStorage(Contract):
    @pytest.fixture
    def storage(self, backend: StudyStorage) -> BaseStorage:
        empty(backend)
        return backend


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"], scope="module")
class TestCachedStorage(Contract):
    """As studies use it: through our cache. SQLite, whose transactions are the strangest, is tested here only."""

    @pytest.fixture
    def storage(self, backend: StudyStorage) -> BaseStorage:
        empty(backend)
        return StudyCache(backend)
