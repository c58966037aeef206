"""What a study's scheduler granted its trials: by kind, and trial by trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from optuna.trial import FrozenTrial

from hpo.storage.grants import grants_of
from hpo.storage.lineage import epochs_reached, inherited_epochs
from hpo.study.lineage import end_of_paused
from hpo.study.outcome import outcome_of
from hpo.wording import granted


@dataclass(frozen=True)
class Kind:
    """The grants of one kind.

    Attributes:
        kind: Its name in the scheduler.
        grants: How many there were.
        epochs: How many epochs were trained with them.
    """

    kind: str
    grants: int = 0
    epochs: int = 0

    def with_one(self, epochs: int) -> Self:
        """A copy with one more grant, with which so many epochs were trained."""
        return type(self)(self.kind, self.grants + 1, self.epochs + epochs)


def kinds(trials: Sequence[FrozenTrial]) -> list[Kind]:
    """The grants by kind, the kind with the most epochs first; empty without a scheduler."""
    found: dict[str, Kind] = {}
    for trial in trials:
        for kind, epochs in _trained(trial):
            found[kind] = found.get(kind, Kind(kind)).with_one(epochs)
    return sorted(found.values(), key=lambda each: (-each.epochs, each.kind))


def _trained(trial: FrozenTrial) -> Iterator[tuple[str, int]]:
    """Each grant's kind, and the epochs that were trained with it."""
    begins, last = inherited_epochs(trial), epochs_reached(trial)
    for grant in grants_of(trial):
        ends = last if grant["until"] is None else min(grant["until"], last)
        yield str(grant["why"].get("kind") or "unnamed"), max(0, ends - begins)
        begins = max(begins, ends)


def story(trial: FrozenTrial, fork: FrozenTrial | None = None) -> list[str]:
    """A trial's grants in words, in order, and how it ended; empty without a scheduler.

    Args:
        trial: The trial.
        fork: The fork that replaces it, if there is one.
    """
    said = [granted(grant["until"], grant["why"]) for grant in grants_of(trial)]
    return [*said, _became(trial, fork)] if said else []


def _became(trial: FrozenTrial, fork: FrozenTrial | None) -> str:
    if (why := end_of_paused(trial, fork)) is not None:
        return why
    outcome = outcome_of(trial).replace("_", " ")
    return outcome if trial.last_step is None else f"{outcome} at epoch {trial.last_step}"
