"""OverfitDetection: detects that the training loss falls while the validation loss rises."""

import logging
from collections.abc import Sequence
from itertools import pairwise

from trainer.callback import Callback, TrainerView
from trainer.checks import check_count

logger = logging.getLogger(__name__)


class OverfitDetection(Callback):
    """Records ``overfit_gap_ratio`` (validation ÷ training loss) while the two move apart.

    They move apart if, over the last ``window_size`` changes from epoch to epoch, the training loss fell each time
    and the validation loss rose each time. The ratio is recorded only for a positive training loss. A warning is
    logged once, when they begin to move apart.

    Example::

        Trainer(model, optimizer, loss, callbacks=[OverfitDetection(window_size=3)])

        callbacks: {overfit_detection: {window_size: 3}}

    Args:
        warmup_epochs: First epochs that are ignored.
        window_size: Consecutive changes to look at, at least 1; a larger window raises fewer false alarms.

    Raises:
        ValueError: A number is out of range.
    """

    priority = 75
    reads = ("train_loss", "val_loss")
    writes = ("overfit_gap_ratio",)

    def __init__(self, warmup_epochs: int = 5, window_size: int = 5) -> None:
        check_count("warmup_epochs", warmup_epochs, 0)
        check_count("window_size", window_size)
        self.warmup_epochs = warmup_epochs
        self.window_size = window_size

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Check the window that ends with this epoch."""
        state = trainer.state
        if not self._diverges(state.history):
            return
        train_loss, val_loss = state.metrics["train_loss"], state.metrics["val_loss"]
        if train_loss > 0:
            state.metrics["overfit_gap_ratio"] = val_loss / train_loss
        if not self._diverges(state.history[:-1]):
            logger.warning(
                "epoch %d: training loss falls to %.4g while validation loss rises to %.4g: overfitting",
                state.epoch,
                train_loss,
                val_loss,
            )

    def _diverges(self, history: Sequence[dict[str, float]]) -> bool:
        window = history[self.warmup_epochs :][-(self.window_size + 1) :]
        if len(window) <= self.window_size or not all(
            {"train_loss", "val_loss"} <= item.keys() for item in window
        ):
            return False
        return all(
            after["train_loss"] < before["train_loss"] and after["val_loss"] > before["val_loss"]
            for before, after in pairwise(window)
        )
