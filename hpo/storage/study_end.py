"""Prunes a study's paused trials, at their last epoch, when the study ends, and pauses them again if it continues.

They keep the mark of a paused trial (`hpo.storage.pausing`), which counts only in a RUNNING trial: with a larger
budget they are paused again. Both happen under the study's lock. A process that ends a study has checked before
that nothing is left to do, and prunes nothing if the budgets have changed since.
"""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa
from optuna.trial import TrialState
from sqlalchemy import orm

from hpo.storage.budget import Budgets, budgets_of, lock_study, store_budgets
from hpo.storage.changes import CHANGES, lock_study_of, note_change
from hpo.storage.optuna_private import TRIALS, VALUES
from hpo.storage.outage import patient
from hpo.storage.paused_end import prune_paused_trial
from hpo.storage.pausing import IS_PAUSED
from hpo.storage.settling import Settled
from hpo.storage.study_storage import StudyStorage
from hpo.wording import paused_at_end


def prune_paused(storage: StudyStorage, study_id: int, budgets: Budgets | None = None) -> Iterator[Settled]:
    """Store every paused trial of a study as pruned, each in a transaction of its own.

    As with `optuna.Study.tell`, a pruned trial's value is the last that it has reported; with several objectives,
    or if that value is NaN, it has none.

    Args:
        storage: The study's storage, without an owner.
        study_id: Optuna's id of the study.
        budgets: The budgets with which nothing is left to do; None: the current ones. If the study gets others in
            the meantime, the remaining trials stay paused.

    Yields:
        Each pruned trial, by number, after it has been stored. Trials that a worker has resumed are left out.
    """
    single = len(storage.get_study_directions(study_id)) == 1
    known = read_budgets(storage, study_id) if budgets is None else budgets
    for trial_id, number in _paused(storage, study_id):
        try:
            pruned = _prune(storage, trial_id, number, known, single=single)
        except _OtherBudgetsError:
            return
        if pruned is not None:
            yield pruned


@patient
def read_budgets(storage: StudyStorage, study_id: int) -> Budgets:
    """The study's budgets now."""
    with storage.single_statements() as conn:
        return budgets_of(conn, study_id)


class _OtherBudgetsError(Exception):
    """The study has been given other budgets."""


@patient
def _paused(storage: StudyStorage, study_id: int) -> list[tuple[int, int]]:
    query = sa.select(TRIALS.c.trial_id, TRIALS.c.number).where(*_paused_in(study_id, TrialState.RUNNING))
    with storage.engine.connect() as conn:
        return [(row[0], row[1]) for row in conn.execute(query.order_by(TRIALS.c.number))]


@patient
def _prune(storage: StudyStorage, trial_id: int, number: int, budgets: Budgets, *, single: bool) -> Settled | None:
    with storage.transaction() as session:
        study_id = lock_study_of(session, trial_id)
        if budgets_of(session, study_id) != budgets:
            raise _OtherBudgetsError
        step = prune_paused_trial(session, trial_id, single=single)
        if step is not None:
            note_change(session, study_id, trial_id)
    if step is None:
        return None
    return Settled(number, 0, TrialState.PRUNED, "pruned", paused_at_end(step))


@patient
def set_budgets(storage: StudyStorage, study_id: int, budgets: Budgets) -> None:
    """Set a study's budgets. If one is larger than before, pause the trials again that the study's end has pruned.

    Args:
        storage: The study's storage.
        study_id: Optuna's id of the study.
        budgets: Both budgets.
    """
    with storage.transaction() as session:
        lock_study(session, study_id)
        before = budgets_of(session, study_id)
        if any(_is_more(before.get(key, now), now) for key, now in budgets.items()):
            _pause_pruned(session, study_id)
        store_budgets(session, study_id, budgets)


def _is_more(before: int | None, now: int | None) -> bool:
    return before is not None and (now is None or now > before)


def _pause_pruned(session: orm.Session, study_id: int) -> None:
    """Pause the trials again that the study's end has pruned."""
    ended = sa.select(TRIALS.c.trial_id).where(*_paused_in(study_id, TrialState.PRUNED))
    noted = sa.select(sa.literal(study_id), TRIALS.c.trial_id).where(*_paused_in(study_id, TrialState.PRUNED))
    session.execute(sa.insert(CHANGES).from_select(["study_id", "trial_id"], noted))
    session.execute(sa.delete(VALUES).where(VALUES.c.trial_id.in_(ended)))
    again = {"state": TrialState.RUNNING, "datetime_complete": None}
    session.execute(sa.update(TRIALS).where(*_paused_in(study_id, TrialState.PRUNED)).values(again))


def _paused_in(study_id: int, state: TrialState) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions on a study's trials: they are in this state, and are paused or were so at the study's end."""
    return TRIALS.c.study_id == study_id, TRIALS.c.state == state, IS_PAUSED
