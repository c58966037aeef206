"""LossPrediction: predicts the loss of the last epoch."""

import math

from trainer.callback import Callback, TrainerView
from trainer.checks import check_count, check_mode
from trainer.prediction.final_loss import predict_final_loss
from trainer.state import Mode


class LossPrediction(Callback):
    """Predicts the loss of the last epoch, after each epoch from ``min_epochs`` on, and records it.

    Writes ``predicted_final_loss`` and its standard deviation ``predicted_final_loss_std`` in units of the loss
    and, where the prediction is positive, ``predicted_final_neg_log10``. An epoch that was not validated keeps its
    place in time. See `trainer.prediction.final_loss.predict_final_loss`.

    Example::

        Trainer(model, optimizer, loss, callbacks=[LossPrediction(min_epochs=5)])

        callbacks: {loss_prediction: {min_epochs: 5}}

    Args:
        metric: The loss to predict.
        min_epochs: Number of finished epochs before the first prediction, at least 1.
        mode: ``"min"`` for a loss, ``"max"`` for a metric of which more is better.

    Raises:
        ValueError: ``min_epochs`` is not an integer of at least 1, or ``mode`` is neither.
    """

    priority = 70
    writes = ("predicted_final_loss", "predicted_final_loss_std", "predicted_final_neg_log10")

    def __init__(self, metric: str = "val_loss", min_epochs: int = 10, mode: Mode = "min") -> None:
        check_count("min_epochs", min_epochs)
        check_mode(mode)
        self.metric = metric
        self.min_epochs = min_epochs
        self.mode = mode
        self.reads = (metric,)

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Predict from the history so far."""
        state = trainer.state
        if self.metric not in state.metrics:
            return
        losses = [metrics.get(self.metric, math.nan) for metrics in state.history]
        prediction = predict_final_loss(losses, state.max_epochs, min_epochs=self.min_epochs, mode=self.mode)
        if prediction is None:
            return
        state.metrics["predicted_final_loss"] = prediction.mean
        state.metrics["predicted_final_loss_std"] = prediction.std
        if prediction.neg_log10 is not None:
            state.metrics["predicted_final_neg_log10"] = prediction.neg_log10
