"""Small matrices on one thread."""

import functools
from contextlib import AbstractContextManager

from threadpoolctl import ThreadpoolController


def one_thread() -> AbstractContextManager[object]:
    """A context in which linear algebra has one thread: for small matrices more cost more than they bring."""
    context: AbstractContextManager[object] = _libraries().limit(limits=1, user_api="blas")
    return context


@functools.cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()
