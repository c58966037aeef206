"""The audit of the pruner's decisions: which condemned trials run on, and how their ends change ``alpha``.

A trial is *condemned* by the first decision against it. It is a *survivor* if it is complete and was never
condemned. A share of the condemned trials, the *audited* ones, runs on to the end. They are drawn by the study's
seed and their numbers, independently of their curves, so their ends show how the pruned ones would have ended.

An audited trial was condemned *wrongly* if it ends better than the median survivor. A rule that knows nothing is
wrong half of the time, a rule that knows the end never. If each decision is wrong with the same unknown
probability, that probability has a Beta distribution (Bayes 1763, Phil. Trans. 53; the conjugate prior: Raiffa &
Schlaifer 1961, Applied Statistical Decision Theory). The prior is the rate of wrong decisions on the tasks that
the weights were fitted on. Two things follow from the distribution:

- ``alpha``. Where decisions are wrong more often than on those tasks, the model's probabilities are too low by
  about the same factor. So the odds of ``alpha`` are divided by the ratio of the odds of being wrong, now to then.
- The share. An audit is worth its cost in proportion to how large the error may still be: one standard deviation
  above the mean. Audits without an error lower the share about in inverse proportion to their number.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from optuna.trial import FrozenTrial

from hpo.storage.attributes import CONDEMNED_ATTR

# Beta prior, from the rate on the fitted tasks: the numbers of audited trials that were wrong, and right.
_WRONG, _RIGHT = 1.0, 9.0
# The odds of alpha change by at most this factor, so that a few audits can't make it prune everything, or nothing.
_FARTHEST: Final = 4.0


@dataclass(frozen=True)
class Force:
    """The values in force at a decision.

    Attributes:
        alpha: A trial continues while its probability is at least this.
        share: Share of the condemned trials that run on.
    """

    alpha: float
    share: float


def in_force(alpha: float, fraction: float, wrong: int, audited: int) -> Force:
    """The values in force after some audited trials have ended.

    Args:
        alpha: The ``alpha`` before any audited trial.
        fraction: The share before any audited trial; with 0 there is no audit, and nothing changes.
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
    """The Beta distribution's mean plus its standard deviation; at most 0.5, which is chance."""
    mean, count = _mean(wrong, audited), _WRONG + _RIGHT + audited
    return min(mean + math.sqrt(mean * (1 - mean) / (count + 1)), 0.5)


def _odds(probability: float) -> float:
    return probability / (1 - probability)


def is_drawn(seed: int | str, number: int, share: float) -> bool:
    """Whether a trial belongs to the share that runs on: the same answer in every process.

    A trial that belongs to a share also belongs to every larger share.
    """
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


@dataclass(frozen=True)
class Condemned:
    """The first decision against a trial, as it is stored with it.

    Attributes:
        epoch: The epoch after which it was made.
        probability: The pruner's probability that the trial ends among the best.
        alpha: The ``alpha`` in force.
        runs_on: Whether the trial runs on to its end as an audit; else it was pruned.
    """

    epoch: int
    probability: float
    alpha: float
    runs_on: bool

    def stored(self) -> dict[str, Any]:
        """The value of the trial's attribute."""
        return asdict(self)

    @classmethod
    def of(cls, trial: FrozenTrial) -> Self | None:
        """The decision stored with a trial; None where there is none."""
        kept: Mapping[str, Any] | None = trial.system_attrs.get(CONDEMNED_ATTR)
        return None if kept is None else cls(**kept)
