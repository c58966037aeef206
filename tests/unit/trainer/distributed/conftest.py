"""Processes that the tests share."""

from collections.abc import Iterator

import pytest

from tests.unit.trainer.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """Two processes."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    """Four processes."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_apart() -> Iterator[Ranks]:
    """Two processes that share no memory."""
    ranks = Ranks(2, apart=True)
    yield ranks
    ranks.close()
