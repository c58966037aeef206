"""How many threads linear algebra has: one for small matrices, and a trial's own number while it trains."""

import functools
import os
from contextlib import AbstractContextManager
from typing import Final

from threadpoolctl import ThreadpoolController, threadpool_limits

#: OpenBLAS, which NumPy and SciPy come with, reads this when it is loaded. Workers are forked with 1: a library
#: that was loaded with more starts its threads again after each fork and each `one_thread`, and each thread first
#: spins for some 30 ms, on a core that trains.
THREADS_VARIABLE: Final = "OPENBLAS_NUM_THREADS"


def one_thread() -> AbstractContextManager[object]:
    """A context in which linear algebra has one thread: for small matrices more cost more than they bring."""
    context: AbstractContextManager[object] = _libraries().limit(limits=1, user_api="blas")
    return context


def allow_threads(count: int) -> None:
    """Let linear algebra have more threads from here on; libraries that are loaded later have them too."""
    if count > 1:
        os.environ[THREADS_VARIABLE] = str(count)
        threadpool_limits(count, user_api="blas")


@functools.cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()
