"""LossPrediction: where the loss curve is heading."""

from trainer.callback import Callback, TrainerView
from trainer.prediction import predict_final_loss


class LossPrediction(Callback):
    """Records the loss predicted for the last epoch, from ``min_epochs`` finished epochs on.

    Writes ``predicted_final_loss`` in units of the loss and, where that is positive,
    ``predicted_final_neg_log10``. See `trainer.prediction.predict_final_loss`.

    Example::

        Trainer(model, optimizer, loss, callbacks=[LossPrediction(min_epochs=5)])

        callbacks: {loss_prediction: {min_epochs: 5}}

    Args:
        metric: The loss to predict.
        min_epochs: Epochs before the first prediction.
    """

    priority = 70
    writes = ("predicted_final_loss", "predicted_final_neg_log10")

    def __init__(self, metric: str = "val_loss", min_epochs: int = 10) -> None:
        self.metric = metric
        self.min_epochs = min_epochs
        self.reads = (metric,)

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Predict from the history so far."""
        state = trainer.state
        if self.metric not in state.metrics:
            return
        losses = [metrics[self.metric] for metrics in state.history if self.metric in metrics]
        prediction = predict_final_loss(losses, state.max_epochs, min_epochs=self.min_epochs)
        if prediction is None:
            return
        state.metrics["predicted_final_loss"] = prediction.mean
        if prediction.neg_log10 is not None:
            state.metrics["predicted_final_neg_log10"] = prediction.neg_log10
