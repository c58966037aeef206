"""Forks: trials that began with a checkpoint of another trial, and the epochs that are not their own."""

from __future__ import annotations

from typing import TypedDict, cast

from optuna.trial import FrozenTrial, Trial

from hpo.storage.attributes import FORK_ATTR, SAME_AS_ATTR
from hpo.storage.optuna_private import known_of


class Forked(TypedDict):
    """Where a fork began; stored with its first grant.

    Attributes:
        parent: The trial that it began from.
        epoch: Epochs that this one had finished there.
        replaces: The trial in whose place it stands; None: no trial's.
    """

    parent: int
    epoch: int
    replaces: int | None


def forked_from(trial: FrozenTrial | Trial) -> Forked | None:
    """Where a trial began that is a fork; None for any other."""
    return cast(
        "Forked | None", (known_of(trial) if isinstance(trial, Trial) else trial).user_attrs.get(FORK_ATTR)
    )


def inherited_epochs(trial: FrozenTrial | Trial) -> int:
    """Epochs at the beginning of a trial that its parent has trained; it has reported no values of them."""
    fork = forked_from(trial)
    return 0 if fork is None else fork["epoch"]


def epochs_reached(trial: FrozenTrial) -> int:
    """Epochs that a trial has behind it, as far as they were reported, those of its parent included.

    None of a result that it took over: the curve is that of the trial which trained.
    """
    if SAME_AS_ATTR in trial.user_attrs:
        return 0
    last = trial.last_step  # found anew each time
    return inherited_epochs(trial) if last is None else last


def epochs_trained(trial: FrozenTrial) -> int:
    """Epochs that a trial has trained itself, as far as they were reported; none of a result that it took over."""
    last = trial.last_step
    return 0 if last is None or SAME_AS_ATTR in trial.user_attrs else last - inherited_epochs(trial)


def trained_as(trial: FrozenTrial) -> int:
    """The trial whose training gave this one its result: itself, or one of the same parameters."""
    return int(trial.user_attrs.get(SAME_AS_ATTR, trial.number))
