"""Numbers, counts and lengths of time as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def shown(value: float) -> str:
    """A number with six digits."""
    return f"{value:.6g}"


def percent(share: float) -> str:
    """A share of 1 in percent."""
    return f"{share * 100:.0f} %"


def duration(seconds: float) -> str:
    """A length of time as people say it."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{seconds / 60:.3g} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def count_of(number: int, noun: str) -> str:
    """A number and its noun, in the plural where it is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def numbers(found: Sequence[int], most: int = 12) -> str:
    """Trial numbers, cut off where they are many."""
    listed = ", ".join(map(str, found[:most]))
    return listed if len(found) <= most else f"{listed} and {len(found) - most} more"
