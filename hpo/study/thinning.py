"""A part of what is too much to be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


def evenly(items: Sequence[_T], most: int) -> list[_T]:
    """At most so many of the items, evenly spread; the last one is always among them."""
    count = max(0, min(most, len(items)))
    return [items[(index + 1) * len(items) // count - 1] for index in range(count)]
