"""Runs that end in every way, in a row: none hangs, counts are exact, and what resumes comes to the same bits."""

from pathlib import Path

import pytest

from tests.unit.trainer.distributed.storm import blow

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("size", "counts"),
    [(2, {"prune": 40, "nan": 12, "stop": 12, "kill": 6}), (4, {"prune": 6, "nan": 3, "stop": 3, "kill": 2})],
)
def test_a_storm_leaves_no_trace(size: int, counts, tmp_path: Path) -> None:
    storm = blow(size, tmp_path, counts)
    assert {kind: len(seconds) for kind, seconds in storm.seconds.items()} == counts
    assert storm.problems == []
