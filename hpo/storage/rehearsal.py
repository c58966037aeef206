"""Runs through a trial's life in a transaction that is rolled back, so that SQLAlchemy compiles the statements.

Processes that are forked afterwards have the compiled statements; compiling takes longer than a small database
needs to answer.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, cast

from optuna.trial import TrialState

from hpo.errors import BudgetExhaustedError
from hpo.storage import ledger
from hpo.storage.attributes import GRANTED_ATTR, PAUSED_ATTR
from hpo.storage.budget import lock_study, refuse_beyond_budget
from hpo.storage.changes import lock_study_of, note_change
from hpo.storage.grants import Grant, OldGrantError, is_granted, store_grant
from hpo.storage.guarded import set_attr, set_state
from hpo.storage.ledger import Owner
from hpo.storage.new_trials import insert_running
from hpo.storage.optuna_private import TRIAL_USER_ATTRS
from hpo.storage.outage import patient
from hpo.storage.pausing import PAUSED, forget_pause, lock_paused

if TYPE_CHECKING:
    from sqlalchemy import orm

    from hpo.storage.granting import GrantingStorage


class _RehearsedError(Exception):
    """Raised to roll the transaction back."""


@patient
def rehearse_a_life(storage: GrantingStorage, study_id: int, owner: Owner) -> None:
    """Create a trial, pause, resume and complete it, and roll everything back; no other process sees it."""
    granted = storage.get_study_user_attrs(study_id).get(GRANTED_ATTR)
    # If another worker stores a grant of this number in between, the remaining statements are compiled later.
    with contextlib.suppress(_RehearsedError, OldGrantError), storage.transaction() as session:
        lock_study(session, study_id)
        # Also if the budget is exhausted: the trial is rolled back.
        with contextlib.suppress(BudgetExhaustedError):
            refuse_beyond_budget(session, study_id)
        trial_id = cast("int", insert_running(session, study_id, 0).trial_id)
        _live(session, trial_id, owner, None if granted is None else _grant(study_id, granted))
        raise _RehearsedError


def _grant(study_id: int, number: int) -> Grant:
    return Grant(study_id, {"number": number, "until": 1, "why": {}}, {}, None)


def _live(session: orm.Session, trial_id: int, owner: Owner, grant: Grant | None) -> None:
    ledger.forget_trial(session, trial_id)
    attempt = ledger.claim(session, trial_id, owner)
    if grant is not None:
        is_granted(session, trial_id)
        store_grant(session, trial_id, grant)
    ledger.end(session, trial_id, attempt, PAUSED)
    set_attr(session, TRIAL_USER_ATTRS, trial_id, PAUSED_ATTR, 1)
    set_state(session, trial_id, TrialState.RUNNING, ())
    note_change(session, lock_study_of(session, trial_id), trial_id)
    lock_paused(session, trial_id)
    forget_pause(session, trial_id, decision=True)
    attempt = ledger.claim(session, trial_id, owner)
    ledger.holds(session, trial_id, attempt)
    ledger.end(session, trial_id, attempt, TrialState.COMPLETE.name.lower())
    set_state(session, trial_id, TrialState.COMPLETE, [0.0])
