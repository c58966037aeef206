"""How likely a running trial is to end among the best: the model behind `PredictedLossPruner`.

Three things are weighed against each other, each free of the loss's unit:

- *standing*: the trial's rank at this step among all trials of the study, as a normal score (Blom 1958,
  Statistical Estimates and Transformed Beta-Variables);
- *reach*: how far it has still to fall to beat the best, against how far it may fall: by its own predicted final
  loss, by what it fell of late, and by what the study's complete trials fell from this step to their end. That
  last part is how the rest of a learning-rate schedule is known: where every trial falls far at the end, a gap
  in the middle means little;
- *the study*: how often the order at this step was the final order for its complete trials, how many of its
  trials are learning at all, how many there are to be better than, and whether its curves settle at their end as
  they do where the learning rate decays, for then late crossings are to be expected.

A logistic model turns the weighted sum into a probability. Its weights were fitted on learning curves of many
tasks (`benchmarks/fit_promise.py` starts from them); nothing is fitted within a study.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from hpo.search.predicted_loss.curves import USUAL_AGREEMENT, Array, Population, fall
from trainer.prediction.final_loss import Prediction

_TINY = sys.float_info.min
# A trial learns if it falls by a tenth of what the study's fastest (the ninth decile) do.
_LEARNS, _FASTEST = 0.1, 0.9
_STANDARD = NormalDist()
# Octaves of settling after which it says nothing more.
_SETTLED = 4.0


@dataclass(frozen=True)
class Weights:
    """What the model weighs by.

    Attributes:
        own_fall: Share of its latest fall that a trial may fall again.
        predicted_fall: Weight of the fall that its own curve predicts.
        predicted_std: Weight of the standard deviation of that prediction.
        like_best: Weight of the fall that the best trial still had before it, for a trial that moves as that did.
        like_others: Weight of the spread of such falls over the complete trials, for a trial that moves.
        others: The same for any trial.
        gap: Weight of the distance between the best and the median trial at this step.
        still: A trial that moves less than this share of that distance is no evidence of its pace.
        usual_spread: Spread of the falls before it is known, as a share of the best trial's.
        standing: Weight of the normal score.
        reach_fades: How much less reach counts, at the first of 50 epochs (linear in the log of what is to come).
        crowd: Weight of the number of trials, as a logarithm.
        early: Weight of what is still to come, as the logarithm of end over now.
        agreement: Weight of the agreement of this step's order with the final one.
        agreement_prior: Number of complete trials that the usual agreement stands for.
        learning: Weight of the share of trials that learn.
        settling: Weight of each octave by which complete trials were calmer at their end.
        settling_early: The same once more, times how much earlier it is than a third of the run (as `early`).
        forecast: Weight of the distance from the value to beat to the predicted one, in standard deviations.
        forecast_settles: How much less that weighs with each octave of settling: a single curve does not know what
            the rest of a schedule brings.
        margin: By this share of the distance between best and median trial the best is to be beaten.
        offset: Score of an average trial.
        slope: Log-odds per unit of score.
        base: Log-odds at a score of 0.
    """

    own_fall: float
    predicted_fall: float
    predicted_std: float
    like_best: float
    like_others: float
    others: float
    gap: float
    still: float
    usual_spread: float
    standing: float
    reach_fades: float
    crowd: float
    early: float
    agreement: float
    agreement_prior: float
    learning: float
    settling: float
    settling_early: float
    forecast: float
    forecast_settles: float
    margin: float
    offset: float
    slope: float
    base: float


FITTED: Final = Weights(
    own_fall=0.214,
    predicted_fall=0.3336,
    predicted_std=0.0015,
    like_best=2.773,
    like_others=1.206,
    others=1.325,
    gap=0.0695,
    still=0.205,
    usual_spread=4.157,
    standing=3.538,
    reach_fades=0.8969,
    crowd=0.398,
    early=0.1472,
    agreement=6.341,
    agreement_prior=3.208,
    learning=0.2218,
    settling=0.2774,
    settling_early=-0.1,
    forecast=0.3453,
    forecast_settles=0.2598,
    margin=0.0221,
    offset=-1.671,
    slope=0.682,
    base=-2.835,
)


def promise(
    curve: Array,
    prediction: Prediction | None,
    among: Population,
    step: int,
    max_epochs: int,
    *,
    top_k: int = 1,
) -> float:
    """The probability that a trial ends among the best of its study.

    Args:
        curve: Its values so far, lower is better, the latest last and finite; [reports].
        prediction: Its predicted final value; None where there is none.
        among: The study's ended trials at this step.
        step: The latest value's step, from 1.
        max_epochs: The last step of a trial that runs to its end.
        top_k: How many are "the best", of whom ``among.to_beat`` is the last.

    Returns:
        A number in 0..1.
    """
    evidence = score(curve, prediction, among, step, max_epochs, FITTED, top_k)
    # The logistic function; as tanh it does not overflow.
    return 0.5 + 0.5 * math.tanh(0.5 * (FITTED.base + FITTED.slope * evidence))


def score(
    curve: Array,
    prediction: Prediction | None,
    among: Population,
    step: int,
    max_epochs: int,
    weights: Weights,
    top_k: int = 1,
) -> float:
    """The weighted sum; greater for a trial of more promise. See `promise`."""
    now = float(curve[-1])
    fallen = float(fall(curve[max(0, len(curve) // 2 - 1)], now)) if len(curve) > 1 else 0.0
    gap = _gap(among)
    may_fall = (
        weights.own_fall * max(fallen, 0.0)
        + _by_prediction(now, prediction, weights)
        + _by_others(fallen, gap, among, weights)
        + weights.gap * gap
    )
    reach = math.asinh((now - among.to_beat + weights.margin * gap) / (may_fall + _TINY))
    to_come = math.log(max_epochs / step)
    settled = min(max(among.settling, 0.0), _SETTLED)
    fading = 1 - weights.reach_fades * to_come / math.log(50)
    return (
        weights.offset
        - weights.standing * _standing(now, among)
        - fading * reach
        - weights.crowd * math.log((among.ended + 1) / top_k)
        + weights.early * to_come
        - weights.agreement * _agreement_beyond_usual(among, weights)
        + weights.learning * _share_learning(among)
        + (weights.settling + weights.settling_early * (to_come - 1)) * settled
        - weights.forecast * max(1 - weights.forecast_settles * settled, 0.0) * _forecast(prediction, among)
    )


def _standing(now: float, among: Population) -> float:
    """Normal score of the rank; trials that ended before this step rank behind."""
    rank = float((among.values < now).sum() + 0.5 * (among.values == now).sum())
    return _STANDARD.inv_cdf((rank + 0.625) / (among.ended + 1.25))


def _gap(among: Population) -> float:
    """From the best value at this step to the median one; 0 where most have diverged."""
    median = float(np.sort(among.values)[len(among.values) // 2]) if len(among.values) else math.inf
    return max(median - float(among.values.min()), 0.0) if math.isfinite(median) else 0.0


def _by_prediction(now: float, prediction: Prediction | None, weights: Weights) -> float:
    """How far its own curve says it may fall."""
    if prediction is None:
        return 0.0
    return weights.predicted_fall * max(now - prediction.mean, 0.0) + weights.predicted_std * prediction.std


def _forecast(prediction: Prediction | None, among: Population) -> float:
    """How far the predicted value lies above the one to beat, in standard deviations, cut far out."""
    if prediction is None:
        return 0.0
    return min(max((prediction.mean - among.to_beat) / (prediction.std + _TINY), -2.0), 6.0)


def _by_others(fallen: float, gap: float, among: Population, weights: Weights) -> float:
    """How far the complete trials say it may fall.

    A trial's pace against the best one's is the estimate of a regression through the origin whose prior mean is 1:
    before the two have moved apart from noise, it is taken to be like the best.
    """
    farthest = float(np.abs(among.drops).max(initial=0.0))
    largest = max(abs(fallen), gap, abs(among.best_fall), among.best_drop, farthest)
    unit = math.ldexp(1.0, math.frexp(largest)[1] - 1)  # no square overflows, and a power of two rounds nothing
    drops, best_drop, best_fall = among.drops / unit, among.best_drop / unit, among.best_fall / unit
    usual = (weights.usual_spread * best_drop) ** 2
    deviations = drops - drops.mean() if len(drops) else drops
    spread = math.sqrt((float((deviations**2).sum()) + 2 * usual) / (len(drops) + 1))
    noise = (weights.still * gap / unit) ** 2 + _TINY
    pace = min(max((fallen / unit * best_fall + noise) / (best_fall**2 + noise), 0.0), 2.0)
    return unit * (pace * (weights.like_best * best_drop + weights.like_others * spread) + weights.others * spread)


def _agreement_beyond_usual(among: Population, weights: Weights) -> float:
    prior = weights.agreement_prior
    return (among.agreement - USUAL_AGREEMENT) * among.compared / (among.compared + prior)


def _share_learning(among: Population) -> float:
    """Share of trials that have moved since half this step, drawn towards two thirds while there are few."""
    if not len(among.falls):
        return 2 / 3
    fastest = float(np.sort(among.falls)[int(_FASTEST * len(among.falls))])
    if fastest <= 0:
        return 0.5
    return (float((among.falls > _LEARNS * fastest).sum()) + 2) / (len(among.falls) + 3)
