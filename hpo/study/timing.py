"""How long a trial's attempts took: to train its epochs, and to start, load and end around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial

from hpo.storage.attributes import TIMING_ATTR
from hpo.storage.optuna_private import known_of
from hpo.storage.pausing import paused_at


@dataclass(frozen=True)
class Timing:
    """What a trial's attempts took that came to a pause or to its end.

    Attributes:
        attempts: How many these are.
        epochs: Epochs that they trained.
        training_s: Seconds that these took.
        around_s: Seconds for all else: taking the trial, its process, building, loading, storing.
    """

    attempts: int = 0
    epochs: int = 0
    training_s: float = 0.0
    around_s: float = 0.0

    def with_attempt(self, epochs: int, training_s: float, around_s: float) -> Timing:
        """The same with one attempt more."""
        return Timing(
            self.attempts + 1, self.epochs + epochs, self.training_s + training_s, self.around_s + around_s
        )

    @property
    def switch(self) -> float | None:
        """Epochs that could be trained in the time around those of an attempt; None where nothing was measured."""
        if not self.attempts or self.training_s <= 0:
            return None
        return (self.around_s / self.attempts) / (self.training_s / self.epochs)


def took(trial: FrozenTrial, attempts: Sequence[float]) -> float | None:
    """Seconds of work at a trial that does not run; Optuna's time from start to end of one without attempts.

    That time has all that a trial waited while it was paused, and after a requeue the last attempt alone.

    Args:
        trial: The trial.
        attempts: Seconds of each attempt at it.
    """
    if attempts and (trial.state.is_finished() or paused_at(trial) is not None):
        return sum(attempts)
    return None if trial.duration is None else trial.duration.total_seconds()


def timing_of(trial: optuna.Trial | FrozenTrial) -> Timing:
    """A trial's timing as stored; zeros where it has none."""
    known = known_of(trial) if isinstance(trial, optuna.Trial) else trial
    return Timing(**known.user_attrs.get(TIMING_ATTR, {}))
