"""What the tests of the service share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpo.storage.ledger import Owner
from hpo.storage.study_storage import StudyStorage
from tests.hpo.in_process import workers_in_process
from tests.hpo.owners import make_study, opened
from tests.hpo.support import Studies


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
