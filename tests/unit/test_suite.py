"""What holds for the tests themselves."""

from __future__ import annotations

import gc
from pathlib import Path

TESTS = Path(__file__).parents[1]
#: Run by `test_full_disk` in a process of its own.
LIMITED = TESTS / "unit" / "trainer" / "full_disk"


def test_what_the_collection_made_is_not_visited_by_each_garbage_collection() -> None:
    assert gc.get_freeze_count() > 100_000


def test_no_other_test_lets_it_be_visited_again() -> None:
    """All tests that the process runs later would take up to twice as long."""
    word = "gc.un" + "freeze"
    using = {path.name for path in TESTS.rglob("*.py") if word in path.read_text()}
    assert using == {"test_garbage_collection.py"}


def test_no_test_changes_the_limits_of_its_own_process() -> None:
    """A limit that stays, or that a thread of another test meets, fails tests far from it."""
    word = "set" + "rlimit"
    using = {path for path in TESTS.rglob("*.py") if word in path.read_text()}
    assert {path.parent for path in using} <= {LIMITED}
