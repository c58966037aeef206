"""Bounds that training may mend: which of the trials outside of the bounds are still worth their epochs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from optuna.trial import FrozenTrial

from hpo.storage.attributes import NEARER_ATTR

#: Trials that have come no nearer to a bound, at least, before it counts as one that training does not mend: one
#: alone may have diverged, or learn nothing.
_FEWEST: Final = 3


class Mending:
    """What a study's trials have shown of its bounds: whether training brings a trial nearer to them.

    A number of parameters stays as it is, and a trial that has too many is not trained on. An accuracy may be too
    low after the first epoch and high enough after the last: such a trial may resume, behind those within the
    bounds.
    """

    def __init__(self) -> None:
        self._shown: dict[str, dict[int, bool]] = {}

    def learn(self, trial: int, nearer: Mapping[str, bool]) -> None:
        """Take in whether a trial has come nearer to each bound than after its first epoch, if it has had more."""
        for bound, is_nearer in nearer.items():
            self._shown.setdefault(bound, {})[trial] = is_nearer

    def lasting(self) -> set[str]:
        """The bounds to which several trials have come no nearer, and none has: who violates one stays outside."""
        return {bound for bound, shown in self._shown.items() if len(shown) >= _FEWEST and not any(shown.values())}


def lasting_bounds(trials: Iterable[FrozenTrial]) -> set[str]:
    """`Mending.lasting` of a study's trials."""
    mending = Mending()
    for trial in trials:
        mending.learn(trial.number, trial.system_attrs.get(NEARER_ATTR, {}))
    return mending.lasting()


def may_mend(bounds: Collection[str], lasting: Collection[str]) -> bool:
    """Whether training may bring a trial within the bounds that it violates; False where it violates none."""
    return bool(bounds) and not any(bound in lasting for bound in bounds)


def violated(violations: Mapping[str, float]) -> list[str]:
    """The bounds that are violated, of how far each one is: above 0."""
    return [bound for bound, far in violations.items() if far > 0]
