"""Large pages for what workers and trials are forked from, where the system gives them to who asks (Linux, glibc).

A fork copies an entry for each page of the heap, and the end of the fork gives each of them back: of pages of
2 MiB there are far fewer, and those that a fork writes to are split. A program asks as it starts; what it forks
inherits its pages.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

_NAME: Final = "GLIBC_TUNABLES"
_ASKED: Final = "glibc.malloc.hugetlb=1"
_SEPARATOR: Final = ":"


@contextlib.contextmanager
def large_pages() -> Iterator[None]:
    """A program started inside asks for large pages, unless the person has chosen what it is to ask for."""
    given = os.environ.get(_NAME)
    if given is None or "glibc.malloc.hugetlb" not in given:
        os.environ[_NAME] = _ASKED if not given else f"{given}{_SEPARATOR}{_ASKED}"
    try:
        yield
    finally:
        _set(given)


def forget() -> None:
    """Take back what `large_pages` has put into this program's environment: what it starts is the study's."""
    given = os.environ.get(_NAME, "")
    _set(given.removesuffix(_ASKED).removesuffix(_SEPARATOR) or None)


def _set(value: str | None) -> None:
    if value is None:
        os.environ.pop(_NAME, None)
    else:
        os.environ[_NAME] = value
