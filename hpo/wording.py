"""Numbers, sizes, counts and lengths of time as people read them; the one place where they become text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


def shown(value: Any, digits: int = 6) -> str:
    """A value: a number that is not whole with so many digits, a dash for None."""
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def percent(share: float) -> str:
    """A share of 1 in percent."""
    return f"{share * 100:.0f} %"


def duration(seconds: float) -> str:
    """A length of time as people say it: ``12 ms``, ``3.5 s``, ``12.5 min``, ``2 h 5 min``."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{seconds / 60:.3g} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def file_size(count: int) -> str:
    """Bytes on a disk: ``1.5 GB``, in powers of 1000."""
    power = min(max(len(str(count)) - 1, 0) // 3, len(_UNITS) - 1)
    return f"{count / 1000**power:.4g} {_UNITS[power]}"


def gib(count: float) -> str:
    """Bytes of memory, or of free room, in powers of 1024: ``0.25 GiB``, ``15.6 GiB``, ``1024 GiB``."""
    size = count / 2**30
    return f"{size:.3g} GiB" if size < 100 else f"{size:.0f} GiB"


def count_of(number: int, noun: str) -> str:
    """A number and its noun, in the plural where it is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(found: Sequence[Any], most: int = 12) -> str:
    """A list in a sentence, cut off where it is long."""
    named = ", ".join(map(str, found[:most]))
    return named if len(found) <= most else f"{named} and {len(found) - most} more"
