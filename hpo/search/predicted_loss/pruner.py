"""PredictedLossPruner: stops a trial that is not likely to end among the best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from optuna.pruners import BasePruner
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.search.predicted_loss.audit import Condemned, Force, in_force, is_drawn
from hpo.search.predicted_loss.curves import Array, EndedCurves
from hpo.search.predicted_loss.promise import promise
from hpo.storage.attributes import CONDEMNED_ATTR, MAX_EPOCHS_ATTR
from hpo.storage.optuna_private import id_of_study, id_of_trial, storage_of
from trainer.prediction.final_loss import Prediction, predict_final_loss

if TYPE_CHECKING:
    import optuna


_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)
_KEPT_PREDICTIONS = 4096
# Running trials to compare with, at least, while no trial is complete.
_FEW = 3


class PredictedLossPruner(BasePruner):
    """Prunes a trial whose probability of ending among the best has fallen below ``alpha``.

    The probability comes from the trial's rank, its predicted final loss, and how the study's ended trials
    developed after the same epoch; see `hpo.search.predicted_loss.promise`. It is computed at every epoch from the
    second on, unless all trials have the same value there. A trial whose value is not finite is pruned
    immediately. All data come from the storage, so all workers decide alike, also after restarts; the caches only
    save time.

    Steps are epochs, counted from 1. If trials do not report every epoch, a value counts until the next one.

    Example::

        study = optuna.create_study(pruner=PredictedLossPruner(max_epochs=50))

        study: {pruner: {name: predicted_loss, alpha: 0.02}}

    Args:
        max_epochs: The last step of a trial that trains to its end. Default: the number that `hpo run` stored in
            the study, else the last step of the longest complete trial; before there is one, nothing is pruned.
        alpha: A trial continues while its probability is at least this, until audited trials say that it should
            be more or less (see `hpo.search.predicted_loss.audit`); 0 prunes diverged trials only.
        top_k: How many trials are "the best".
        n_startup_trials: Number of complete trials before the first decision; if the last step is known
            beforehand, running trials that have come as far count, too. This many trials with the lowest numbers
            are never pruned by a decision.
        n_warmup_epochs: No trial is pruned up to this epoch.
        min_epochs: Number of reports of a trial before its first decision; at least two are always needed.
        audit_fraction: Share of the trials to be pruned that run on to their end instead, to measure how often
            pruning is wrong; it falls with audits that find no error, and rises where they find many. 0: no
            audit, and ``alpha`` stays. The first decision against a trial is stored with it as ``hpo:condemned``.
        seed: With the trial's number it decides which trials run on; the study's name where it is left out.
            `hpo run` gives the study's seed.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        max_epochs: int | None = None,
        alpha: float = 0.055,
        top_k: int = 1,
        n_startup_trials: int = 1,
        n_warmup_epochs: int = 0,
        min_epochs: int = 1,
        audit_fraction: float = 0.0,
        seed: int | None = None,
    ) -> None:
        _check("max_epochs", max_epochs, max_epochs is None or max_epochs >= 1, "at least 1")
        _check("alpha", alpha, 0 <= alpha < 1, "at least 0 and below 1")
        _check("top_k", top_k, top_k >= 1, "at least 1")
        _check("n_startup_trials", n_startup_trials, n_startup_trials >= 0, "at least 0")
        _check("n_warmup_epochs", n_warmup_epochs, n_warmup_epochs >= 0, "at least 0")
        _check("min_epochs", min_epochs, min_epochs >= 1, "at least 1")
        _check("audit_fraction", audit_fraction, 0 <= audit_fraction <= 1, "between 0 and 1")
        self._max_epochs = max_epochs
        self._alpha = alpha
        self._top_k = top_k
        self._n_startup_trials = n_startup_trials
        self._n_warmup_epochs = n_warmup_epochs
        self._min_epochs = min_epochs
        self._audit_fraction = audit_fraction
        self._seed = seed
        self._memo = _Memo()

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether the trial should end after its latest report; see `optuna.pruners.BasePruner`."""
        step = trial.last_step
        if step is None:
            return False
        if not math.isfinite(trial.intermediate_values[step]):
            return True
        if step < 1 or step <= self._n_warmup_epochs or len(trial.intermediate_values) < self._min_epochs:
            return False
        judged = self._judge(study, trial)
        if judged is None:
            return False
        probability, ended = judged
        force = self._in_force(ended)
        return probability < force.alpha and self._condemns(study, trial, step, probability, force)

    def force(self, study: optuna.Study) -> Force:
        """The ``alpha`` and the share of audited trials that are in force in a study."""
        return self._in_force(self._memo.ended(study))

    def _in_force(self, ended: EndedCurves) -> Force:
        return in_force(self._alpha, self._audit_fraction, *ended.audit())

    def probability(self, study: optuna.Study, trial: FrozenTrial) -> float | None:
        """The probability that a trial ends among the best, from what it has reported so far.

        Returns:
            A number in 0..1, 0 where its latest value is not finite; None as long as nothing can be said: the
            study has too few complete trials, no last step is known, or the trial is at it, or it has one report
            only, which does not show how it moves; or all trials had the same value at this step.
        """
        judged = self._judge(study, trial)
        return None if judged is None else judged[0]

    def _judge(self, study: optuna.Study, trial: FrozenTrial) -> tuple[float, EndedCurves] | None:
        """The probability, and the study's ended trials; None as in `probability`."""
        step = trial.last_step
        if step is None or step < 1 or len(trial.intermediate_values) < 2 or trial.number < self._n_startup_trials:
            return None
        ended = known = self._memo.ended(study)
        written = self._max_epochs or self._memo.written(study, len(ended))
        horizon = written or ended.longest
        if step >= horizon:
            return None
        if ended.complete < max(self._n_startup_trials, 1):
            if written is None:
                return None
            ended = self._with_running(study, trial, ended, horizon)
            if ended.complete < max(self._n_startup_trials, _FEW):
                return None
        curve = _curve(trial, ended.sign)
        if not math.isfinite(curve[-1]):
            return 0.0, known
        among = ended.at(step, self._top_k)
        # Such as an accuracy that is still at chance level in all trials.
        if len(among.values) and (among.values == curve[-1]).all():
            return None
        prediction = self._memo.prediction(curve, step, horizon)
        return promise(curve, prediction, among, step, horizon, top_k=self._top_k), known

    def _with_running(
        self, study: optuna.Study, trial: FrozenTrial, ended: EndedCurves, horizon: int
    ) -> EndedCurves:
        """The ended trials, and the running ones that have come at least as far, with predicted final values.

        So before any trial is complete, a prediction is compared with predictions.
        """
        both = ended.copy()
        for other in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            last = other.last_step
            if other.number == trial.number or last is None or last < (trial.last_step or 0):
                continue
            curve = _curve(other, both.sign)
            prediction = self._memo.prediction(curve, last, horizon)
            if math.isfinite(curve[-1]) and prediction is not None:
                both.add(other.intermediate_values, both.sign * prediction.mean)
        return both

    def _condemns(
        self, study: optuna.Study, trial: FrozenTrial, step: int, probability: float, force: Force
    ) -> bool:
        """Store the decision against a trial, unless it already runs on as an audit; True where it is pruned."""
        earlier = Condemned.of(trial)  # costs a query, so it is read only here and not at each epoch
        if earlier is not None and earlier.runs_on:
            return False
        seed = study.study_name if self._seed is None else self._seed
        runs_on = is_drawn(seed, trial.number, force.share)
        decision = Condemned(step, probability, force.alpha, runs_on)
        storage_of(study).set_trial_system_attr(id_of_trial(trial), CONDEMNED_ATTR, decision.stored())
        return not runs_on


class _Memo:
    """Caches what has been read and fitted. All of it can be computed again, so pickling leaves it out."""

    def __init__(self) -> None:
        self._studies: WeakKeyDictionary[BaseStorage, dict[int, _Study]] = WeakKeyDictionary()
        self._predictions: dict[tuple[bytes, int], Prediction | None] = {}

    def __reduce__(self) -> tuple[type[_Memo], tuple[()]]:
        return _Memo, ()

    def ended(self, study: optuna.Study) -> EndedCurves:
        """The curves of the study's complete and pruned trials."""
        known = self._of(study)
        trials = study.get_trials(deepcopy=False, states=_ENDED)
        if not known.curves.update(trials):
            known.curves = EndedCurves(known.curves.sign)
            known.curves.update(trials)
        return known.curves

    def written(self, study: optuna.Study, ended: int) -> int | None:
        """The last step that `hpo run` has written; looked up again after a trial has ended, not at each epoch."""
        known = self._of(study)
        if known.looked_at != ended:
            known.looked_at, known.max_epochs = ended, study.user_attrs.get(MAX_EPOCHS_ATTR)
        return known.max_epochs

    def prediction(self, curve: Array, step: int, horizon: int) -> Prediction | None:
        """The predicted final value; a fit is kept for the next call with the same curve and length."""
        reports = max(len(curve), round(horizon * len(curve) / step))
        key = (curve.tobytes(), reports)
        if key not in self._predictions:
            if len(self._predictions) >= _KEPT_PREDICTIONS:
                self._predictions.clear()
            self._predictions[key] = predict_final_loss(curve, reports, min_epochs=1)
        return self._predictions[key]

    def _of(self, study: optuna.Study) -> _Study:
        studies, key = self._studies.setdefault(storage_of(study), {}), id_of_study(study)
        if key not in studies:
            studies[key] = _Study(EndedCurves(_sign(study)))
        return studies[key]


@dataclass
class _Study:
    """What is cached of a study."""

    curves: EndedCurves
    looked_at: int = -1
    max_epochs: int | None = None


def _sign(study: optuna.Study) -> int:
    return 1 if study.direction == StudyDirection.MINIMIZE else -1


def _curve(trial: FrozenTrial, sign: int) -> Array:
    values = sign * np.array([trial.intermediate_values[step] for step in sorted(trial.intermediate_values)])
    values[~np.isfinite(values)] = np.inf
    return values


def _check(name: str, value: Any, holds: bool, range_: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {range_}, but is {value!r}")
