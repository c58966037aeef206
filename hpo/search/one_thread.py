"""Sets the number of threads for linear algebra: one for small matrices, a trial's own number while it trains."""

import functools
import os
from contextlib import AbstractContextManager
from typing import Final

from threadpoolctl import ThreadpoolController, threadpool_limits

#: OpenBLAS, which comes with NumPy and SciPy, reads this when it is loaded. Workers are forked with 1: a library
#: that was loaded with more threads starts them again after each fork and each `one_thread`, and each thread then
#: spins for about 30 ms on a core that another trial trains on.
THREADS_VARIABLE: Final = "OPENBLAS_NUM_THREADS"


def one_thread() -> AbstractContextManager[object]:
    """A context in which linear algebra uses one thread: for small matrices more threads are slower."""
    context: AbstractContextManager[object] = _libraries().limit(limits=1, user_api="blas")
    return context


def allow_threads(count: int) -> None:
    """Let linear algebra use ``count`` threads from here on, also in libraries that are loaded later."""
    if count > 1:
        os.environ[THREADS_VARIABLE] = str(count)
        threadpool_limits(count, user_api="blas")


@functools.cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()
