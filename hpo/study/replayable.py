"""Selects the trials of a study that can be replayed, whose curves follow from their parameters alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from optuna.trial import FrozenTrial

from hpo.storage.attributes import SAME_AS_ATTR
from hpo.storage.lineage import forked_from
from hpo.study.open_study import OpenStudy
from hpo.study.own_trials import own_trials
from hpo.wording import not_replayed


@dataclass(frozen=True)
class Replayable:
    """The finished trials of a study that have reported: those that can be replayed, and how many can't.

    Attributes:
        trials: The trials that can be replayed, by number.
        forks: How many can't because they are forks: another trial trained their first epochs.
        taken_over: How many can't because they took over the result of a trial with equal parameters.
    """

    trials: Sequence[FrozenTrial]
    forks: int
    taken_over: int

    @property
    def others(self) -> dict[str, int]:
        """How many trials are left out, by reason; the arguments of `hpo.wording.not_replayed`."""
        return {"forks": self.forks, "taken_over": self.taken_over}

    @property
    def aside(self) -> str:
        """The end of an error about too few trials, which names those left out."""
        others = not_replayed(**self.others)
        return f"; left out are {others}" if others else ""

    def fix(self, usual: str) -> str:
        """The fix for too few trials: ``usual``, unless forks are left out, since more of them would not help."""
        return _NO_FORKS if self.forks else usual


_NO_FORKS: Final = "replay a study without a scheduler that forks: what a fork came to is also its parent's work"


def replayable(opened: OpenStudy) -> Replayable:
    """The finished own trials of a study that have reported."""
    ended = [trial for trial in own_trials(opened) if trial.state.is_finished() and trial.intermediate_values]
    alone = [trial for trial in ended if forked_from(trial) is None]
    trials = [trial for trial in alone if SAME_AS_ATTR not in trial.user_attrs]
    return Replayable(trials, len(ended) - len(alone), len(alone) - len(trials))


def order_of(count: int, number: int) -> Sequence[int]:
    """Indices of ``count`` trials in the order of a number: 0 is the study's own order, others are random."""
    return range(count) if number == 0 else np.random.default_rng(number).permutation(count).tolist()
