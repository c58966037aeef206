"""A study's trials as arrays, one column per property: what budgets and rungs need, fast for many trials."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpo.search.axes import Floats
from hpo.search.schedulers.seen import Seen

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

_T = TypeVar("_T", bound=np.generic)

#: The states of `Seen.state`; a column holds the index of one.
STATES: Final = ("waiting", "running", "paused", "ended")
WAITING, RUNNING, PAUSED, ENDED = range(len(STATES))
_STATE_NUMBERS: Final = {state: number for number, state in enumerate(STATES)}
#: Entries of `Seen.row`.
_IN_A_ROW: Final = 18
#: In a column of epochs: no epoch.
NONE: Final = -1


@dataclass(frozen=True, eq=False)
class Columns:
    """All trials by number, imported ones included; each column has one entry per trial. See `Seen`.

    Attributes:
        number: The trial's number.
        state: The index of its state in `STATES`.
        last: The last epoch with a report; `NONE` where there is none.
        finite: Whether the value reported last is finite; False where there is none.
        best: The best finite value; NaN where there is none.
        until: The epoch to which the trial has been granted; `NONE` where that is its end, or without a grant.
        grants: Number of grants that the trial has had.
        whole: Whether it has trained to its end.
        failed: Whether it has ended without a result.
        diverged: Whether it has diverged, at its last report or within the epoch after it.
        imported: Whether it was trained outside of the study.
        foreign: Whether it was imported from another study whose name is known.
        feasible: Whether it keeps to the study's bounds, as far as it was measured.
        measured: Whether it was measured against the bounds.
        mends: Whether it violates bounds and training may bring it within them, if it has not ended.
        taken_over: Whether it has trained nothing, because its result is another trial's.
        inherited: Epochs that its parent has trained.
        read_at: For an epoch, returns each trial's value at its last report up to that epoch: NaN where there is
            no such report, and anything for a trial that has not come so far. To be called before the study is
            read again.
    """

    number: Integers
    state: Integers
    last: Integers
    finite: Flags
    best: Floats
    until: Integers
    grants: Integers
    whole: Flags
    failed: Flags
    diverged: Flags
    imported: Flags
    foreign: Flags
    feasible: Flags
    measured: Flags
    mends: Flags
    taken_over: Flags
    inherited: Integers
    read_at: Callable[[int], Floats]

    def __len__(self) -> int:
        return len(self.number)

    @property
    def epochs(self) -> Integers:
        """As `Seen.epochs`."""
        reported = np.where(self.last >= 0, self.last, self.inherited)
        return np.where(self.state == PAUSED, np.maximum(reported, np.maximum(self.until, 0)), reported)

    def place(self, number: int) -> int | None:
        """The index of the trial with a number; None where there is none."""
        found = np.flatnonzero(self.number == number)
        return int(found[0]) if len(found) else None

    def with_paused(self, number: int, values: Mapping[int, float], *, minimize: bool) -> Columns:
        """The columns as if this trial had paused and had also reported these values (by epoch)."""
        place = self.place(number)
        if place is None:
            return self
        paused = replace(
            self,
            state=_changed(self.state, place, PAUSED),
            read_at=lambda epoch: self._read_with(place, values, epoch),
        )
        if not values:
            return paused
        last, known = max(values), self.best[place]
        finite = [value for value in (*values.values(), known) if math.isfinite(value)]
        return replace(
            paused,
            last=_changed(self.last, place, last),
            finite=_changed(self.finite, place, math.isfinite(values[last])),
            best=_changed(self.best, place, (min if minimize else max)(finite, default=math.nan)),
        )

    def with_resumed(self, number: int, until: int | None) -> Columns:
        """The columns as if a worker had resumed this trial with a grant up to an epoch; None: to its end."""
        place = self.place(number)
        if place is None:
            return self
        return replace(
            self,
            state=_changed(self.state, place, RUNNING),
            until=_changed(self.until, place, NONE if until is None else until),
            grants=_changed(self.grants, place, self.grants[place] + 1),
        )

    def _read_with(self, place: int, values: Mapping[int, float], epoch: int) -> Floats:
        read, last = self.read_at(epoch), int(self.last[place])
        if values and min(values) <= epoch:
            return _changed(read, place, _value_at(values, epoch))
        # In the storage the trial has not come so far, so its entry there means nothing.
        return _changed(read, place, self.read_at(last)[place]) if 0 <= last < epoch else read


def columns_of(trials: Sequence[Seen], *, minimize: bool) -> Columns:
    """The columns of trials."""
    rows: list[Sequence[Any]] = list(zip(*(trial.row for trial in trials), strict=True)) or [()] * _IN_A_ROW
    number, state, last, finite, least, largest, until, grants, *flags, inherited = rows
    whole, failed, diverged, imported, foreign = (np.array(each, np.bool_) for each in flags[:5])
    feasible, measured, mends, taken_over = (np.array(each, np.bool_) for each in flags[5:])

    def at(epoch: int) -> Floats:
        return np.array([_value_at(trial.values, epoch) for trial in trials], np.float64)

    return Columns(
        number=np.array(number, np.int64),
        state=np.array(list(map(_STATE_NUMBERS.__getitem__, state)), np.int64),
        last=epochs_or_none(last),
        finite=np.array(finite, np.bool_),
        best=np.array(least if minimize else largest, np.float64),  # None becomes NaN
        until=epochs_or_none(until),
        grants=np.array(grants, np.int64),
        whole=whole,
        failed=failed,
        diverged=diverged,
        imported=imported,
        foreign=foreign,
        feasible=feasible,
        measured=measured,
        mends=mends,
        taken_over=taken_over,
        inherited=np.array(inherited, np.int64),
        read_at=at,
    )


def _changed(column: NDArray[_T], place: int, value: Any) -> NDArray[_T]:
    changed = column.copy()
    changed[place] = value
    return changed


def epochs_or_none(epochs: Sequence[int | None]) -> Integers:
    """Epochs as a column, with `NONE` where there is none."""
    return np.array([NONE if epoch is None else epoch for epoch in epochs], np.int64)


def _value_at(values: Mapping[int, float], epoch: int) -> float:
    if epoch in values:
        return values[epoch]
    steps = sorted(values)
    index = bisect_right(steps, epoch)
    return values[steps[index - 1]] if index else math.nan
