"""Reads trials' values at the rungs of a successive-halving pruner, not the whole trials; ended ones only once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.storage.id_lists import in_chunks, in_list
from hpo.storage.optuna_private import REPORTS, TRIAL_SYSTEM_ATTRS, TRIALS
from hpo.storage.outage import patient
from hpo.storage.reader import ReadingStorage
from hpo.storage.trial_rows import TrialRow, rows_since

#: Begins the attributes in which Optuna's successive halving stores a trial's value at each rung that it has
#: reached.
RUNG_ATTR: Final = "completed_rung_"

_STUDY: Final = TRIALS.c.study_id == sa.bindparam("study", type_=sa.Integer)
_AT_RUNGS: Final = (
    sa.select(TRIALS.c.number, TRIAL_SYSTEM_ATTRS.c.key, TRIAL_SYSTEM_ATTRS.c.value_json)
    .join(TRIALS, TRIALS.c.trial_id == TRIAL_SYSTEM_ATTRS.c.trial_id)
    .where(TRIAL_SYSTEM_ATTRS.c.key.startswith(RUNG_ATTR))
)
_OF_ALL: Final = _AT_RUNGS.where(_STUDY)
_OF_SOME: Final = _AT_RUNGS.where(in_list(TRIALS.c.trial_id, "trials"))
# One index lookup for each trial.
_LAST: Final = sa.select(sa.func.max(REPORTS.c.step)).where(REPORTS.c.trial_id == TRIALS.c.trial_id)
_LONGEST: Final = sa.select(sa.func.max(_LAST.scalar_subquery())).where(
    _STUDY, TRIALS.c.state == TrialState.COMPLETE
)


@dataclass(frozen=True, slots=True)
class AtRungs:
    """What a successive-halving pruner needs to know about a trial.

    Attributes:
        number: Its number.
        system_attrs: By the rung's attribute, its value there.
        state: RUNNING, unless this object stands for a complete trial.
        last_step: The last step of that complete trial; else None.
    """

    number: int
    system_attrs: dict[str, float] = field(default_factory=dict)
    state: TrialState = TrialState.RUNNING
    last_step: int | None = None


class RungValues:
    """Keeps the trials of a study that have reached a rung; an ended trial is read again if it waits again.

    Args:
        storage: The study's storage.
        study_id: The study.
    """

    def __init__(self, storage: ReadingStorage, study_id: int) -> None:
        self._reader, self._study = storage, study_id
        self._last_id, self._change = -1, 0
        self._open: set[int] = set()
        self._kept: dict[int, AtRungs] = {}

    def look(self) -> Iterable[AtRungs]:
        """The values that are stored now."""
        self._change, rows, read = _look(self._reader, self._study, self._change, self._last_id, self._open)
        for row in rows:
            self._kept.pop(row.number, None)
        for number, key, text in read:
            self._kept.setdefault(number, AtRungs(number)).system_attrs[key] = json.loads(text)
        self._last_id = max([self._last_id, *(row.trial_id for row in rows)])
        self._open = {row.trial_id for row in rows if not row.state.is_finished()}
        return self._kept.values()


@patient
def _look(
    storage: ReadingStorage, study_id: int, change: int, after: int, among: set[int]
) -> tuple[int, list[TrialRow], list[Any]]:
    """The latest change; rows of trials changed since, with an id above ``after`` or in ``among``; their rungs."""
    with storage.single_statements() as conn:
        # Rows first: what belongs to a trial that was finished by then no longer changes, unless that is noted.
        change, _, rows = rows_since(conn, study_id, change, after=after, among=among)
        if after < 0:
            return change, rows, list(conn.execute(_OF_ALL, {"study": study_id}).all())
        ids = [row.trial_id for row in rows]
        read = [found for chunk in in_chunks(ids) for found in conn.execute(_OF_SOME, {"trials": chunk})]
    return change, rows, read


@patient
def longest_complete(storage: ReadingStorage, study_id: int) -> int | None:
    """The last step of a study's longest complete trial; None if there is none."""
    with storage.single_statements() as conn:
        found = conn.execute(_LONGEST, {"study": study_id}).scalar()
    return None if found is None else int(found)
