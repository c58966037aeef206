"""Keeps a study's trials as columns for its scheduler in a worker, and brings them up to date at each look."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from optuna.trial import TrialState

from hpo.search.axes import Floats
from hpo.search.schedulers.columns import (
    ENDED,
    NONE,
    PAUSED,
    RUNNING,
    WAITING,
    Columns,
    Flags,
    Integers,
    epochs_or_none,
)
from hpo.search.schedulers.mending import Mending, may_mend, violated
from hpo.storage.attributes import (
    CONSTRAINT_ATTR,
    FORK_ATTR,
    IMPORTED_ATTR,
    NEARER_ATTR,
    ORIGIN_ATTR,
    OUTCOME_ATTR,
    SAME_AS_ATTR,
)
from hpo.storage.progress import Cursor, Progress, Report, last_values_up_to, read_progress, reports_at
from hpo.storage.reader import ReadingStorage
from hpo.study.outcome import Outcome, ended_as

_KINDS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("trial_id", "number", "state", "last", "until", "grants", "inherited"), np.int64),
    "best": np.float64,
    **dict.fromkeys(
        ("finite", "whole", "failed", "diverged", "imported", "foreign", "feasible", "measured", "taken_over"),
        np.bool_,
    ),
    "mends": np.bool_,
}
_STATES: Final[Mapping[str, int]] = {"RUNNING": RUNNING, "WAITING": WAITING}


class StudyProgress:
    """All trials of a study as columns; trials that were finished or paused at the last look are not read again.

    Args:
        storage: The study's storage.
        study_id: Optuna's id of the study.
        minimize: Whether its metric is minimised.
    """

    def __init__(self, storage: ReadingStorage, study_id: int, *, minimize: bool) -> None:
        self._reader, self._study, self._minimize = storage, study_id, minimize
        self.forget()

    def forget(self) -> None:
        """Make the next look read everything anew."""
        self._cursor = Cursor()
        self._columns: dict[str, NDArray[Any]] = {name: np.empty(0, kind) for name, kind in _KINDS.items()}
        self._at: dict[int, Floats] = {}
        self._mending, self._violated = Mending(), dict[int, Collection[str]]()

    def look(self) -> Columns:
        """The study's trials now."""
        return self.look_at_study()[1]

    def look_at_study(self) -> tuple[dict[str, Any], Columns]:
        """The study's attributes that budgets and schedulers need, and its trials, now."""
        read = read_progress(self._reader, self._study, self._cursor, self._at, minimize=self._minimize)
        if read.trial_id:
            try:
                self._take_in(_columns_of(read), read.reports)
            except BaseException:  # the cursor already counts as known what was read
                self.forget()
                raise
            self._mend(read)
        named = {name: column for name, column in self._columns.items() if name != "trial_id"}
        return read.study, Columns(**named, read_at=self._values_at)

    def _take_in(self, read: Mapping[str, NDArray[Any]], reports: Sequence[Report]) -> None:
        known = self._columns["trial_id"]
        new = read["trial_id"] > known.max(initial=-1)  # ids and numbers rise together
        ids = np.concatenate([known, read["trial_id"][new]])
        places = np.searchsorted(ids, read["trial_id"])
        self._columns = {name: _changed(column, read[name], places, new) for name, column in self._columns.items()}
        if len(ids) > len(known):
            more = np.full(len(ids) - len(known), math.nan)
            self._at = {epoch: np.concatenate([values, more]) for epoch, values in self._at.items()}
        for epoch in self._at:
            self._at[epoch][places] = math.nan
            self._fill_in(epoch, places, [report for report in reports if report[1] == epoch])

    def _mend(self, read: Progress) -> None:
        """After some trials were read, mark all trials that training may bring within their bounds."""
        for trial_id in read.trial_id:
            self._violated.pop(trial_id, None)
        for trial_id, attrs in read.attrs.items():
            self._mending.learn(trial_id, attrs.get(NEARER_ATTR, {}))
            if bounds := violated(_violations(attrs)):
                self._violated[trial_id] = bounds
        lasting = self._mending.lasting()
        mended = [trial_id for trial_id, bounds in self._violated.items() if may_mend(bounds, lasting)]
        if mended or self._columns["mends"].any():
            named = np.isin(self._columns["trial_id"], mended)
            self._columns["mends"] = named & ~self._columns["imported"]

    def _values_at(self, epoch: int) -> Floats:
        if epoch not in self._at:
            ids = self._columns["trial_id"]
            reports = reports_at(self._reader, self._study, epoch, ids.tolist())
            self._at[epoch] = np.full(len(ids), math.nan)
            try:
                self._fill_in(epoch, np.arange(len(ids)), reports)
            except BaseException:  # else a part of the values would count as all of them
                del self._at[epoch]
                raise
        return self._at[epoch]

    def _fill_in(self, epoch: int, places: Integers, reports: Sequence[Report]) -> None:
        """Fill in the values at an epoch, of the trials at some places."""
        trials, _, values = zip(*reports, strict=True) if reports else ((), (), ())
        found = np.searchsorted(self._columns["trial_id"], np.array(trials, dtype=np.int64))
        self._at[epoch][found] = values
        # A trial may have come so far without a report at this epoch: then its last report before counts.
        reported = np.zeros(len(self._at[epoch]), np.bool_)
        reported[found] = True
        self._fill_gaps(epoch, places[(self._epochs(places) >= epoch) & ~reported[places]])

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
    """A column with the values read; a new array where it changes, since a decision may still use the old one."""
    if new.any():
        changed = np.concatenate([column, read[new]])
    elif np.array_equal(column[places], read, equal_nan=column.dtype == np.float64):
        return column
    else:
        changed = column.copy()
    changed[places] = read
    return changed


def _columns_of(read: Progress) -> dict[str, NDArray[Any]]:
    """The columns of trials just read, in the order of `_KINDS`."""
    ids, last = np.array(read.trial_id, np.int64), epochs_or_none(read.last)
    state = np.array([_STATES.get(name, ENDED) for name in read.state], np.int64)
    state[(state == RUNNING) & np.array(read.is_paused)] = PAUSED
    columns = {
        "trial_id": ids,
        "number": np.array(read.number, np.int64),
        "state": state,
        "last": last,
        "until": epochs_or_none(read.until),
        "grants": np.array(read.grants, np.int64),
        "inherited": np.zeros(len(ids), np.int64),
        "best": np.array(read.best, np.float64),  # None becomes NaN
        "finite": (last != NONE) & (last != epochs_or_none(read.last_not_finite)),
        "whole": np.array([name == TrialState.COMPLETE.name for name in read.state]),
        "failed": np.array([name == TrialState.FAIL.name for name in read.state]),
        "diverged": np.zeros(len(ids), np.bool_),
        "imported": np.zeros(len(ids), np.bool_),
        "foreign": np.zeros(len(ids), np.bool_),
        "feasible": np.ones(len(ids), np.bool_),
        "measured": np.zeros(len(ids), np.bool_),
        "taken_over": np.zeros(len(ids), np.bool_),
        "mends": np.zeros(len(ids), np.bool_),
    }
    for trial_id, attrs in read.attrs.items():
        place = np.searchsorted(ids, trial_id)
        for name, value in _decided_by(attrs, TrialState[read.state[place]], read.values.get(trial_id)).items():
            columns[name][place] = value
    return columns


def _decided_by(attrs: Mapping[str, Any], state: TrialState, value: float | None) -> dict[str, Any]:
    """The entries of a trial's columns that follow from its other attributes."""
    violations, ended = _violations(attrs), ended_as(state, attrs.get(OUTCOME_ATTR), value)
    return {
        "inherited": attrs[FORK_ATTR]["epoch"] if FORK_ATTR in attrs else 0,
        "whole": ended == Outcome.COMPLETE,
        "diverged": ended == Outcome.DIVERGED,
        "imported": IMPORTED_ATTR in attrs,
        "foreign": ORIGIN_ATTR in attrs and attrs[ORIGIN_ATTR][0] is not None,
        "taken_over": SAME_AS_ATTR in attrs,
        "feasible": not violated(violations),
        "measured": bool(violations),
    }


def _violations(attrs: Mapping[str, Any]) -> dict[str, float]:
    """How far a trial violates each bound, as Optuna stores it."""
    return {
        key.removeprefix(CONSTRAINT_ATTR): far for key, far in attrs.items() if key.startswith(CONSTRAINT_ATTR)
    }
