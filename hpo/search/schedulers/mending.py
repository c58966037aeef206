"""Bounds that training may mend: which of the trials outside of the bounds are still worth their epochs."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class Mending:
    """What a study's trials have shown of its bounds: whether training brings a trial nearer to them.

    A number of parameters stays as it is, and a trial that has too many is not trained on. An accuracy may be too
    low after the first epoch and high enough after the last: such a trial may resume, behind those within the
    bounds.
    """

    def __init__(self) -> None:
        self._nearer: dict[str, bool] = {}

    def learn(self, nearer: Mapping[str, bool]) -> None:
        """Take in whether a trial has come nearer to each bound than after its first epoch, if it has had more."""
        for bound, is_nearer in nearer.items():
            self._nearer[bound] = is_nearer or self._nearer.get(bound, False)

    def may_mend(self, bounds: Collection[str]) -> bool:
        """Whether training may bring a trial within the bounds that it violates; False where it violates none.

        A bound of which no trial has shown anything yet has the benefit of the doubt.
        """
        return bool(bounds) and all(self._nearer.get(bound, True) for bound in bounds)


def violated(violations: Mapping[str, float]) -> list[str]:
    """The bounds that are violated, of how far each one is: above 0."""
    return [bound for bound, far in violations.items() if far > 0]
