"""Forks: trials that began from a checkpoint of another trial, and the epochs that they inherited."""

from __future__ import annotations

from typing import TypedDict, cast

from optuna.trial import FrozenTrial, Trial

from hpo.storage.attributes import FORK_ATTR, SAME_AS_ATTR
from hpo.storage.optuna_private import known_of


class Forked(TypedDict):
    """Where a fork began; stored with its first grant.

    Attributes:
        parent: Number of the trial from whose checkpoint it began.
        epoch: Epochs that the parent had finished in that checkpoint.
        replaces: Number of the trial that it replaces; None: it replaces none.
    """

    parent: int
    epoch: int
    replaces: int | None


def forked_from(trial: FrozenTrial | Trial) -> Forked | None:
    """Where a fork began; None for a trial that is no fork."""
    return cast(
        "Forked | None", (known_of(trial) if isinstance(trial, Trial) else trial).user_attrs.get(FORK_ATTR)
    )


def inherited_epochs(trial: FrozenTrial | Trial) -> int:
    """Epochs at the beginning of a trial that its parent has trained; the trial itself has not reported them."""
    fork = forked_from(trial)
    return 0 if fork is None else fork["epoch"]


def epochs_reached(trial: FrozenTrial) -> int:
    """Epochs that a trial has finished, as far as they were reported, including those of its parent.

    0 for a trial that took over another one's result: the curve is that of the trial which trained.
    """
    if SAME_AS_ATTR in trial.user_attrs:
        return 0
    last = trial.last_step  # read once: Optuna searches for it at each access
    return inherited_epochs(trial) if last is None else last


def epochs_trained(trial: FrozenTrial) -> int:
    """Epochs that a trial has trained itself and reported; 0 if it took over another one's result."""
    last = trial.last_step
    return 0 if last is None or SAME_AS_ATTR in trial.user_attrs else last - inherited_epochs(trial)


def trained_as(trial: FrozenTrial) -> int:
    """Number of the trial whose training gave this one its result: itself, or one with the same parameters."""
    return int(trial.user_attrs.get(SAME_AS_ATTR, trial.number))
