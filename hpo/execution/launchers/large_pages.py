"""Large memory pages for the process that workers and trials are forked from, on systems where a program can ask
for them (Linux with glibc).

A fork copies a table entry for each page of the heap, and its end frees each of them. There are far fewer pages of
2 MiB, and one that a fork writes to is split. A program asks when it starts, and its forks inherit its pages.
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
    """Make programs started in the block ask for large pages, unless a person has set this option already."""
    given = os.environ.get(_NAME)
    if given is None or "glibc.malloc.hugetlb" not in given:
        os.environ[_NAME] = _ASKED if not given else f"{given}{_SEPARATOR}{_ASKED}"
    try:
        yield
    finally:
        _set(given)


def forget() -> None:
    """Undo what `large_pages` has put into this program's environment: the study's programs must not get it."""
    given = os.environ.get(_NAME, "")
    _set(given.removesuffix(_ASKED).removesuffix(_SEPARATOR) or None)


def _set(value: str | None) -> None:
    if value is None:
        os.environ.pop(_NAME, None)
    else:
        os.environ[_NAME] = value
