"""What all tests share, and which of them `make test` leaves to `make test-all`."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# One thread a test: the suite runs in parallel, and bit-exactness holds at an equal number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")

from hpo.storage.ledger import Owner
from hpo.storage.study_storage import StudyStorage
from tests.support.in_process import workers_in_process
from tests.support.owners import make_study, opened
from tests.support.studies import Studies

pytest_plugins = ["tests.support.databases"]

#: Databases that are programs of their own, as tests name them.
_SERVERS = ("postgresql", "mariadb")
_ACCEPTANCE = Path(__file__).parent / "acceptance"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a database server, and whole studies as a person runs them, as part of the full suite."""
    for item in items:
        if item.path.is_relative_to(_ACCEPTANCE) or _needs_a_server(item):
            item.add_marker("full")


def pytest_collection_finish() -> None:
    """Take what the collection made out of the garbage collector's sight: modules and thousands of tests stay.

    Without this each full collection of each test visits them all.
    """
    gc.collect()
    gc.freeze()


def _needs_a_server(item: pytest.Item) -> bool:
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    asked = {"postgres_server", "mariadb_server"} & set(getattr(item, "fixturenames", ()))
    return bool(asked) or any(isinstance(value, str) and value in _SERVERS for value in given)


@pytest.fixture
def studies(tmp_path: Path, ready_sqlite_file: Path) -> Studies:
    """Studies in the test's own folder."""
    return Studies(tmp_path, ready_sqlite_file)


@pytest.fixture
def two_owners(ready_url: str) -> Iterator[tuple[StudyStorage, StudyStorage]]:
    """Two workers' storages on one study with a budget of 10."""
    make_study(ready_url, 10)
    with (
        opened(ready_url, owner=Owner.current(worker="a")) as first,
        opened(ready_url, owner=Owner.current(worker="b")) as second,
    ):
        yield first, second


@pytest.fixture
def in_process() -> Iterator[None]:
    """`hpo run` and `hpo.run` use threads of this process as workers: where no process is the point."""
    with workers_in_process():
        yield
