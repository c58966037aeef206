"""Retries failed trials: puts them back into the queue under the same number.

A trial keeps its number, its parameters, its seed and its reported values, so the next attempt resumes from its
newest checkpoint. What marks it as failed is removed: the outcome, the reason, the traceback, the time of its end
and any value. The attempts stay in the ledger; those made so far no longer count against ``max_retries``.

Other processes may have cached the trial as finished. So the change is recorded (`hpo.storage.changes`), and their
next look reads the trial anew. What a scheduler decided before the retry is not granted, as it did not count the
epochs that the trial may still train. The trial's row stays its claim on the budget: no other trial takes its
place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.errors import StudyError
from hpo.search.schedulers.columns import WAITING
from hpo.storage import ledger
from hpo.storage.attributes import IMPORTED_ATTR, REASON_ATTR, RETRIED_ATTR
from hpo.storage.changes import lock_study_of, note_change
from hpo.storage.grants import note_retry
from hpo.storage.optuna_private import VALUES, id_of_trial, models, set_user_attr
from hpo.storage.outage import patient
from hpo.storage.pausing import PAUSED
from hpo.storage.settling import forget_failure
from hpo.storage.study_storage import StudyStorage
from hpo.study.goals import goal_reached
from hpo.study.outcome import Outcome, outcome_of
from hpo.study.own_trials import own_trials
from hpo.study.standing import standing_of

if TYPE_CHECKING:
    from hpo.study.open_study import OpenStudy


@dataclass(frozen=True)
class Reopened:
    """A failed trial that has been put back into the queue.

    Attributes:
        trial: Its number.
        attempts: How many attempts it has had.
        outcome: Its outcome as a failed trial.
        reason: Why it failed, for people; empty if unknown.
    """

    trial: int
    attempts: int
    outcome: str
    reason: str


@dataclass(frozen=True)
class Prospect:
    """What `hpo run` will do with waiting trials, by the present study file.

    Attributes:
        without_epochs: Numbers of the trials for which ``study.epochs`` leaves no epochs, ascending; they stay
            waiting.
        cut: A trial that may train only in part, and the epoch up to which; None: there is none.
        reached: Why the study is done in spite of waiting trials; None if it is not.
    """

    without_epochs: list[int]
    cut: tuple[int, int] | None
    reached: str | None


def prospect(opened: OpenStudy, numbers: Iterable[int]) -> Prospect:
    """What `hpo run` will do with retried or enqueued trials; those that have been taken already are left out."""
    standing = replace(standing_of(opened), n_epochs=opened.spec.study.epochs)
    every, asked = standing.columns, set(numbers)
    waiting = asked & set(every.number[every.state == WAITING].tolist())
    cut = standing.cut if standing.cut is not None and standing.cut[0] in waiting else None
    return Prospect(
        sorted(waiting - set(standing.takeable.tolist())),
        cut,
        goal_reached(opened.spec.study, own_trials(opened)),
    )


def prospect_if_known(opened: OpenStudy, numbers: Iterable[int]) -> tuple[Prospect | None, str]:
    """`prospect`, or why it is not known; never raises, since the trials are in the queue already."""
    try:
        return prospect(opened, numbers), ""
    except Exception as error:  # noqa: BLE001 - reported; the command has succeeded
        return None, f"what `hpo run` will do is not known: {error or type(error).__name__}"


def failed_trials(opened: OpenStudy) -> list[int]:
    """Numbers of the study's own trials that have failed."""
    trials = opened.study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
    return [trial.number for trial in trials if IMPORTED_ATTR not in trial.system_attrs]


def reopen(opened: OpenStudy, numbers: Iterable[int], *, dry_run: bool = False) -> list[Reopened]:
    """Put failed trials back into the queue, each in a transaction of its own.

    Args:
        opened: The study.
        numbers: The trials' numbers.
        dry_run: Only report what would be done.

    Returns:
        What was done, by number; without trials that another process has retried meanwhile.

    Raises:
        StudyError: One of the trials does not exist or has not failed; then nothing is done at all.
    """
    trials = {trial.number: trial for trial in opened.study.get_trials(deepcopy=False)}
    wanted = sorted(set(numbers))
    for number in wanted:
        _check_failed(opened, number, trials.get(number))
    if dry_run:
        failed = [trials[number] for number in wanted]
        return [_described(trial, opened.storage.attempts_of_trial(id_of_trial(trial))) for trial in failed]
    done = (_reopen(opened.storage, trials[number]) for number in wanted)
    return [each for each in done if each is not None]


def _check_failed(opened: OpenStudy, number: int, trial: FrozenTrial | None) -> None:
    if trial is None:
        raise StudyError(f"the study {opened.spec.study.name} has no trial {number}\n  fix: see `hpo trials`")
    if IMPORTED_ATTR in trial.system_attrs:
        raise StudyError(f"trial {number} was imported: it never ran here, and can't be run again")
    if trial.state != TrialState.FAIL:
        raise StudyError(f"trial {number} has not failed: {_WHY_NOT[outcome_of(trial)]}")


_WHY_NOT = {
    PAUSED: "it is paused\n  fix: `hpo run` resumes it when the study's scheduler says so",
    "running": "it is running\n  fix: if its worker is dead, `hpo repair` lets it wait",
    "waiting": "it waits already\n  fix: `hpo run` takes it up",
    Outcome.COMPLETE: "it is complete, and its value is known to the sampler\n"
    "  fix: train it again with `hpo train … --trial N --from-scratch`",
    Outcome.PRUNED: "it was pruned, which is a result\n"
    "  fix: train it to its end with `hpo train … --trial N --from-scratch`",
    Outcome.DIVERGED: "it diverged, which is a result: so it would with these parameters again\n"
    "  fix: leave them out of the search space, or correct the cause, in a study of another name",
}


def _described(trial: FrozenTrial, history: Sequence[ledger.Attempt]) -> Reopened:
    return Reopened(trial.number, len(history), outcome_of(trial), str(trial.user_attrs.get(REASON_ATTR, "")))


@patient
def _reopen(storage: StudyStorage, failed: FrozenTrial) -> Reopened | None:
    trial_id = id_of_trial(failed)
    with storage.transaction() as session:
        study_id = lock_study_of(session, trial_id)
        # The lease first, then the trial, as everywhere. A failed trial has an open lease only if a tool that
        # knows nothing of leases has ended it; the lease's owner must not write to the waiting trial.
        ledger.end_open(session, trial_id, "fail")
        trial = models.TrialModel.find_or_raise_by_id(trial_id, session, for_update=True)
        history = ledger.attempts_of_trial(session, trial_id)
        if trial.state != TrialState.FAIL:
            session.rollback()
            by_last_try = storage.patience.tries and trial.state == TrialState.WAITING
            return _described(failed, history) if by_last_try else None
        trial.state = TrialState.WAITING
        trial.datetime_complete = None
        session.flush()
        note_change(session, study_id, trial_id)
        note_retry(session, study_id)
        forget_failure(session, trial_id)
        session.execute(sa.delete(VALUES).where(VALUES.c.trial_id == trial_id))
        last = max((attempt.attempt for attempt in history), default=0)
        set_user_attr(storage, session, trial_id, RETRIED_ATTR, last)
        return _described(failed, history)
