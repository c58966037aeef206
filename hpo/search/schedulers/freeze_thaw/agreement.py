"""Measures in a study how well early ranks agree with late ones, and how often the model's trials win.

A trial that continued because it ranked well says nothing about those that did not. So agreement is measured only
on epochs that a trial was granted without regard to its values: up to the rung of the first trials, and in grants
of the kind ``"whole"``, which trials that the model has not proposed get in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hpo.search.schedulers.seen import Curve

#: Kinds of grants that do not depend on a trial's values; a person chose the "enqueued" ones.
_UNJUDGED: Final = frozenset({"initial", "breadth", "whole"})
#: The first trials pause at the last rung that is at most `_BASE` epochs, or at most this share of the horizon.
_BASE: Final = 3
_OF_HORIZON: Final = 1 / 16
#: A rung's agreement with the next one before it is measured, below the base rung and from it on; it counts as
#: much as `_WEIGHT` trials.
_EXPECTED: Final = (0.5, 0.9)
_WEIGHT: Final = 3.0
#: Minimum number of trials to measure agreement with.
_FEWEST: Final = 3
#: How often the model's trials are expected to win before it is measured, and how many of them that counts as.
_WINS: Final = 0.75
_WINS_WEIGHT: Final = 6.0
#: Number of latest trials of each kind that are compared.
_LATEST: Final = 30


def base_rung(rungs: Sequence[int], switch: float) -> int:
    """The base rung, at which the first trials pause, so that all of them can be compared there.

    Args:
        rungs: The rungs, ascending.
        switch: Epochs that could be trained in the time that a trial takes to start; a trial should train about as
            long as that.
    """
    within = max(_BASE, _OF_HORIZON * rungs[-1], switch)
    return max((rung for rung in rungs if rung <= within), default=rungs[0])


def is_even(curve: Curve) -> bool:
    """Whether a trial is at an even point: one that was drawn evenly, and not proposed by the model."""
    return bool(curve.seen.kinds) and curve.seen.kinds[0] in _UNJUDGED


def unjudged(curve: Curve, base: int) -> int:
    """The epoch up to which a trial's grants did not depend on its values; 0 for one not at an even point."""
    if not is_even(curve):
        return 0
    if curve.seen.all_kinds <= _UNJUDGED:
        return curve.done
    return min(base, curve.done) if curve.seen.kinds[0] == "initial" else 0


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation; ties share their mean rank, and it is 0 where a side is constant."""
    ranks = [_ranks(np.array(values)) for values in (one, other)]
    first, second = (each - each.mean() for each in ranks)
    norm = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / norm if norm else 0.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middles: NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return middles[inverse]


def agreements(curves: Sequence[Curve], rungs: Sequence[int], base: int) -> dict[int, float]:
    """Each rung's rank correlation with the next one, drawn towards the usual value while trials are few."""
    found = {}
    reach = [(curve, unjudged(curve, base)) for curve in curves if curve.steps]
    for early, late in pairwise(rungs):
        reach = [(curve, epoch) for curve, epoch in reach if epoch >= late]  # fewer at each rung
        both = [curve for curve, _ in reach if curve.steps[0] <= early]
        count = len(both) if len(both) >= _FEWEST else 0
        total = _WEIGHT * _EXPECTED[early >= base]
        if count:
            total += count * rank_correlation(*([curve.at(epoch) for curve in both] for epoch in (early, late)))
        found[early] = total / (_WEIGHT + count)
    return found


def to_the_end(agreement: Mapping[int, float], rung: int) -> float:
    """How well a rung's ranks agree with those at the last rung: the product of the agreements up to there."""
    return math.prod(max(value, 0.0) for early, value in agreement.items() if early >= rung)


def first_rung(agreement: Mapping[int, float], rungs: Sequence[int], trials: Callable[[int], float]) -> int:
    """The rung at which new trials pause first: the one that makes the expected lead at the end largest.

    In the same time, ``trials(rung)`` trials can reach a rung. At the end, the best of them is expected to lead by
    E[maximum of that many standard normal values] · agreement, in standard deviations.
    """
    return max(rungs[:-1] or rungs, key=lambda rung: _expected_best(trials(rung)) * to_the_end(agreement, rung))


def among_promoted(curves: Sequence[Curve], early: int, late: int) -> float:
    """How well a rung's ranks agree with the next one's, among trials chosen by their values: a lower bound.

    Where curves cross late, ranks may agree well among all trials, and yet the next rung's best may have had any
    rank among the promoted ones. The bound is the rank correlation of the n trials less its standard error,
    1 / √(n - 1), and at least 0.
    """
    there = [curve for curve in curves if curve.done >= late and curve.steps and curve.steps[0] <= early]
    both = [curve for curve in there if not curve.seen.all_kinds <= _UNJUDGED]
    if len(both) < _FEWEST:
        return 0.0
    found = rank_correlation(*([curve.at(epoch) for curve in both] for epoch in (early, late)))
    return max(found - 1 / math.sqrt(len(both) - 1), 0.0)


def _expected_best(count: float) -> float:
    """Expected maximum of ``count`` standard normal values (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def wins(curves: Sequence[Curve]) -> float:
    """How often a trial that the model proposed is ahead of one at an even point, after equally many epochs.

    A half means that the model's proposals are no better than chance. Drawn towards the usual value while the
    model has proposed few.
    """
    latest = [curve for curve in reversed(curves) if curve.steps and curve.seen.kinds]
    model = list(islice((curve for curve in latest if curve.seen.kinds[0] == "model"), _LATEST))[::-1]
    even = list(islice(filter(is_even, latest), _LATEST))[::-1]
    if not model or not even:
        return _WINS
    won = [_ahead(one, other) for one in model for other in even]
    return (_WINS_WEIGHT * _WINS + len(model) * sum(won) / len(won)) / (_WINS_WEIGHT + len(model))


def _ahead(one: Curve, other: Curve) -> float:
    epoch = min(one.done, other.done)
    ours, theirs = one.at(epoch), other.at(epoch)
    return 0.5 if ours == theirs else float(ours < theirs)
