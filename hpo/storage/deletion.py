"""Deletes studies without loading them first; Optuna's own method loads every value of every trial."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import orm

from hpo.storage import ledger
from hpo.storage.agents import AGENTS, forget_study
from hpo.storage.budget import lock_study
from hpo.storage.changes import CHANGES, forget_changes
from hpo.storage.id_lists import in_chunks
from hpo.storage.ledger import ATTEMPTS
from hpo.storage.optuna_private import STUDIES, TRIALS, referring_to


def delete_study(session: orm.Session, study_id: int) -> None:
    """Delete a study with its trials, their attempts and changes, and its agents; KeyError if there is none.

    Trials are listed by their ids: with a subquery, MariaDB would look at every trial of every study.
    """
    lock_study(session, study_id)
    forget_changes(session, study_id)
    forget_study(session, study_id)
    trial_ids = session.execute(sa.select(TRIALS.c.trial_id).where(TRIALS.c.study_id == study_id)).scalars().all()
    for chunk in in_chunks(trial_ids):
        ledger.forget_trials(session, chunk)
        for table in (*referring_to(TRIALS), TRIALS):
            session.execute(sa.delete(table).where(table.c.trial_id.in_(chunk)))
    for table in (*referring_to(STUDIES), STUDIES):
        session.execute(sa.delete(table).where(table.c.study_id == study_id))


def forget_what_is_gone(session: orm.Session) -> None:
    """Delete our rows of studies that another tool has deleted: a file made by Optuna reuses their ids."""
    for table, of in ((AGENTS, STUDIES.c.study_id), (CHANGES, STUDIES.c.study_id), (ATTEMPTS, TRIALS.c.trial_id)):
        session.execute(sa.delete(table).where(table.c[of.name].not_in(sa.select(of))))
