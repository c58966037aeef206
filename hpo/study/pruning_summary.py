"""Figures from the stored trials: what pruning saved, how often it was wrong, and how good predictions were."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from optuna.trial import FrozenTrial, TrialState

from hpo.search.by_name import known_class
from hpo.search.predicted_loss.audit import Condemned
from hpo.search.predicted_loss.pruner import PredictedLossPruner
from hpo.search.pruners import PRUNERS
from hpo.storage.attributes import PREDICTION_ATTR, SAME_AS_ATTR
from hpo.storage.lineage import epochs_reached, epochs_trained
from hpo.study.lineage import forks_by_replaced

#: Standard deviations from a normal distribution's mean to the ends of its middle 80 %.
MIDDLE_80: Final = statistics.NormalDist().inv_cdf(0.9)
#: Those to the ends of its middle 95 %.
_MIDDLE_95: Final = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class PruningSummary:
    """What pruning saved, and how often it was wrong according to the audit.

    An audited trial is one that the pruner decided against but that ran on, to measure the pruner's errors
    (`hpo.search.predicted_loss.audit`). It was *wrongly condemned* if it is complete and its value is among the
    best ``top_k`` of the study's complete trials: pruning it would have lost one of the best. A diverged trial is
    complete, and never among the best. Of a trial that failed or was pruned later, only the epochs count.

    Attributes:
        ended: Number of trials that have ended, in any way.
        pruned: How many of them were pruned.
        epochs_used: Epochs that all ended trials trained; a trial that took over a result trained none.
        horizon: Epochs of a trial that runs to its end; None where that is not known.
        epochs_saved: Sum over the pruned trials of the epochs from their end to the horizon; None without a
            horizon. It is an upper bound: some of these trials might have stopped early by themselves. A trial
            that took over the result of a pruned one saved nothing, nor did a trial whose place a fork took, since
            the fork trains these epochs.
        epochs_unpruned: Epochs used and saved together; None without a horizon.
        top_k: How many trials are "the best".
        audited: Number of audited trials that show whether the decision was right.
        wrongly_condemned: How many of them were wrongly condemned.
        false_prune_rate: Their share; None where no trial was audited.
        false_prune_interval: Lower and upper end of the rate's 95 % interval (`wilson_interval`); None likewise.
        audit_epochs: Epochs that ended trials trained because of the audit.
        alpha: The ``alpha`` in force at the decision against the trial with the highest number; None without one.
    """

    ended: int
    pruned: int
    epochs_used: int
    horizon: int | None
    epochs_saved: int | None
    epochs_unpruned: int | None
    top_k: int
    audited: int
    wrongly_condemned: int
    false_prune_rate: float | None
    false_prune_interval: tuple[float, float] | None
    audit_epochs: int
    alpha: float | None


def summarize_pruning(
    trials: Iterable[FrozenTrial], ranked: Sequence[FrozenTrial], *, horizon: int | None = None, top_k: int = 1
) -> PruningSummary:
    """What pruning saved in a study, with any pruner.

    Args:
        trials: All trials of the study.
        ranked: The complete trials with a finite value, the best first.
        horizon: Epochs of a trial that runs to its end; None: those of the longest complete trial.
        top_k: How many trials are "the best".
    """
    trials = list(trials)
    ended = [trial for trial in trials if trial.state.is_finished()]
    replaced = forks_by_replaced(trials)
    complete = [trial for trial in ended if trial.state == TrialState.COMPLETE]
    if horizon is None:
        horizon = max(map(epochs_reached, complete), default=0) or None
    pruned = [trial for trial in ended if trial.state == TrialState.PRUNED]
    used = sum(map(epochs_trained, ended))
    cut_short = [
        trial for trial in pruned if SAME_AS_ATTR not in trial.user_attrs and trial.number not in replaced
    ]
    saved = None if horizon is None else sum(max(0, horizon - epochs_reached(trial)) for trial in cut_short)
    condemned = {trial.number: decision for trial in ended if (decision := Condemned.of(trial)) is not None}
    audits = {number: decision.epoch for number, decision in condemned.items() if decision.runs_on}
    judged = [trial.number for trial in complete if trial.number in audits]
    wrong = len({trial.number for trial in ranked[:top_k]}.intersection(judged))
    return PruningSummary(
        ended=len(ended),
        pruned=len(pruned),
        epochs_used=used,
        horizon=horizon,
        epochs_saved=saved,
        epochs_unpruned=None if saved is None else used + saved,
        top_k=top_k,
        audited=len(judged),
        wrongly_condemned=wrong,
        false_prune_rate=wrong / len(judged) if judged else None,
        false_prune_interval=wilson_interval(wrong, len(judged)) if judged else None,
        audit_epochs=sum(
            max(0, epochs_reached(trial) - audits[trial.number]) for trial in ended if trial.number in audits
        ),
        alpha=condemned[max(condemned)].alpha if condemned else None,
    )


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """The score interval of a proportion, which contains the true one in 95 % of the cases.

    Wilson 1927, Journal of the American Statistical Association 22, pages 209 to 212. It is valid for few trials,
    and for shares of 0 and 1, where an interval of some standard errors around the share would have no width.

    Args:
        successes: Number of successes.
        trials: Number of trials, at least 1.
    """
    share, weight = successes / trials, _MIDDLE_95 * _MIDDLE_95 / trials
    middle = share + weight / 2
    half = math.sqrt(weight * (share * (1 - share) + weight / 4))
    return max(0.0, (middle - half) / (1 + weight)), min(1.0, (middle + half) / (1 + weight))


def best_count(name: str, arguments: Mapping[str, Any]) -> int:
    """How many trials are "the best" to the pruner of a study file, also to one inside ``patient``.

    Args:
        name: The pruner's name.
        arguments: Its arguments.

    Returns:
        ``top_k`` of `PredictedLossPruner`; 1 where it is not given, and for any other pruner.
    """
    wrapped = arguments.get("wrapped_pruner")
    if isinstance(wrapped, Mapping):
        return best_count(str(wrapped.get("name")), {key: wrapped[key] for key in wrapped if key != "name"})
    return int(arguments.get("top_k", 1)) if known_class(name, PRUNERS) is PredictedLossPruner else 1


@dataclass(frozen=True)
class ComparedPrediction:
    """A trial's first prediction, and the loss that it predicted.

    Attributes:
        trial: The trial's number.
        epoch: The epoch after which it was made.
        predicted: The predicted final loss.
        std: Its standard deviation; 0 where none was stored.
        actual: The loss the trial ended with.
    """

    trial: int
    epoch: int
    predicted: float
    std: float
    actual: float

    @property
    def inside(self) -> bool:
        """Whether the loss lies in the prediction's 80 % interval."""
        return abs(self.actual - self.predicted) <= MIDDLE_80 * self.std


@dataclass(frozen=True)
class PredictionSummary:
    """How good the first predictions were, of the trials that ran to their end.

    Attributes:
        compared: Number of predictions.
        mean_absolute_error: Mean distance from the trial's final loss; None without predictions.
        inside_80: Share of final losses within the prediction's 80 % interval, 1.28 standard deviations to either
            side; None without predictions. About 0.8 if the standard deviations are right.
    """

    compared: int
    mean_absolute_error: float | None
    inside_80: float | None


def compared_predictions(trials: Iterable[FrozenTrial]) -> list[ComparedPrediction]:
    """The first predictions of the trials that ran to their end, where prediction and loss are finite."""
    stored = ((trial.number, trial.user_attrs.get(PREDICTION_ATTR) or {}) for trial in trials)
    return [
        ComparedPrediction(
            number, kept["epoch"], kept["predicted_final_loss"], kept["std"] or 0.0, kept["final_loss"]
        )
        for number, kept in stored
        if kept.get("predicted_final_loss") is not None and kept.get("final_loss") is not None
    ]


def summarize_predictions(compared: Sequence[ComparedPrediction]) -> PredictionSummary:
    """How good these predictions were."""
    if not compared:
        return PredictionSummary(0, None, None)
    return PredictionSummary(
        compared=len(compared),
        mean_absolute_error=statistics.fmean(abs(each.predicted - each.actual) for each in compared),
        inside_80=statistics.fmean(each.inside for each in compared),
    )
