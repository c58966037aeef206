"""Thins out long sequences that are to be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


def evenly(items: Sequence[_T], most: int) -> list[_T]:
    """At most ``most`` of the items, evenly spread, the last one included."""
    count = max(0, min(most, len(items)))
    return [items[(index + 1) * len(items) // count - 1] for index in range(count)]
