"""A trial as a scheduler sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Seen:
    """A trial as a scheduler sees it.

    Attributes:
        number: Its number.
        params: Dotted path → value; a parameter whose condition does not hold is left out.
        values: Finished epochs → the metric as it was reported after them; it may be NaN or infinite, and epochs
            may be left out.
        state: ``"waiting"`` for a worker, ``"running"``, ``"paused"`` or ``"ended"``.
        until: The epoch to which it has been granted; None: its end, or nothing was granted.
        kinds: `Why.kind` of each grant, the first one first; empty for a trial that was never granted anything.
        whole: It has trained to its end.
        imported: It was trained outside of the study: it counts against no budget.
        source: The study that it was imported from, perhaps of other data; None: none, or it is not known.
        feasible: It keeps to the study's bounds, as far as it was measured; else it can't be the best.
        inherited: Epochs at its beginning that another trial, its parent, has trained; it has no values there.
        replaces: The trial in whose place it was forked.
        switch: Epochs of its own that could be trained in the time that each of its starts and resumptions took;
            None where that was not measured.
    """

    number: int
    params: Mapping[str, Any]
    values: Mapping[int, float]
    state: Literal["waiting", "running", "paused", "ended"]
    until: int | None = None
    kinds: Sequence[str] = ()
    whole: bool = False
    imported: bool = False
    source: str | None = None
    feasible: bool = True
    inherited: int = 0
    replaces: int | None = None
    switch: float | None = None

    @property
    def epochs(self) -> int:
        """Epochs that it has finished, as far as they were reported, those of its parent included.

        One that has paused has had all of its grant, also where it reported nothing after the last epoch of it.
        """
        reported = max(self.values, default=self.inherited)
        return max(reported, self.until or 0) if self.state == "paused" else reported

    def best(self, pick: Callable[[Iterable[float]], float]) -> float | None:
        """The best finite value by ``pick``, min or max; None where there is none."""
        values: Collection[float] = self.values.values()
        if not math.isfinite(sum(values)):  # a sum is finite only where all of them are
            values = [value for value in values if math.isfinite(value)]
        return pick(values) if values else None
