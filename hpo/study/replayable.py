"""Which trials of a study can be replayed, those whose curve is the work of their parameters; in which orders."""

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
    """The finished trials of a study that have reported, by whether they can be replayed.

    Attributes:
        trials: Those that can, in the order of their numbers.
        forks: How many others began with a checkpoint of another trial, which trained their first epochs.
        taken_over: How many others have trained nothing: their result is that of a trial with the same parameters.
    """

    trials: Sequence[FrozenTrial]
    forks: int
    taken_over: int

    @property
    def others(self) -> dict[str, int]:
        """How many are left out, by why: arguments of `hpo.wording.not_replayed`."""
        return {"forks": self.forks, "taken_over": self.taken_over}

    @property
    def aside(self) -> str:
        """What an error about too few trials ends with."""
        others = not_replayed(**self.others)
        return f"; left out are {others}" if others else ""

    def fix(self, usual: str) -> str:
        """What to do about too few trials: ``usual``, but more forks would not help where forks are left out."""
        return _NO_FORKS if self.forks else usual


_NO_FORKS: Final = "replay a study without a scheduler that forks: what a fork came to is also its parent's work"


def replayable(opened: OpenStudy) -> Replayable:
    """The finished trials of a study that have reported, imported ones aside."""
    ended = [trial for trial in own_trials(opened) if trial.state.is_finished() and trial.intermediate_values]
    alone = [trial for trial in ended if forked_from(trial) is None]
    trials = [trial for trial in alone if SAME_AS_ATTR not in trial.user_attrs]
    return Replayable(trials, len(ended) - len(alone), len(alone) - len(trials))


def order_of(count: int, number: int) -> Sequence[int]:
    """So many trials in the order of this number: 0 is the study's own, others are random."""
    return range(count) if number == 0 else np.random.default_rng(number).permutation(count).tolist()
