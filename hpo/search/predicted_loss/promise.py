"""The model behind `PredictedLossPruner`: the probability that a running trial ends among the best.

It weighs three things, none of which depends on the loss's unit:

- *standing*: the trial's rank at this step among the study's ended trials, as a normal score (Blom 1958,
  Statistical Estimates and Transformed Beta-Variables);
- *reach*: how far the trial must still fall to beat the best, compared with how far it may fall: by its own
  predicted final loss, by its latest fall, and by how far the study's complete trials fell from this step to
  their end. That last part covers the rest of a learning-rate schedule: where every trial falls far at the end, a
  gap in the middle means little;
- *the study*: how often the order of its complete trials at this step was their final order, how many of its
  trials learn at all, how many trials there are to beat, and whether its curves settle at their end, as they do
  where the learning rate decays; then late crossings are likely.

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
# A trial learns if it falls by more than a tenth of the fall at the ninth decile of the study's trials.
_LEARNS, _FASTEST = 0.1, 0.9
_STANDARD = NormalDist()
# More octaves of settling than this count as this many.
_SETTLED = 4.0


@dataclass(frozen=True)
class Weights:
    """The model's weights.

    Attributes:
        own_fall: Share of its latest fall that a trial may fall again.
        predicted_fall: Weight of the fall that its own curve predicts.
        predicted_std: Weight of the standard deviation of that prediction.
        like_best: Weight of the best trial's remaining fall from this step, times the trial's pace relative to it.
        like_others: Weight of the spread of remaining falls over the complete trials, times the same pace.
        others: Weight of that spread for any pace.
        gap: Weight of the distance between the best and the median trial at this step.
        still: Falls of less than this share of that distance say little about a trial's pace.
        usual_spread: Spread of the remaining falls before it is known, as a share of the best trial's fall.
        standing: Weight of the normal score.
        reach_fades: How much less reach counts at the first of 50 epochs (linear in ln(last step / this step)).
        crowd: Weight of the logarithm of the number of trials.
        early: Weight of the training that is still to come: ln(last step / this step).
        agreement: Weight of the agreement of this step's order with the final one.
        agreement_prior: Number of complete trials that the usual agreement stands for.
        learning: Weight of the share of trials that learn.
        settling: Weight of each octave by which complete trials were calmer at their end.
        settling_early: Further weight of such an octave, times (ln(last step / this step) - 1).
        forecast: Weight of the distance from the value to beat to the predicted one, in standard deviations.
        forecast_settles: How much less that distance weighs with each octave of settling: a single curve does not
            show the effect of the rest of a schedule.
        margin: The best value has to be beaten by this share of the distance between best and median trial.
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
        curve: The trial's values so far [reports], lower is better; the last one is the latest, and finite.
        prediction: Its predicted final value; None where there is none.
        among: The study's ended trials at this step.
        step: The step of the latest value, counted from 1.
        max_epochs: The last step of a trial that runs to its end.
        top_k: How many trials are "the best"; ``among.to_beat`` is the value of the last of them.

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
    """The weighted sum, which is greater for a more promising trial; arguments as of `promise`."""
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
    """Normal score of the trial's rank; trials that ended before this step rank behind it."""
    rank = float((among.values < now).sum() + 0.5 * (among.values == now).sum())
    return _STANDARD.inv_cdf((rank + 0.625) / (among.ended + 1.25))


def _gap(among: Population) -> float:
    """Distance from the best value at this step to the median one; 0 where most trials have diverged."""
    median = float(np.sort(among.values)[len(among.values) // 2]) if len(among.values) else math.inf
    return max(median - float(among.values.min()), 0.0) if math.isfinite(median) else 0.0


def _by_prediction(now: float, prediction: Prediction | None, weights: Weights) -> float:
    """How far the trial may fall according to its own curve."""
    if prediction is None:
        return 0.0
    return weights.predicted_fall * max(now - prediction.mean, 0.0) + weights.predicted_std * prediction.std


def _forecast(prediction: Prediction | None, among: Population) -> float:
    """How far the predicted value lies above the one to beat, in standard deviations, clipped to -2 … 6."""
    if prediction is None:
        return 0.0
    return min(max((prediction.mean - among.to_beat) / (prediction.std + _TINY), -2.0), 6.0)


def _by_others(fallen: float, gap: float, among: Population, weights: Weights) -> float:
    """How far the trial may fall according to the complete trials.

    The trial's pace relative to the best one's is estimated by a regression through the origin with prior mean 1:
    as long as both have moved no more than noise, the trial counts as moving like the best.
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
    """Share of trials that learn: that have fallen since half this step; drawn towards 2/3 while they are few."""
    if not len(among.falls):
        return 2 / 3
    fastest = float(np.sort(among.falls)[int(_FASTEST * len(among.falls))])
    if fastest <= 0:
        return 0.5
    return (float((among.falls > _LEARNS * fastest).sum()) + 2) / (len(among.falls) + 3)
