"""Finds out which bounds training may mend, and so which trials outside of the bounds are worth more epochs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from optuna.trial import FrozenTrial

from hpo.storage.attributes import NEARER_ATTR

#: Number of trials that must have come no nearer to a bound before training counts as not mending it: a
#: single trial may have diverged, or learn nothing.
_FEWEST: Final = 3


class Mending:
    """Learns from a study's trials to which bounds training brings a trial nearer.

    The number of a model's parameters never changes, so a trial that has too many does not resume. An accuracy
    may be too low after the first epoch and high enough after the last; a trial with such a violation may resume,
    after those within the bounds.
    """

    def __init__(self) -> None:
        self._shown: dict[str, dict[int, bool]] = {}

    def learn(self, trial: int, nearer: Mapping[str, bool]) -> None:
        """Add, for each bound, whether a trial has come nearer to it than after its first epoch."""
        for bound, is_nearer in nearer.items():
            self._shown.setdefault(bound, {})[trial] = is_nearer

    def lasting(self) -> set[str]:
        """The bounds that training does not mend: several trials have come no nearer to them, and none has."""
        return {bound for bound, shown in self._shown.items() if len(shown) >= _FEWEST and not any(shown.values())}


def lasting_bounds(trials: Iterable[FrozenTrial]) -> set[str]:
    """`Mending.lasting` for a study's trials."""
    mending = Mending()
    for trial in trials:
        mending.learn(trial.number, trial.system_attrs.get(NEARER_ATTR, {}))
    return mending.lasting()


def may_mend(bounds: Collection[str], lasting: Collection[str]) -> bool:
    """Whether training may bring a trial within the bounds that it violates; False where there are none."""
    return bool(bounds) and not any(bound in lasting for bound in bounds)


def violated(violations: Mapping[str, float]) -> list[str]:
    """The bounds that are violated: those whose violation is above 0."""
    return [bound for bound, far in violations.items() if far > 0]
