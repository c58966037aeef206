"""Stages: values of a schedule, by the number of passes or steps from which they apply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Stages(dict[int, int]):
    """Whole numbers by the number of finished passes or steps from which they apply.

    Args:
        name: Their name in error texts.
        stages: Count of passes or steps → number, at least 1; the count 0 must be among the keys. A text such as
            ``"10"`` is allowed for a number, since the keys of a study file are text.

    Raises:
        ValueError: 0 is missing, or a value is not a whole number or out of range.
    """

    def __init__(self, name: str, stages: Mapping[int, int] | Mapping[str, int]) -> None:
        found = {_whole(start, name, stages): _whole(value, name, stages) for start, value in stages.items()}
        if 0 not in found:
            raise ValueError(f"{name} is {dict(stages)}: give the one to begin with under 0")
        for start, value in found.items():
            if start < 0 or value < 1:
                raise ValueError(f"{name} has {start}: {value}: give counts from 0 on, and numbers of at least 1")
        super().__init__(sorted(found.items()))

    def at(self, count: int) -> int:
        """The number that applies after ``count`` passes or steps."""
        return [value for start, value in self.items() if start <= count][-1]


def _whole(value: Any, name: str, stages: Mapping[Any, int]) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise ValueError(f"{name} is {dict(stages)}: {value!r} is not a whole number") from None
