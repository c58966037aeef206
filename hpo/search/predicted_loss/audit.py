"""The audit of the pruner's decisions: which condemned trials run on, and what their ends say about ``alpha``.

A trial is *condemned* by the first decision against it, a *survivor* if it is complete and never was. A share of
the condemned trials runs on to the end. The share is drawn by the study's seed and the trial's number, and so says
nothing of how the trial looks: what becomes of these says what would have become of the others.

An audited trial counts as *wrong* if it ends better than the median survivor. A rule that knows nothing would be
wrong half of the time, one that knows the end never. As it may be wrong at each trial with one unknown
probability, that has a Beta distribution (Bayes 1763, Phil. Trans. 53; the conjugate prior: Raiffa & Schlaifer
1961, Applied Statistical Decision Theory), with the rate on the tasks that the weights were fitted on as its
prior. Two things follow from it:

- ``alpha``. Where condemned trials turn out well more often than they did on those tasks, the probability that the
  model gives is too low, by about as much: the odds of ``alpha`` are divided by the ratio of the odds of being
  wrong, now to then.
- The share. It is worth an audit's price in proportion to how large the error may still be: one standard
  deviation above the mean. Audits without an error lower it, about in inverse proportion to their number.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from optuna.trial import FrozenTrial

from hpo.storage.attributes import CONDEMNED_ATTR

# Beta prior: audited trials that were wrong and right, as many as the rate on the fitted tasks is taken for.
_WRONG, _RIGHT = 1.0, 9.0
# The odds of alpha change by at most this factor: few audits are no reason to prune everything, or nothing.
_FARTHEST: Final = 4.0


@dataclass(frozen=True)
class Force:
    """What is in force at a decision.

    Attributes:
        alpha: A trial continues while its probability is at least this.
        share: Share of the condemned trials that run on.
    """

    alpha: float
    share: float


def in_force(alpha: float, fraction: float, wrong: int, audited: int) -> Force:
    """What follows from an audit.

    Args:
        alpha: What is in force without any audited trial.
        fraction: The share likewise; with 0 there is no audit, and nothing changes.
        wrong: Audited trials that ended better than the median survivor.
        audited: Audited trials that ended.
    """
    if not fraction or not audited:
        return Force(alpha, fraction)
    ratio = _odds(_mean(wrong, audited)) / _odds(_mean(0, 0))
    odds = _odds(alpha) / min(max(ratio, 1 / _FARTHEST), _FARTHEST)
    return Force(odds / (1 + odds), min(1.0, fraction * _highest(wrong, audited) / _highest(0, 0)))


def _mean(wrong: int, audited: int) -> float:
    return (_WRONG + wrong) / (_WRONG + _RIGHT + audited)


def _highest(wrong: int, audited: int) -> float:
    """The mean of the Beta distribution and its standard deviation; chance at most."""
    mean, count = _mean(wrong, audited), _WRONG + _RIGHT + audited
    return min(mean + math.sqrt(mean * (1 - mean) / (count + 1)), 0.5)


def _odds(probability: float) -> float:
    return probability / (1 - probability)


def is_drawn(seed: int | str, number: int, share: float) -> bool:
    """Whether a trial belongs to the share that runs on; the same in every process.

    One that belongs to a share belongs to every larger one.
    """
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


@dataclass(frozen=True)
class Condemned:
    """The first decision against a trial, as it is stored with it.

    Attributes:
        epoch: At whose end.
        probability: That it ends among the best, as the pruner saw it.
        alpha: What was in force.
        runs_on: It runs on to its end, to measure; else it was pruned.
    """

    epoch: int
    probability: float
    alpha: float
    runs_on: bool

    def stored(self) -> dict[str, Any]:
        """As the value of an attribute."""
        return asdict(self)

    @classmethod
    def of(cls, trial: FrozenTrial) -> Self | None:
        """A trial's; None where there was no decision against it."""
        kept: Mapping[str, Any] | None = trial.system_attrs.get(CONDEMNED_ATTR)
        return None if kept is None else cls(**kept)
