"""The columns of a study that its scheduler decides by, kept by a worker and brought up to date at each look."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from optuna.trial import TrialState

from hpo.search.schedulers.columns import ENDED, NONE, PAUSED, RUNNING, WAITING, Columns, Flags, Floats, Integers
from hpo.storage.attributes import (
    CONSTRAINT_ATTR,
    FORK_ATTR,
    IMPORTED_ATTR,
    ORIGIN_ATTR,
    OUTCOME_ATTR,
)
from hpo.storage.progress import Cursor, Progress, last_values_up_to, read_progress, values_at
from hpo.storage.reader import ReadingStorage
from hpo.study.outcome import Outcome, ended_as

_KINDS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("trial_id", "number", "state", "last", "until", "grants", "inherited"), np.int64),
    "best": np.float64,
    **dict.fromkeys(("finite", "whole", "imported", "foreign", "feasible"), np.bool_),
}


class StudyProgress:
    """Every trial of a study as columns; what was finished or paused at the last look is not read again.

    Args:
        storage: Where the study is.
        study_id: Optuna's id of it.
        minimize: Whether its metric is to fall.
    """

    def __init__(self, storage: ReadingStorage, study_id: int, *, minimize: bool) -> None:
        self._reader, self._study, self._minimize = storage, study_id, minimize
        self.forget()

    def forget(self) -> None:
        """Let the next look read all anew."""
        self._cursor = Cursor()
        self._columns: dict[str, NDArray[Any]] = {name: np.empty(0, kind) for name, kind in _KINDS.items()}
        self._at: dict[int, Floats] = {}

    def look(self) -> Columns:
        """The study now."""
        storage, study_id = self._reader, self._study
        rows = read_progress(storage, study_id, self._cursor, _row, minimize=self._minimize)
        if rows:
            self._take_in(rows)
        named = {name: column for name, column in self._columns.items() if name != "trial_id"}
        return Columns(**named, read_at=self._values_at)

    def _take_in(self, rows: Sequence[tuple[Any, ...]]) -> None:
        read = {
            name: np.array(values, kind)
            for (name, kind), values in zip(_KINDS.items(), zip(*rows, strict=True), strict=True)
        }
        known = self._columns["trial_id"]
        new = read["trial_id"] > known.max(initial=-1)  # ids and numbers rise together
        ids = np.concatenate([known, read["trial_id"][new]])
        places = np.searchsorted(ids, read["trial_id"])
        self._columns = {name: _changed(column, read[name], places, new) for name, column in self._columns.items()}
        if len(ids) > len(known):
            more = np.full(len(ids) - len(known), math.nan)
            self._at = {epoch: np.concatenate([values, more]) for epoch, values in self._at.items()}
        if self._at:
            self._read_values(list(self._at), places, every=False)

    def _values_at(self, epoch: int) -> Floats:
        if epoch not in self._at:
            count = len(self._columns["trial_id"])
            self._at[epoch] = np.full(count, math.nan)
            self._read_values([epoch], np.arange(count), every=True)
        return self._at[epoch]

    def _read_values(self, epochs: Sequence[int], places: Integers, *, every: bool) -> None:
        """Fill in the values at these epochs, of the trials at some places."""
        ids = self._columns["trial_id"]
        rows = values_at(self._reader, self._study, epochs, ids[places].tolist(), every=every)
        trials, steps = np.array([row[:2] for row in rows], dtype=np.int64).reshape(-1, 2).T
        values = np.array([row[2] for row in rows], dtype=np.float64)
        found = np.searchsorted(ids, trials)
        done = self._epochs(places)
        for epoch in epochs:
            here = steps == epoch
            self._at[epoch][places] = math.nan
            self._at[epoch][found[here]] = values[here]
            # A trial may have come so far, and reported nothing there: what it reported before counts.
            self._fill_gaps(epoch, np.setdiff1d(places[done >= epoch], found[here]))

    def _fill_gaps(self, epoch: int, places: Integers) -> None:
        if not len(places):
            return
        ids = self._columns["trial_id"][places].tolist()
        values = last_values_up_to(self._reader, epoch, ids)
        self._at[epoch][places] = [values.get(trial_id, math.nan) for trial_id in ids]

    def _epochs(self, places: Integers) -> Integers:
        state, until, last = (self._columns[name][places] for name in ("state", "until", "last"))
        epochs: Integers = np.maximum(last, np.where(state == PAUSED, until, NONE))
        return epochs


def _changed(column: NDArray[Any], read: NDArray[Any], places: Integers, new: Flags) -> NDArray[Any]:
    """A column with what was read; another array where it differs, for a decision may still look at this one."""
    if new.any():
        changed = np.concatenate([column, read[new]])
    elif np.array_equal(column[places], read, equal_nan=column.dtype == np.float64):
        return column
    else:
        changed = column.copy()
    changed[places] = read
    return changed


def _row(trial: Progress) -> tuple[Any, ...]:
    """In the order of `_KINDS`."""
    attrs = trial.attrs
    return (
        trial.trial_id,
        trial.number,
        _state(trial),
        NONE if trial.last is None else trial.last,
        NONE if trial.until is None else trial.until,
        trial.grants,
        attrs[FORK_ATTR]["epoch"] if FORK_ATTR in attrs else 0,
        math.nan if trial.best is None else trial.best,
        trial.last is not None and trial.last != trial.last_not_finite,
        _is_whole(trial),
        IMPORTED_ATTR in attrs,
        ORIGIN_ATTR in attrs and attrs[ORIGIN_ATTR][0] is not None,
        not attrs or all(value <= 0 for key, value in attrs.items() if key.startswith(CONSTRAINT_ATTR)),
    )


def _state(trial: Progress) -> int:
    if trial.state == TrialState.RUNNING:  # most of those that a scheduler leaves
        return PAUSED if trial.is_paused else RUNNING
    return WAITING if trial.state == TrialState.WAITING else ENDED


def _is_whole(trial: Progress) -> bool:
    stored = trial.attrs.get(OUTCOME_ATTR)
    return ended_as(trial.state, stored, trial.value) == Outcome.COMPLETE
