"""EarlyStopping: ends a run that no longer improves."""

import math
from collections.abc import Mapping
from typing import Any

from trainer.callback import Callback, TrainerView
from trainer.checks import check_count, check_mode
from trainer.state import EARLY_STOPPED, Mode


class EarlyStopping(Callback):
    """Stops after ``patience`` epochs in a row without a meaningful improvement of ``monitor``.

    An epoch improves when its value beats the best by more than ``min_delta`` times the best's magnitude, so a
    negative loss must fall further below, and a maximised metric rise further above. An epoch without a value,
    because its validation was skipped or an `Evaluator` did not measure it there, does not count. Its best value
    and its count belong to one run: another run, or a fork, starts without them.

    Example::

        Trainer(model, optimizer, loss, callbacks=[EarlyStopping(patience=5)])

        callbacks: {early_stopping: {patience: 5}}

    Args:
        monitor: Name of the metric.
        patience: Epochs without improvement before the end, at least 1.
        mode: ``"min"`` or ``"max"``.
        min_delta: Smallest improvement that counts, relative to the best value's magnitude.

    Raises:
        KeyError: Nothing records ``monitor``.
    """

    priority = 90

    def __init__(
        self, monitor: str = "val_loss", patience: int = 20, mode: Mode = "min", min_delta: float = 1e-4
    ) -> None:
        check_count("patience", patience)
        if not 0 <= min_delta < 1:
            raise ValueError(f"min_delta is {min_delta!r}: give a share of the best value, at least 0 and below 1")
        check_mode(mode)
        self.monitor = monitor
        self.patience = patience
        self.mode = mode
        self.min_delta = min_delta
        self.reads = (monitor,)
        self._forget()

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Forget another trainer's run, or a fork's parent."""
        if not trainer.state.has_trained:
            self._forget()

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Compare with the best so far."""
        value = trainer.state.metric(self.monitor)
        if value is None:
            return
        if self._improves(value):
            self.best = float(value)  # not a NumPy number, which a checkpoint can't hold
            self.wait = 0
            return
        self.wait += 1
        if self.wait >= self.patience:
            trainer.state.stop(EARLY_STOPPED)

    def _forget(self) -> None:
        self.best = math.inf if self.mode == "min" else -math.inf
        self.wait = 0

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if math.isinf(self.best):
            return True
        margin = self.min_delta * abs(self.best)
        return value < self.best - margin if self.mode == "min" else value > self.best + margin

    def state_dict(self) -> dict[str, Any]:
        """The best value and the number of epochs since."""
        return {"best": self.best, "wait": self.wait}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both."""
        self.best = state["best"]
        self.wait = state["wait"]
