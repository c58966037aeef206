"""The study that a sampler is shown: stopped and paused trials count as complete, with predicted final values."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from optuna import Study
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.trial_curves import curves_of_trials, has_diverged
from hpo.storage.optuna_private import all_trials, showing
from hpo.storage.pausing import paused_at


def as_predicted(study: Study, encoding: Encoding) -> Study:
    """A view of the study in which each trial that was stopped or paused after a report is complete.

    Such a trial has the value that the curve model predicts at its end. Its last value would mislead a sampler,
    which would take the trial for a poor one, or ignore it. A trial that diverged has the worst of the values that
    are shown. Everything else is the study's own; what a sampler stores goes to the study's storage.

    A study with several objectives, or one whose trials have all ended by themselves, is returned unchanged. A
    trial that lacks a constraint that others have is shown unchanged, since samplers compare violations.

    Args:
        study: The study. Where Hyperband shows its sampler one bracket, the view still has all trials: predicted
            values are comparable between brackets.
        encoding: The study's search space.
    """
    if len(study.directions) > 1:
        return study
    trials = all_trials(study)
    names = {name for trial in trials for name in trial.constraints}
    stopped = [trial for trial in trials if _is_stopped(trial) and trial.constraints.keys() == names]
    diverged = [trial for trial in trials if has_diverged(trial)]
    if not stopped and not diverged:
        return study
    complete = (trial for trial in trials if trial.state == TrialState.COMPLETE and not has_diverged(trial))
    values = {trial.number: trial.value for trial in complete if trial.value is not None}
    values |= _predicted(study, trials, stopped, encoding)
    if not values:
        return study
    worst = (min if study.direction == StudyDirection.MAXIMIZE else max)(values.values())
    shown = {trial.number: _complete(trial, values.get(trial.number, worst)) for trial in stopped}
    shown |= {trial.number: _complete(trial, worst) for trial in diverged}
    return showing(study, [shown.get(trial.number, trial) for trial in trials])


def _is_stopped(trial: FrozenTrial) -> bool:
    ended = trial.state == TrialState.PRUNED or paused_at(trial) is not None
    return ended and bool(trial.intermediate_values)


def _predicted(
    study: Study, trials: Sequence[FrozenTrial], stopped: Sequence[FrozenTrial], encoding: Encoding
) -> dict[int, float]:
    """Predicted final values of the stopped trials, by trial number; a trial without a prediction is missing."""
    if not stopped:
        return {}
    # SciPy takes a quarter of a second to import; opening a study need not wait for it.
    from hpo.search.one_thread import one_thread
    from hpo.search.predicted_ends import predicted_ends

    known = curves_of_trials(study, trials, bounded=False)
    ends: dict[int, float] = {}
    with one_thread():
        for curves in (known.curves, *known.earlier.values()):
            ends |= predicted_ends(curves, encoding, known.horizon)
    sign = -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0
    return {trial.number: sign * ends[trial.number] for trial in stopped if trial.number in ends}


def _complete(trial: FrozenTrial, value: float) -> FrozenTrial:
    shown = copy.copy(trial)
    shown.state, shown.values = TrialState.COMPLETE, [value]
    shown.datetime_complete = trial.datetime_complete or trial.datetime_start
    return shown
