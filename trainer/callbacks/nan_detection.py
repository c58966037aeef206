"""NaNDetection: ends a run whose loss is no longer a number."""

import logging
import math
from collections.abc import Sequence

from trainer.callback import Callback, TrainerView
from trainer.state import DIVERGED

logger = logging.getLogger(__name__)


class NaNDetection(Callback):
    """Stops the run with the reason ``"diverged"`` when a watched metric is NaN or infinite at an epoch's end.

    Example::

        Trainer(model, optimizer, loss, callbacks=[NaNDetection(["train_loss", "val_loss"])])

        callbacks: {nan_detection: {metrics: [train_loss, val_loss]}}

    Args:
        metrics: Names of the metrics to watch; one that an epoch does not record is passed over.
    """

    priority = 5

    def __init__(self, metrics: Sequence[str] = ("train_loss", "val_loss")) -> None:
        if isinstance(metrics, str):
            raise TypeError(f"metrics is {metrics!r}: give a list of names, such as [{metrics!r}]")
        self.metrics = tuple(metrics)

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Look at the epoch's numbers."""
        state = trainer.state
        bad = [name for name in self.metrics if not math.isfinite(state.metrics.get(name, 0.0))]
        if bad:
            logger.warning("epoch %d: %s is not finite: diverged", state.epoch, ", ".join(bad))
            state.stop(DIVERGED)
