"""TimeLimit: ends a run when its time is used up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from time import perf_counter
from typing import Any, Final, Literal

from trainer.callback import Callback, TrainerView

#: The reason with which it stops a run.
TIME_LIMIT: Final = "time_limit"


class TimeLimit(Callback):
    """Stops the run with the reason ``"time_limit"`` after ``seconds``, summed over all its fits.

    The time is that of the wall clock from ``on_fit_start`` to the end of the fit, validation and checkpoints
    included. It is summed over all resumes: a resumed run has what its checkpoint had left, and a fork all of its
    time. The last epoch is validated and logged like any other, so a run takes longer than ``seconds`` by what is
    left of a batch, or of an epoch, and the validation.

    Of several processes each looks at its own clock, and the first whose time is used up ends the run of all.

    Example::

        Trainer(model, optimizer, loss, callbacks=[TimeLimit(8 * 3600)])

        callbacks: {time_limit: {seconds: 28800, at: epoch}}

    Args:
        seconds: The time limit in seconds, above 0.
        at: ``"batch"``: the running epoch ends after the batch in which the time is used up; ``"epoch"``: the
            epoch continues to its end, so that all epochs are whole.

    Raises:
        ValueError: ``seconds`` is no finite number above 0, or ``at`` is something else.
    """

    def __init__(self, seconds: float, at: Literal["epoch", "batch"] = "batch") -> None:
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not number or not 0 < seconds < math.inf:
            raise ValueError(f"seconds is {seconds!r}: give a finite number above 0")
        if at not in {"epoch", "batch"}:
            raise ValueError(f"at is {at!r}: give 'epoch' or 'batch'")
        self.seconds = seconds
        self.at = at
        self._before = 0.0
        self._started: float | None = None

    @property
    def used(self) -> float:
        """Seconds that the run has taken so far, in all its fits."""
        return self._before + (0.0 if self._started is None else perf_counter() - self._started)

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Start the clock; at zero for a new run or fork."""
        if not trainer.state.has_trained:
            self._before = 0.0
        self._started = perf_counter()

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """End the epoch and the run if the time is used up."""
        if self.at == "batch" and self.used >= self.seconds:
            trainer.state.stop_epoch()
            trainer.state.stop(TIME_LIMIT)

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """End the run if the time is used up."""
        if self.used >= self.seconds:
            trainer.state.stop(TIME_LIMIT)

    def teardown(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Stop the clock."""
        self._before, self._started = self.used, None

    def state_dict(self) -> dict[str, Any]:
        """The seconds used so far."""
        return {"used": self.used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the seconds used, except in a running fit: its time counts even if it loads an older state."""
        if self._started is None:
            self._before = state["used"]
