"""Which processes of paused trials are kept; tests/integration/test_pausing_runs.py has whole runs."""

import gc
import multiprocessing
import resource
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch

from hpo.execution import kept, memory
from hpo.execution.kept import MOST, anonymous, spare

_CPU = torch.device("cpu")
_FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own process is large, and so may others on its machine be."""
    monkeypatch.setattr(kept, "_OWN", sys.maxsize)
    monkeypatch.setattr(kept, "is_ample", lambda: True)


def spare_of_a_fork(before: Callable[[], object] = lambda: None) -> int:
    """What `spare` answers a process that has no children of other tests, and copies little of this large one.

    Args:
        before: What it does before it asks.
    """
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_tell, args=(theirs, before))
    gc.collect()
    gc.disable()  # the fork's own collection would write to each page that has an object of other tests
    try:
        process.start()
    finally:
        gc.enable()
    process.join()
    return int(ours.recv())


def _tell(line: Connection, before: Callable[[], object]) -> None:
    at_fork = anonymous()
    held = before()
    line.send(spare(_CPU, at_fork))
    del held


def _leave_child() -> object:
    return subprocess.Popen([sys.executable, "-c", ""])


def test_a_process_without_children_is_kept() -> None:
    assert spare_of_a_fork() == MOST


def test_one_with_a_child_ends() -> None:
    assert spare_of_a_fork(_leave_child) == 0


def test_one_that_holds_much_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_OWN", 40 * 2**20)
    assert spare_of_a_fork() == MOST
    assert spare_of_a_fork(lambda: bytearray(48 * 2**20)) == 0


def test_one_that_has_copied_much_of_its_parents_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = bytearray(48 * 2**20)

    def write() -> None:
        for page in range(0, len(parents), resource.getpagesize()):
            parents[page] = 1

    monkeypatch.setattr(kept, "_OWN", 40 * 2**20)
    assert spare_of_a_fork(write) == 0


def test_one_that_has_filled_and_freed_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_OWN", 40 * 2**20)
    assert spare_of_a_fork(lambda: len(bytearray(48 * 2**20))) == MOST


@pytest.mark.parametrize(("free", "expected"), [(0.25, MOST), (0.24, 0)])
def test_one_on_a_full_machine_ends(monkeypatch: pytest.MonkeyPatch, free: float, expected: int) -> None:
    monkeypatch.setattr(memory, "free_share", lambda: free)
    monkeypatch.setattr(kept, "is_ample", memory.is_ample)
    assert spare_of_a_fork() == expected


def test_one_on_a_device_of_unknown_memory_ends() -> None:
    assert spare(torch.device("meta"), 0) == 0
