"""What the tests of the service share."""

from pathlib import Path

import pytest

from tests.hpo.support import Studies


@pytest.fixture
def studies(tmp_path: Path, ready_sqlite_file: Path) -> Studies:
    """Studies in the test's own folder."""
    return Studies(tmp_path, ready_sqlite_file)
