"""Which workers can be forked for their trials."""

import ctypes
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hpo.execution.warm import is_forkable
from tests.support.owners import forked


def _tell(line: Connection, names: list[str], answer: int) -> None:
    ctypes.CDLL = lambda name: Driver(answer)
    for name in names:
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        Path(f"/proc/self/task/{thread.native_id}/comm").write_text(name)
    line.send(is_forkable())


class Driver:
    """CUDA's, which starts in a fork, or answers that it has started in the process before."""

    def __init__(self, answer: int) -> None:
        self.answer = answer

    def cuInit(self, flags: int) -> int:  # noqa: N802 - its name in C
        return self.answer


@pytest.mark.parametrize(
    ("threads", "answer", "expected"),
    [
        ([], 3, True),  # the driver is not asked
        (["python3"], 0, False),
        (["cuda00001800007"], 0, True),  # seen where NVIDIA's library has counted the devices
        (["cuda00001800007"], 3, False),
        (["cuda00004c00014", "cuda-EvtHandlr"], 0, False),  # seen where CUDA has started
        (["cuda00001800007", "cuda00001800008"], 0, False),
        (["cuda00001800007", "python3"], 0, False),
    ],
)
def test_threads_that_do_not_matter_to_a_fork(threads: list[str], answer: int, *, expected: bool) -> None:
    ours, theirs = forked.Pipe()
    process = forked.Process(target=_tell, args=(theirs, threads, answer))  # with no trace of other tests
    process.start()
    assert ours.recv() is expected
    process.join()
