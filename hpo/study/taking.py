"""Which trial a free worker takes: what waits first, then what the scheduler says."""

from __future__ import annotations

import contextlib

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from hpo.errors import BudgetExhaustedError
from hpo.search.schedulers.scheduler import New, Resume, Standing, Wait
from hpo.storage.optuna_private import forget_cached_trials, id_of_trial
from hpo.storage.pausing import paused_at
from hpo.study.open_study import OpenStudy


def take(opened: OpenStudy) -> optuna.Trial | Wait | None:
    """The next trial for this worker, which holds it from then on.

    Returns:
        The trial, RUNNING; `Wait` where one may come; None where nothing is left to do.

    Raises:
        OtherCodeError: Other code than this worker's has been accepted for the study.
        ValueError: The scheduler resumes a trial that is not there.
    """
    opened.refuse_other_code()
    standing = Standing(opened.study)
    step = opened.scheduler.next(standing)
    if isinstance(step, New):
        with contextlib.suppress(BudgetExhaustedError):
            return opened.study.ask()  # one that waits first
        return None
    waiting = _take_waiting(opened)
    if waiting is not None:
        return waiting
    if isinstance(step, Resume):
        return _resume(opened, standing, step.number) or Wait()
    return step if standing.running else None


def claimable(opened: OpenStudy) -> int:
    """How many workers could take a trial now."""
    standing = Standing(opened.study)
    step = opened.scheduler.next(standing)
    if isinstance(step, New):
        return opened.claimable()
    return opened.count(TrialState.WAITING) + (len(standing.paused) if isinstance(step, Resume) else 0)


def _take_waiting(opened: OpenStudy) -> optuna.Trial | None:
    for trial in opened.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        with contextlib.suppress(UpdateFinishedTrialError):  # another process has ended it
            if opened.storage.set_trial_state_values(id_of_trial(trial), TrialState.RUNNING):
                return _trial(opened, id_of_trial(trial))
    return None


def _resume(opened: OpenStudy, standing: Standing, number: int) -> optuna.Trial | None:
    """A paused trial; None where another worker was faster."""
    found = next((each for each in standing.trials if each.number == number), None)
    if found is None or paused_at(found) is None:
        raise ValueError(f"the scheduler resumes trial {number}, which is not paused")
    return _trial(opened, id_of_trial(found)) if opened.storage.resume(id_of_trial(found)) else None


def _trial(opened: OpenStudy, trial_id: int) -> optuna.Trial:
    forget_cached_trials(opened.study)  # as Optuna's ask does
    return optuna.Trial(opened.study, trial_id)
