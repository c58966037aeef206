"""Takes the next trial for a free worker: a waiting trial if there is one, else what the scheduler says."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Final, cast

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from hpo.errors import BudgetExhaustedError
from hpo.search.halving_pruners import LooksAhead
from hpo.search.schedulers.scheduler import (
    Fork,
    New,
    Next,
    Resume,
    Standing,
    Wait,
    Why,
    within_epochs,
)
from hpo.storage import ledger
from hpo.storage.cache import StudyCache
from hpo.storage.grants import Grant, Granted, OldGrantError, grants_of
from hpo.storage.ledger import Lease
from hpo.storage.lineage import Forked
from hpo.storage.optuna_private import forget_cached_trials, id_of_study, id_of_trial, storage_of
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import finite
from hpo.study.standing import standing_of

#: Maximum number of paused trials to count; a study with more is counted again once these are taken.
_COUNTED: Final = 64


@dataclass
class Taker:
    """Takes trials for one owner, by the scheduler's decisions.

    Attributes:
        opened: The study; its storage has the owner and holds the leases.
    """

    opened: OpenStudy
    _decided: tuple[tuple[int, int], int, Next] | None = None

    def take(self) -> Lease | Wait | None:
        """Take the next trial; the owner holds its lease from then on.

        Returns:
            The lease of the trial, which is RUNNING; `Wait` where a trial may come later; None where nothing is
            left to do.

        Raises:
            OtherCodeError: The study's code or search space is newer than this worker's.
            ValueError: The scheduler resumes a trial that does not exist.
        """
        self.opened.refuse_other_code()
        if isinstance(self.opened.study.pruner, LooksAhead):  # in the process that forks one for each trial
            self.opened.study.pruner.look_ahead(self.opened.study)
        anew = False
        while True:
            standing = standing_of(self.opened)
            step = self._known(standing) or self._asked(standing)
            try:
                taken = _carried_out(self.opened, standing, step)
            except OldGrantError:  # another worker was faster: decide again, with its grant in sight
                continue
            if taken is not None or anew or standing.read_columns is None:
                return taken
            # Another tool may have changed a paused trial, which a look does not show: read all before leaving.
            self.opened.progress.forget()
            anew = True

    def extended(self, trial_id: int, values: Mapping[int, float]) -> Granted | None:
        """Extend the grant of a held trial, so that it need not pause, if the scheduler would resume it now.

        If not, the scheduler's answer is kept for the next `take`: it holds if this trial pauses and no other
        grant comes in between.

        Args:
            trial_id: Optuna's id of the trial.
            values: Values by epoch that it has reported but that are not stored yet; they are stored with a grant.

        Returns:
            The new grant; None where the trial pauses.
        """
        number = storage_of(self.opened.study).get_trial_number_from_id(trial_id)
        while True:
            standing = standing_of(self.opened, number, values)
            step = self._asked(standing)
            if not isinstance(step, Resume) or step.number != number:
                self._decided = (_moment(standing), number, step)
                return None
            with contextlib.suppress(OldGrantError):
                grant = _grant(self.opened, standing, step)
                self.opened.storage.extend(trial_id, grant, values)
                return grant.granted

    def _asked(self, standing: Standing) -> Next:
        return within_epochs(standing, self.opened.scheduler.next(standing))

    def _known(self, standing: Standing) -> Next | None:
        """The answer kept by `extended`; None where that trial did not pause, or the study has changed since."""
        decided, self._decided = self._decided, None
        if decided is None or isinstance(decided[2], Wait):
            return None
        moment, number, step = decided
        paused = {number, step.number} if isinstance(step, Resume) else {number}
        if moment != _moment(standing) or not all(map(standing.is_paused, paused)):
            return None
        return step


def _moment(standing: Standing) -> tuple[int, int]:
    """What changes when a decision made before no longer holds: the numbers of grants and of retries."""
    return standing.decision, standing.retries


def begin(opened: OpenStudy, lease: Lease) -> optuna.Trial:
    """Take over a lease in this process; returns the trial that it trains.

    Raises:
        LeaseLostError: Another attempt has the trial.
    """
    opened.storage.hold(lease)
    cast("StudyCache", storage_of(opened.study)).meet(id_of_study(opened.study), lease.trial_id)
    forget_cached_trials(opened.study)  # as Optuna's ask does
    return optuna.Trial(opened.study, lease.trial_id)


def claimable(opened: OpenStudy, most: int = _COUNTED) -> int:
    """How many workers could take a trial now.

    A scheduler that reads trials, which takes long, is asked only once: if it has anything to do, every paused
    trial counts.

    Args:
        opened: The study.
        most: Maximum number of trials to count that a scheduler would resume.
    """
    standing, step = _next_of(opened)
    while isinstance(step, Resume) and _is_outdated(opened, step.number):  # each turn ends that for a trial
        _read_again(opened, step.number)
        standing, step = _next_of(opened)
    if isinstance(step, New) and not _is_grant(standing, step):
        return opened.claimable()
    if isinstance(step, Wait):
        return len(standing.takeable)
    if standing.read_columns is None:
        return len(standing.takeable) + standing.count("paused") + (standing.new_left or 0)
    resumed, last = _resumed_in_turn(opened, standing, step, most)
    return len(standing.takeable) + resumed + (standing.new_left or 0 if isinstance(last, New | Fork) else 0)


def _next_of(opened: OpenStudy) -> tuple[Standing, Next]:
    standing = standing_of(opened)
    return standing, within_epochs(standing, opened.scheduler.next(standing))


def _is_outdated(opened: OpenStudy, number: int) -> bool:
    """Whether looks show a trial as paused though it is not, because another tool has changed it unrecorded."""
    with opened.storage.engine.connect() as conn:
        if ledger.is_paused(conn, _id_of(opened, number)):
            return False
    return standing_of(opened).is_paused(number)  # if a worker has just resumed it, a new look shows that


def _read_again(opened: OpenStudy, number: int) -> None:
    opened.progress.forget()
    cast("StudyCache", storage_of(opened.study)).read_again(opened.study_id, _id_of(opened, number))


def _id_of(opened: OpenStudy, number: int) -> int:
    return opened.storage.get_trial_id_from_study_id_trial_number(opened.study_id, number)


def _resumed_in_turn(opened: OpenStudy, standing: Standing, step: Next, most: int) -> tuple[int, Next]:
    """How many paused trials would be resumed if workers asked one after the other, and the answer after these."""
    resumed: set[int] = set()
    while isinstance(step, Resume) and step.number not in resumed and len(resumed) < most:
        resumed.add(step.number)
        standing = replace(standing, read_columns=partial(standing.columns.with_resumed, step.number, step.until))
        step = within_epochs(standing, opened.scheduler.next(standing))
    return len(resumed), step


def _carried_out(opened: OpenStudy, standing: Standing, step: Next) -> Lease | Wait | None:
    if isinstance(step, New) and not _is_grant(standing, step):
        return _first_waiting(opened, None) or _new(opened, None)
    waiting = _take_waiting(opened, standing)
    if waiting is not None:
        return waiting
    if isinstance(step, Resume):
        return _resume(opened, standing, step) or Wait()
    created = _new(opened, _grant(opened, standing, step)) if isinstance(step, New | Fork) else None
    if created is not None:
        return created
    return Wait() if standing.count("running") else None


def _is_grant(standing: Standing, step: New) -> bool:
    """Whether a new trial is stored with a grant; with a pruner it is not, unless the study limits epochs."""
    # An answer with a reason is a scheduler's decision about the next trial, even if that trains to its end.
    decided = bool(step.why.kind) or step.until is not None or step.params is not None
    return decided or standing.n_epochs is not None


def _grant(opened: OpenStudy, standing: Standing, step: New | Resume | Fork) -> Grant:
    if step.state is not None and standing.granted not in (None, standing.decision):
        raise OldGrantError("what the scheduler would store was decided by what it had stored before other grants")
    why = step.why if step.why.incumbent is not None else replace(step.why, incumbent=standing.incumbent)
    fork: Forked | None = None
    if isinstance(step, Fork):
        fork = {"parent": step.parent, "epoch": step.epoch, "replaces": step.replaces}
    return Grant(
        id_of_study(opened.study),
        {"number": standing.decision, "until": step.until, "why": finite(asdict(why)) | dict(fork or {})},
        None if isinstance(step, Resume) else step.params,
        step.state,
        fork,
        retries=standing.retries,
    )


def _new(opened: OpenStudy, grant: Grant | None) -> Lease | None:
    """Take a new trial; None above the budget."""
    with contextlib.suppress(BudgetExhaustedError), opened.storage.granting(grant):
        return _held(opened, storage_of(opened.study).create_new_trial(id_of_study(opened.study)))
    return None


def _take_waiting(opened: OpenStudy, standing: Standing) -> Lease | None:
    takeable = set(standing.takeable.tolist())
    if not takeable:  # the usual case, in which the scheduler need not be asked for a first grant
        return None
    first = New(until=opened.scheduler.first(standing), why=Why("enqueued"))
    step = within_epochs(standing, first)
    grant = _grant(opened, standing, step) if isinstance(step, New) and _is_grant(standing, step) else None
    cut = standing.cut
    whole = takeable if cut is None else takeable - {cut[0]}
    return _first_waiting(opened, grant, among=whole) or (cut and _take_cut(opened, standing, *cut))


def _take_cut(opened: OpenStudy, standing: Standing, number: int, until: int) -> Lease | None:
    """Take a waiting trial with its grant cut to an epoch; None where another worker was faster."""
    for trial in opened.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        if trial.number == number:
            granted: Granted = {**grants_of(trial)[-1], "number": standing.decision, "until": until}
            grant = Grant(id_of_study(opened.study), granted, cuts=True, retries=standing.retries)
            return _first_waiting(opened, grant, among={number})
    return None


def _first_waiting(opened: OpenStudy, grant: Grant | None, among: Container[int] | None = None) -> Lease | None:
    """Take the first waiting trial, of those ``among`` (None: of all); None where there is none."""
    for trial in opened.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        if among is not None and trial.number not in among:
            continue
        # Another process may have ended it.
        with contextlib.suppress(UpdateFinishedTrialError), opened.storage.granting(grant):
            if opened.storage.set_trial_state_values(id_of_trial(trial), TrialState.RUNNING):
                return _held(opened, id_of_trial(trial))
    return None


def _resume(opened: OpenStudy, standing: Standing, step: Resume) -> Lease | None:
    """Resume a paused trial; None where another worker was faster."""
    if not standing.is_paused(step.number):
        raise ValueError(f"the scheduler resumes trial {step.number}, which is not paused")
    trial_id = _id_of(opened, step.number)
    with opened.storage.granting(_grant(opened, standing, step)):
        if opened.storage.resume(trial_id):
            return _held(opened, trial_id)
    _read_again(opened, step.number)  # another tool may have changed it, which a look does not show
    return None


def _held(opened: OpenStudy, trial_id: int) -> Lease:
    return Lease(trial_id, opened.storage.attempt_of(trial_id))
