"""Which trial a free worker takes: what waits first, then what the scheduler says."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from hpo.errors import BudgetExhaustedError
from hpo.search.schedulers.scheduler import Fork, New, Next, Resume, Seen, Standing, Wait, Why
from hpo.storage.grants import Grant, Granted, OldGrantError
from hpo.storage.lineage import Forked
from hpo.storage.optuna_private import forget_cached_trials, id_of_trial
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import finite
from hpo.study.standing import standing_of


def take(opened: OpenStudy) -> optuna.Trial | Wait | None:
    """The next trial for this worker, which holds it from then on.

    Returns:
        The trial, RUNNING; `Wait` where one may come; None where nothing is left to do.

    Raises:
        OtherCodeError: Other code than this worker's has been accepted for the study.
        ValueError: The scheduler resumes or forks a trial that is not there.
    """
    opened.refuse_other_code()
    while True:
        standing = standing_of(opened)
        step = _within_epochs(standing, opened.scheduler.next(standing))
        try:
            return _carried_out(opened, standing, step)
        except OldGrantError:  # another worker was faster: this one decides again, with that in sight
            continue


def extended(opened: OpenStudy, trial: optuna.Trial) -> Granted | None:
    """Let a trial whose grant ends train on without a pause, if that is what the scheduler would resume now.

    Returns:
        What it is granted now; None where it pauses.
    """
    trial_id = id_of_trial(trial)
    while True:
        standing = standing_of(opened, trial.number)
        step = _within_epochs(standing, opened.scheduler.next(standing))
        if not isinstance(step, Resume) or step.number != trial.number:
            return None
        grant = _grant(opened, standing, step)
        with contextlib.suppress(OldGrantError):
            opened.storage.extend(trial_id, grant)
            return grant.granted


def claimable(opened: OpenStudy) -> int:
    """How many workers could take a trial now."""
    standing = standing_of(opened)
    step = _within_epochs(standing, opened.scheduler.next(standing))
    if isinstance(step, New) and not _is_grant(standing, step):
        return opened.claimable()
    if isinstance(step, Wait):
        return len(_takeable(standing))
    return len(_takeable(standing)) + len(standing.paused) + (standing.new_left or 0)


def _carried_out(opened: OpenStudy, standing: Standing, step: Next) -> optuna.Trial | Wait | None:
    if isinstance(step, New) and not _is_grant(standing, step):
        with contextlib.suppress(BudgetExhaustedError):
            return opened.study.ask()  # one that waits first
        return None
    waiting = _take_waiting(opened, standing)
    if waiting is not None:
        return waiting
    if isinstance(step, Resume):
        return _resume(opened, standing, step) or Wait()
    if isinstance(step, New | Fork):
        with contextlib.suppress(BudgetExhaustedError), opened.storage.granting(_grant(opened, standing, step)):
            return opened.study.ask()
    return Wait() if standing.running else None


def _is_grant(standing: Standing, step: New) -> bool:
    """Whether a new trial is to be stored with a grant: a pruner grants nothing where epochs are unlimited."""
    return step.until is not None or step.params is not None or standing.n_epochs is not None


def _grant(opened: OpenStudy, standing: Standing, step: New | Resume | Fork) -> Grant:
    why = step.why if step.why.incumbent is not None else replace(step.why, incumbent=standing.incumbent)
    fork: Forked | None = None
    if isinstance(step, Fork):
        fork = {"parent": step.parent, "epoch": step.epoch, "replaces": step.replaces}
    return Grant(
        opened.study_id,
        {"number": standing.decision, "until": step.until, "why": finite(asdict(why))},
        None if isinstance(step, Resume) else step.params,
        step.state,
        fork,
    )


def _within_epochs(standing: Standing, step: Next) -> Next:
    """The same, cut to the epochs that the study has left; `Wait` where it has none."""
    if isinstance(step, Wait) or standing.n_epochs is None:
        return step
    assert standing.epochs_left is not None
    if standing.epochs_left == 0:
        return Wait()
    goal, end = step.until or standing.horizon, _epochs_before(standing, step) + standing.epochs_left
    return step if goal is not None and goal <= end else replace(step, until=end)


def _epochs_before(standing: Standing, step: New | Resume | Fork) -> int:
    """Epochs that lie behind a trial where a grant begins."""
    if isinstance(step, New):
        return 0
    return step.epoch if isinstance(step, Fork) else _numbered(standing, step.number).epochs


def _takeable(standing: Standing) -> list[Seen]:
    """Trials that wait and may be taken: those that go on where they were, and others while epochs are left."""
    waiting = [trial for trial in standing.own if trial.state == "waiting"]
    return [trial for trial in waiting if trial.kinds or standing.epochs_left != 0]


def _take_waiting(opened: OpenStudy, standing: Standing) -> optuna.Trial | None:
    takeable = {trial.number for trial in _takeable(standing)}
    if not takeable:  # the usual case: the scheduler is not asked for what it would grant first
        return None
    first = New(until=opened.scheduler.first(standing), why=Why("enqueued"))
    step = _within_epochs(standing, first)
    grant = _grant(opened, standing, step) if isinstance(step, New) and _is_grant(standing, step) else None
    for trial in opened.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        if trial.number not in takeable:
            continue
        # Another process may have ended it.
        with contextlib.suppress(UpdateFinishedTrialError), opened.storage.granting(grant):
            if opened.storage.set_trial_state_values(id_of_trial(trial), TrialState.RUNNING):
                return _trial(opened, id_of_trial(trial))
    return None


def _resume(opened: OpenStudy, standing: Standing, step: Resume) -> optuna.Trial | None:
    """A paused trial; None where another worker was faster."""
    if _numbered(standing, step.number).state != "paused":
        raise ValueError(f"the scheduler resumes trial {step.number}, which is not paused")
    trial_id = opened.storage.get_trial_id_from_study_id_trial_number(opened.study_id, step.number)
    with opened.storage.granting(_grant(opened, standing, step)):
        return _trial(opened, trial_id) if opened.storage.resume(trial_id) else None


def _numbered(standing: Standing, number: int) -> Seen:
    for trial in standing.own:
        if trial.number == number:
            return trial
    raise ValueError(f"the scheduler resumes trial {number}, which is not there")


def _trial(opened: OpenStudy, trial_id: int) -> optuna.Trial:
    forget_cached_trials(opened.study)  # as Optuna's ask does
    return optuna.Trial(opened.study, trial_id)
