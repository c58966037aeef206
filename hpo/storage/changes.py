"""Notes which paused or ended trials have changed, in a table of its own, so that a look reads only those again.

A look at a study asks for trials that are new, and again for those that had not finished at the last look. Most
trials of a study may be paused, tens of thousands, and only few events change one: it is resumed, it ends, or it
was pruned at the study's end and a larger budget pauses it again. Also, a failed trial may be made to wait again.
Each of these events adds a row here, in the event's own transaction, which holds the study's lock
(`hpo.storage.budget.lock_study`). So the rows of a study become visible in the order of their ids, and a look that
has seen one has seen all earlier ones.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import orm

from hpo.storage import ledger
from hpo.storage.budget import lock_study
from hpo.storage.optuna_private import TRIALS, models

CHANGES = sa.Table(
    "hpo_changes",
    ledger.metadata,
    sa.Column("change_id", sa.Integer, primary_key=True),
    # No foreign keys: Optuna's own tools delete studies, and know nothing of this table.
    sa.Column("study_id", sa.Integer, nullable=False),
    sa.Column("trial_id", sa.Integer, nullable=False),
    sa.Index("hpo_changes_of_study", "study_id", "change_id"),
    sqlite_autoincrement=True,  # no id is used twice
)

# Statements are built once: building one costs more than to execute it.
_STUDY = CHANGES.c.study_id == sa.bindparam("study", type_=sa.Integer)
_LATEST = sa.select(sa.func.max(CHANGES.c.change_id)).where(_STUDY)
#: Condition on a row of this table: it is the study's, and later than a given change.
SINCE = sa.and_(_STUDY, CHANGES.c.change_id > sa.bindparam("change", type_=sa.Integer))
_SINCE = sa.select(CHANGES.c.change_id, CHANGES.c.trial_id).where(SINCE)
_STUDY_OF = sa.select(TRIALS.c.study_id).where(TRIALS.c.trial_id == sa.bindparam("trial", type_=sa.Integer))
_NOTE = sa.insert(CHANGES)


def lock_study_of(session: orm.Session, trial_id: int) -> int:
    """Lock the study of a trial until the transaction's end, before the trial itself; returns the study.

    Raises:
        KeyError: There is no such trial.
    """
    study_id = session.execute(_STUDY_OF, {"trial": trial_id}).scalar()
    if study_id is None:
        raise KeyError(models.NOT_FOUND_MSG)
    lock_study(session, study_id)
    return int(study_id)


def note_change(session: orm.Session, study_id: int, trial_id: int) -> None:
    """Note that a paused trial is resumed or ends, a pruned one is paused again, or a failed one waits again.

    The transaction holds the study's lock.
    """
    session.execute(_NOTE, {"study_id": study_id, "trial_id": trial_id})


def latest_change(conn: sa.Connection, study_id: int) -> int:
    """The latest change of a study; 0 before the first."""
    return int(conn.execute(_LATEST, {"study": study_id}).scalar() or 0)


def changes_since(conn: sa.Connection, study_id: int, after: int) -> tuple[int, set[int]]:
    """The latest change of a study, and the trials that have changed after an earlier one."""
    rows = conn.execute(_SINCE, {"study": study_id, "change": after}).all()
    return max((row[0] for row in rows), default=after), {row[1] for row in rows}


def forget_changes(session: orm.Session, study_id: int) -> None:
    """Delete the changes of a study that is about to be deleted."""
    session.execute(sa.delete(CHANGES).where(_STUDY), {"study": study_id})
