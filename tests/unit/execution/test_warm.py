"""Which workers can be forked for their trials."""

import multiprocessing
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hpo.execution.warm import is_forkable

_FORK = multiprocessing.get_context("fork")


def _tell(line: Connection, names: list[str]) -> None:
    for name in names:
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        Path(f"/proc/self/task/{thread.native_id}/comm").write_text(name)
    line.send(is_forkable())


@pytest.mark.parametrize(
    ("threads", "expected"),
    [
        ([], True),
        (["python3"], False),
        (["cuda00001800007"], True),  # seen where NVIDIA's library has counted the devices
        (["cuda00004c00014", "cuda-EvtHandlr"], False),  # seen where CUDA has started
        (["cuda00001800007", "cuda00001800008"], False),
        (["cuda00001800007", "python3"], False),
    ],
)
def test_threads_that_do_not_matter_to_a_fork(threads: list[str], *, expected: bool) -> None:
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_tell, args=(theirs, threads))  # which has no threads of other tests
    process.start()
    assert ours.recv() is expected
    process.join()
