"""Measures how long a trial's attempts took: for training epochs, and for starting, loading and ending."""

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
    """The times of a trial's attempts that ended in a pause or in the trial's end.

    Attributes:
        attempts: Number of these attempts.
        epochs: Epochs that they trained.
        training_s: Seconds that these epochs took.
        around_s: Seconds for all else: taking the trial, starting its process, building, loading, storing.
    """

    attempts: int = 0
    epochs: int = 0
    training_s: float = 0.0
    around_s: float = 0.0

    def with_attempt(self, epochs: int, training_s: float, around_s: float) -> Timing:
        """The times with one more attempt."""
        return Timing(
            self.attempts + 1, self.epochs + epochs, self.training_s + training_s, self.around_s + around_s
        )

    @property
    def switch(self) -> float | None:
        """The mean time around an attempt's epochs, measured in epochs; None where nothing was measured."""
        if not self.attempts or self.training_s <= 0:
            return None
        return (self.around_s / self.attempts) / (self.training_s / self.epochs)


def took(trial: FrozenTrial, attempts: Sequence[float]) -> float | None:
    """Seconds of work at an ended or paused trial; without attempts, Optuna's time from start to end.

    Optuna's time includes pauses, and after a requeue it covers only the last attempt.

    Args:
        trial: The trial.
        attempts: Seconds of each attempt at it.
    """
    if attempts and (trial.state.is_finished() or paused_at(trial) is not None):
        return sum(attempts)
    return None if trial.duration is None else trial.duration.total_seconds()


def timing_of(trial: optuna.Trial | FrozenTrial) -> Timing:
    """A trial's stored timing; all zeros where it has none."""
    known = known_of(trial) if isinstance(trial, optuna.Trial) else trial
    return Timing(**known.user_attrs.get(TIMING_ATTR, {}))
