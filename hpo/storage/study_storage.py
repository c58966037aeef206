"""The shared storage: Optuna's relational storage with a budget, leases and fencing.

`StudyStorage` writes Optuna's own tables, so every Optuna tool can read them, and adds what parallel workers that
may die need:

* a trial's row is its claim on the budget: one trial too many is refused in the transaction that would number it;
* a trial becomes RUNNING together with its owner's lease (`hpo.storage.ledger`), in one transaction;
* an owner's write checks the lease in its own transaction, so a requeued trial's old owner can change nothing.

Every operation waits for a database that is away (`hpo.storage.outage`). If the connection breaks during a commit,
the next try finds out from the ledger what the previous one has done.
"""

import contextlib
import copy
import json
import threading
from collections.abc import Sequence
from typing import Any, Final, cast

import sqlalchemy as sa
from optuna.distributions import (
    BaseDistribution,
    FloatDistribution,
    check_distribution_compatibility,
    distribution_to_json,
)
from optuna.exceptions import DuplicatedStudyError
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import orm

from hpo.errors import LeaseLostError
from hpo.storage import ledger
from hpo.storage.attributes import BUDGET_ATTR, OUTCOME_ATTR, PAUSED_ATTR
from hpo.storage.budget import Room, lock_study, make_room, refuse_beyond_budget
from hpo.storage.changes import lock_study_of, note_change
from hpo.storage.deletion import forget_what_is_gone
from hpo.storage.guarded import set_attr, set_state
from hpo.storage.leased import Held, lease_lost
from hpo.storage.ledger import Owner
from hpo.storage.new_trials import as_shown, insert_running, is_stored_as, marked
from hpo.storage.optuna_private import PARAMS, TRIAL_SYSTEM_ATTRS, TRIAL_USER_ATTRS, TRIALS, id_of_trial, models
from hpo.storage.outage import inheriting_patience, patient
from hpo.storage.pausing import PAUSED, forget_pause, lock_paused
from hpo.storage.rehearsal import rehearse_a_life
from hpo.storage.together import GatheringStorage

#: The outcome of an attempt that leaves its trial unfinished, by the trial's new state.
_UNFINISHED: Final = {TrialState.WAITING: "requeued", TrialState.RUNNING: PAUSED}


class _Claim(threading.local):
    """What the current thread's operation has claimed, committed or not.

    Attributes:
        trial_id: The trial.
        attempt: The attempt at the trial.
        room: How far the study's budget may be raised for the trial; None: not at all.
    """

    trial_id: int | None = None
    attempt: int | None = None
    room: Room | None = None


@inheriting_patience
class StudyStorage(GatheringStorage):
    """Optuna's storage with a budget, leases and fencing; made by `hpo.storage.opening.open_storage`.

    Args:
        url: A normalised URL (`hpo.storage.engines.normalize_url`) of a database that has the schema.
        owner: The process on whose behalf trials are run. Without one (dashboard, command line) writes are not
            fenced, and no leases are taken.

    Attributes:
        process: Id of the process that runs the owner's trials.
    """

    def __init__(self, url: str, owner: Owner | None = None) -> None:
        self._claim = _Claim()
        super().__init__(url, owner)

    def __reduce__(self) -> tuple[type["StudyStorage"], tuple[str]]:
        """Pickle without connections and owner: a copy in another process opens its own, and owns nothing."""
        return (StudyStorage, (self.url,))

    # ------------------------------------------------------------------ studies

    @patient
    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        """Create a study; DuplicatedStudyError if the name is taken."""
        try:
            with self.transaction() as session:
                if self.engine.name == "sqlite":
                    forget_what_is_gone(session)
                return super().create_new_study(directions, study_name)
        except DuplicatedStudyError:
            if not self.patience.tries or study_name is None:
                raise
            return self.get_study_id_from_name(study_name)  # most likely, the previous try has created it

    @patient
    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        """Store a user attribute of the study."""
        with self._writing():
            super().set_study_user_attr(study_id, key, value)

    @patient
    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """Store a system attribute of the study."""
        with self._writing():
            super().set_study_system_attr(study_id, key, value)

    def set_budget(self, study_id: int, n_trials: int | None) -> None:
        """Set how many trials the study may have, without imported ones; None for any number."""
        self.set_study_user_attr(study_id, BUDGET_ATTR, n_trials)

    # ------------------------------------------------------------------ new trials

    def enqueue(self, study_id: int, template: FrozenTrial, room: Room) -> int:
        """Add a waiting trial, and raise the study's budget for it, in one transaction; returns its id.

        Raises:
            BudgetExhaustedError: ``room`` does not allow a budget that is large enough.
        """
        self._claim.room = room
        try:
            return self.create_new_trial(study_id, template)
        finally:
            self._claim.room = None

    @patient
    def _create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> FrozenTrial:
        template = template_trial
        if template is not None:
            template = marked(template, budgeted=BUDGET_ATTR in self.get_study_user_attrs(study_id))
        if not self.patience.tries:
            self._claim.trial_id = self._claim.attempt = None
        if template is None:
            trial = self._insert_new_trial(study_id)
        else:
            with self._writing():
                trial = super()._create_new_trial(study_id, template)
        if self._claim.attempt is not None:
            self._hold(id_of_trial(trial), self._claim.attempt)
        if self._claim.attempt is not None and template is None and not self.is_granting:
            # Optuna reads the new trial next; a copy will do, because only this owner could have written to it.
            self.keep_untouched(copy.deepcopy(trial))
        return trial

    def _insert_new_trial(self, study_id: int) -> FrozenTrial:
        """Add a trial without a template, as Optuna does but without its object-relational mapper."""
        with self.transaction() as session:
            lock_study(session, study_id)
            return as_shown(self._get_prepared_new_trial(study_id, None, session))

    def _get_prepared_new_trial(
        self, study_id: int, template_trial: FrozenTrial | None, session: orm.Session
    ) -> models.TrialModel:
        """Insert a trial as Optuna does, after the study's row has been locked, with our checks in between."""
        if self._added_before(session, study_id, template_trial):
            return models.TrialModel.find_or_raise_by_id(cast("int", self._claim.trial_id), session)
        if template_trial is None:
            trial = insert_running(session, study_id, refuse_beyond_budget(session, study_id))
        else:
            if self._claim.room is not None:
                make_room(session, study_id, self._claim.room)
            if not template_trial.state.is_finished():
                refuse_beyond_budget(session, study_id)
            trial = super()._get_prepared_new_trial(study_id, template_trial, session)
        self._claim.trial_id = cast("int", trial.trial_id)
        if self.engine.name == "sqlite":  # which may reuse the ids of deleted trials
            ledger.forget_trial(session, self._claim.trial_id)
        if self.owner is not None and trial.state == TrialState.RUNNING:
            self._claim.attempt = ledger.claim(session, self._claim.trial_id, self.owner)
            self._store_grant(session, self._claim.trial_id)
        return trial

    def _added_before(self, session: orm.Session, study_id: int, template: FrozenTrial | None) -> bool:
        """Whether an earlier try of this operation has added its trial after all."""
        trial_id = self._claim.trial_id
        if trial_id is None or not self.patience.tries:
            return False
        if self.owner is not None and (template is None or template.state == TrialState.RUNNING):
            return self._claimed_before(session, trial_id, self.owner)
        return is_stored_as(session, trial_id, study_id, template)

    def _claimed_before(self, session: orm.Session, trial_id: int, owner: Owner | None) -> bool:
        """Whether an earlier try of this operation has taken a trial's lease for an owner after all."""
        if not self.patience.tries or self._claim.attempt is None or owner is None:
            return False
        return ledger.is_held_by(session, trial_id, self._claim.attempt, owner)

    # ------------------------------------------------------------------ fenced writes

    @patient
    def _set_trial_param(
        self,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
        previous_distribution: BaseDistribution | None,
    ) -> None:
        if previous_distribution is None:  # only the first time in a process: Optuna looks up the distribution
            self._untouched.clear()
            with self.transaction() as session:
                self._fence(session, trial_id)
                super()._set_trial_param(trial_id, param_name, param_value_internal, distribution, None)
            return
        try:
            check_distribution_compatibility(previous_distribution, distribution)
        except ValueError:
            self._explain_refusal(trial_id)  # a lost lease or a finished trial is the more important error
            raise
        row = {
            "param_name": param_name,
            "param_value": param_value_internal,
            "distribution_json": distribution_to_json(distribution),
        }
        self._write(PARAMS, trial_id, "param_name", row, replace=False)

    @patient
    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Store a user attribute; ``hpo:outcome`` also becomes the outcome of the owner's attempt."""
        self._write(TRIAL_USER_ATTRS, trial_id, "key", {"key": key, "value_json": json.dumps(value)})
        held = self._held.get(trial_id)
        if key == OUTCOME_ATTR and held is not None:
            held.outcome = str(value)

    @patient
    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Store a system attribute."""
        self._write(TRIAL_SYSTEM_ATTRS, trial_id, "key", {"key": key, "value_json": json.dumps(value)})

    @patient
    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Read a trial; LeaseLostError for one that this storage holds but that no longer runs.

        Optuna's ``tell`` reads first, and raises ValueError if the trial is not RUNNING. The owner needs to know
        the reason, and gets it here without another statement.
        """
        if trial_id in self._untouched:
            return self._untouched.pop(trial_id)
        trial = super().get_trial(trial_id)
        if trial.state != TrialState.RUNNING and trial_id in self._held:
            raise lease_lost(trial_id)
        return trial

    # ------------------------------------------------------------------ states

    @patient
    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """Change a trial's state together with its lease.

        Returns:
            False if the trial was to become RUNNING and another worker was faster.
        """
        if state == TrialState.RUNNING:
            return self._take(trial_id, values)
        return self._release(trial_id, state, values, None)

    @patient
    def requeue(self, trial_id: int, reason: str | None = None) -> None:
        """Requeue a held trial: it goes from RUNNING to WAITING, with everything that is stored about it."""
        self.attempt_of(trial_id)
        self._release(trial_id, TrialState.WAITING, None, reason)

    @patient
    def pause(self, trial_id: int, epoch: int) -> None:
        """Pause a held trial after an epoch whose checkpoint is on disk; from then on only `resume` takes it."""
        self.attempt_of(trial_id)
        self._release(trial_id, TrialState.RUNNING, None, f"after epoch {epoch}", paused=epoch)

    @patient
    def resume(self, trial_id: int) -> bool:
        """Take a paused trial for the owner; False if it is no longer paused: another process was faster."""
        assert self.owner is not None, "only who trains may resume a trial"
        owner = self.owners.get(trial_id, self.owner)
        if not self.patience.tries:
            self._claim.attempt = None
        with self.transaction() as session:
            won = self._claimed_before(session, trial_id, owner)
            study_id = lock_study_of(session, trial_id)
            if not won and (won := lock_paused(session, trial_id)):
                note_change(session, study_id, trial_id)
                forget_pause(session, trial_id, decision=True)
                self._claim.attempt = ledger.claim(session, trial_id, owner)
                self._store_grant(session, trial_id)
        if won:
            self._hold(trial_id, cast("int", self._claim.attempt))
        return won

    def _take(self, trial_id: int, values: Sequence[float] | None) -> bool:
        owner = self.owners.get(trial_id, self.owner)
        if not self.patience.tries:
            self._claim.attempt = None
        with self.transaction() as session:
            query = sa.select(TRIALS.c.state).where(TRIALS.c.trial_id == trial_id).with_for_update()
            won = self._claimed_before(session, trial_id, owner)
            if owner is not None and session.execute(query).scalar() == TrialState.WAITING:
                forget_pause(session, trial_id, decision=False)  # another tool may have made a paused one wait
                self._claim.attempt = ledger.claim(session, trial_id, owner)
                self._store_grant(session, trial_id, only_first=True)
            won = won or super().set_trial_state_values(trial_id, TrialState.RUNNING, values)
        if won and self._claim.attempt is not None:
            self._hold(trial_id, self._claim.attempt)
        return won

    def _release(
        self,
        trial_id: int,
        state: TrialState,
        values: Sequence[float] | None,
        reason: str | None,
        paused: int | None = None,
    ) -> bool:
        self._untouched.clear()
        # Removed first, so that the heartbeat does not take the ended attempt for a lost one.
        held = self._held.pop(trial_id, None)
        attempt, said = (None, None) if held is None else (held.attempt, held.outcome)
        outcome = _UNFINISHED.get(state, said or state.name.lower())
        try:
            with self.transaction() as session:
                if self._gathered.trial_id == trial_id:  # if these are refused, so is what follows
                    self._execute_rows(session, trial_id, attempt, self._gathered.rows)
                if held is None:
                    self._take_away(session, trial_id, outcome)
                elif not ledger.end(session, trial_id, held.attempt, outcome, reason, seconds=self._took(held)):
                    if self.patience.tries and ledger.has_ended_as(session, trial_id, held.attempt, outcome):
                        self._gathered.rows.clear()
                        return True  # an earlier try has been stored after all
                    raise lease_lost(trial_id)  # noqa: TRY301 - the lease is put back all the same
                if paused is not None:
                    set_attr(session, TRIAL_USER_ATTRS, trial_id, PAUSED_ATTR, paused)
                done = set_state(session, trial_id, state, values or ())
                if not done:  # Optuna's method raises the right error
                    done = super().set_trial_state_values(trial_id, state, values)
        except BaseException:  # of the commit, too
            if held is not None:
                self._held[trial_id] = held
            raise
        if held is not None and not done:
            self._held[trial_id] = held
        self._gathered.rows.clear()
        return done

    def _take_away(self, session: orm.Session, trial_id: int, outcome: str) -> None:
        """End the lease of a trial that this storage does not hold, or its pause, with a note so looks read it."""
        study_id = lock_study_of(session, trial_id)
        self._fence(session, trial_id)
        ledger.end_open(session, trial_id, outcome)
        if lock_paused(session, trial_id):
            forget_pause(session, trial_id, decision=True)
            note_change(session, study_id, trial_id)

    # ------------------------------------------------------------------ life and death

    def rehearse(self, study_id: int) -> None:
        """Execute the statements of a trial's life once, without changing anything; see `rehearsal`.

        Statements that are transactions of their own are executed for a trial that does not exist.
        """
        absent, same = -1, FloatDistribution(0.0, 1.0)
        for write in (
            lambda: self._set_trial_param(absent, "", 0.0, same, same),
            lambda: self.set_trial_user_attr(absent, "", None),
            lambda: self.set_trial_system_attr(absent, "", None),
            lambda: self.set_trial_intermediate_value(absent, 0, 0.0),
            lambda: self.set_trial_state_values(absent, TrialState.COMPLETE, [0.0]),
        ):
            self._held[absent] = Held(0)
            with contextlib.suppress(LeaseLostError):
                write()
        self._held[absent] = Held(0)
        self.rehearse_together(absent)
        self.forget(absent)
        with contextlib.suppress(KeyError):
            self.get_trial(absent)
        if self.owner is not None:
            rehearse_a_life(self, study_id, self.owner)
