"""A study as its sampler is shown it: trials that were stopped or paused have their predicted final values."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from optuna import Study
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.storage.optuna_private import all_trials, showing
from hpo.storage.pausing import paused_at


def as_predicted(study: Study, encoding: Encoding) -> Study:
    """The study with each trial that was stopped or paused after a report as complete.

    Its value is the one that the curve model expects at its end, in place of its last one, which says little: a
    sampler would take a trial that was stopped early for a poor one, or for none at all. A trial that diverged has
    the worst value that is shown. Everything else is the study's own; what a sampler stores goes to its storage.

    A study with several objectives, or one whose trials have all ended by themselves, is returned as it is. So
    is a trial that lacks a constraint that others have: samplers compare violations.

    Args:
        study: The study, or the part of it that Hyperband shows a sampler: predicted values compare over all.
        encoding: Its search space.
    """
    if len(study.directions) > 1:
        return study
    trials = all_trials(study)
    names = {name for trial in trials for name in trial.constraints}
    stopped = [trial for trial in trials if _is_stopped(trial) and trial.constraints.keys() == names]
    if not stopped and all(map(_is_plain, trials)):
        return study
    maximize = study.direction == StudyDirection.MAXIMIZE
    values = _values(study, trials, encoding, maximize=maximize)
    if not values:
        return study
    worst = (min if maximize else max)(values.values())
    shown = {trial.number: _complete(trial, values.get(trial.number, worst)) for trial in stopped}
    shown |= {trial.number: _complete(trial, worst) for trial in trials if not _is_plain(trial)}
    return showing(study, [shown.get(trial.number, trial) for trial in trials])


def _is_stopped(trial: FrozenTrial) -> bool:
    ended = trial.state == TrialState.PRUNED or paused_at(trial) is not None
    return ended and bool(trial.intermediate_values)


def _is_plain(trial: FrozenTrial) -> bool:
    """Whether a trial is not one that has ended by diverging."""
    return trial.state != TrialState.COMPLETE or trial.value is None or math.isfinite(trial.value)


def _values(
    study: Study, trials: Sequence[FrozenTrial], encoding: Encoding, *, maximize: bool
) -> dict[int, float]:
    """By number, the finite values of complete trials, and the predicted ones of those that were stopped."""
    # SciPy takes a quarter of a second to import, which opening a study needs not wait for.
    from hpo.search.one_thread import one_thread
    from hpo.search.predicted_ends import predicted_ends
    from hpo.search.trial_curves import curves_of_trials

    complete = (trial for trial in trials if trial.state == TrialState.COMPLETE and _is_plain(trial))
    values = {trial.number: trial.value for trial in complete if trial.value is not None}
    known = curves_of_trials(study, trials, bounded=False)
    with one_thread():
        for curves in (known.curves, *known.earlier.values()):
            ends = predicted_ends(curves, encoding, known.horizon)
            values |= {number: -loss if maximize else loss for number, loss in ends.items()}
    return values


def _complete(trial: FrozenTrial, value: float) -> FrozenTrial:
    shown = copy.copy(trial)
    shown.state, shown.values = TrialState.COMPLETE, [value]
    shown.datetime_complete = trial.datetime_complete or trial.datetime_start
    return shown
