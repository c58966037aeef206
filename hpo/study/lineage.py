"""The lineage of a fork: the trials before it, and which of its epochs each of them has trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpo.storage.lineage import epochs_reached, forked_from
from hpo.storage.pausing import pruned_at_end
from hpo.wording import paused_at_end, replaced_by


@dataclass(frozen=True)
class Stage:
    """One trial of a lineage.

    Attributes:
        trial: The trial.
        params: Its parameters.
        seed: Its seed.
        until: The epoch after which the next trial of the lineage begins; None for the last one.
    """

    trial: int
    params: Mapping[str, Any]
    seed: int
    until: int | None


def forks_by_replaced(trials: Iterable[FrozenTrial]) -> dict[int | None, FrozenTrial]:
    """Forks by the number of the trial whose place each has taken (None for one that replaces none)."""
    return {fork["replaces"]: trial for trial in trials if (fork := forked_from(trial)) is not None}


def end_of_paused(trial: FrozenTrial, fork: FrozenTrial | None) -> str | None:
    """In words, why a paused trial was pruned: the study ended, or a fork took its place; None for other trials.

    Args:
        trial: The trial.
        fork: The fork that has taken its place, if any.
    """
    if (epoch := pruned_at_end(trial)) is not None:
        return paused_at_end(epoch)
    begun = None if fork is None else forked_from(fork)
    if fork is None or begun is None or trial.state != TrialState.PRUNED:
        return None
    return replaced_by(epochs_reached(trial), fork.number, begun["parent"])


def one_of_each_lineage(trials: Iterable[FrozenTrial], every: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """The first trial of each lineage, in the given order: of trials with the same first ancestor only one stays.

    Args:
        trials: Some trials of a study, in any order.
        every: All trials of the study.
    """
    parents = {each.number: fork["parent"] for each in every if (fork := forked_from(each)) is not None}

    def first(number: int) -> int:
        while parents.get(number, number) < number:
            number = parents[number]
        return number

    found: dict[int, FrozenTrial] = {}
    for trial in trials:
        found.setdefault(first(trial.number), trial)
    return list(found.values())


def lineage_of(
    trials: Sequence[FrozenTrial], trial: FrozenTrial, seed_of: Callable[[int, Mapping[str, Any]], int]
) -> list[Stage]:
    """The stages of a trial's lineage, the first one first; a trial that is no fork has only its own.

    Args:
        trials: All trials of the study, by number.
        trial: One of them.
        seed_of: The seed of a trial, by its number and parameters.

    Raises:
        ValueError: A trial of the lineage does not exist.
    """
    stages = [Stage(trial.number, trial.params, seed_of(trial.number, trial.params), None)]
    if forked_from(trial) is None:
        return stages
    by_number = {each.number: each for each in trials}
    while (fork := forked_from(by_number.get(stages[0].trial, trial))) is not None:
        parent = by_number.get(fork["parent"])
        if parent is None or parent.number >= stages[0].trial:
            raise ValueError(f"trial {stages[0].trial} is a fork of trial {fork['parent']}, which is not there")
        stages.insert(0, Stage(parent.number, parent.params, seed_of(parent.number, parent.params), fork["epoch"]))
    return stages
