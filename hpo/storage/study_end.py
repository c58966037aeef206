"""What the end of a study does to its paused trials: they are pruned at their last epoch.

They keep the mark of a paused trial (`hpo.storage.pausing`), which counts only where a trial is RUNNING: with a
larger budget they are paused again.
"""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.storage.budget import lock_study
from hpo.storage.changes import lock_study_of, note_change
from hpo.storage.optuna_private import TRIALS, VALUES
from hpo.storage.outage import patient
from hpo.storage.paused_end import prune_paused_trial
from hpo.storage.pausing import IS_PAUSED
from hpo.storage.recovery import Settled
from hpo.storage.study_storage import StudyStorage
from hpo.wording import paused_at_end


def prune_paused(storage: StudyStorage, study_id: int) -> Iterator[Settled]:
    """Store every paused trial of a study as pruned, each in a transaction of its own.

    As `optuna.Study.tell` has it, a pruned trial's value is the last that it has reported; with several
    objectives, or where that value is no number, it has none.

    Args:
        storage: Where the study is; it owns no trial.
        study_id: Optuna's id of the study.

    Yields:
        What was done, by number, when it has been stored. A trial that a worker has resumed meanwhile is left out.
    """
    single = len(storage.get_study_directions(study_id)) == 1
    for trial_id, number in _paused(storage, study_id):
        pruned = _prune(storage, trial_id, number, single=single)
        if pruned is not None:
            yield pruned


@patient
def _paused(storage: StudyStorage, study_id: int) -> list[tuple[int, int]]:
    query = sa.select(TRIALS.c.trial_id, TRIALS.c.number).where(
        TRIALS.c.study_id == study_id, TRIALS.c.state == TrialState.RUNNING, IS_PAUSED
    )
    with storage.engine.connect() as conn:
        return [(row[0], row[1]) for row in conn.execute(query.order_by(TRIALS.c.number))]


@patient
def _prune(storage: StudyStorage, trial_id: int, number: int, *, single: bool) -> Settled | None:
    with storage.transaction() as session:
        study_id = lock_study_of(session, trial_id)
        step = prune_paused_trial(session, trial_id, single=single)
        if step is not None:
            note_change(session, study_id, trial_id)
    if step is None:
        return None
    return Settled(number, 0, TrialState.PRUNED, "pruned", paused_at_end(step))


@patient
def pause_pruned(storage: StudyStorage, study_id: int) -> None:
    """Let the trials that the study's end has pruned be paused again, all of them in one transaction."""
    ended = sa.select(TRIALS.c.trial_id).where(
        TRIALS.c.study_id == study_id, TRIALS.c.state == TrialState.PRUNED, IS_PAUSED
    )
    with storage.transaction() as session:
        lock_study(session, study_id)
        ids = list(session.execute(ended.with_for_update()).scalars())
        for trial_id in ids:
            note_change(session, study_id, trial_id)
        session.execute(sa.delete(VALUES).where(VALUES.c.trial_id.in_(ids)))
        again = {"state": TrialState.RUNNING, "datetime_complete": None}
        session.execute(sa.update(TRIALS).where(TRIALS.c.trial_id.in_(ids)).values(again))
