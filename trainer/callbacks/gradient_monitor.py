"""GradientMonitor: the largest gradient norm of an epoch."""

import logging

import torch

from trainer.callback import Callback, TrainerView

logger = logging.getLogger(__name__)


class GradientMonitor(Callback):
    """Records ``max_grad_norm``: the largest global L2 norm of the gradients over the epoch's batches.

    The norms stay on the device until the epoch ends; a step waits for nothing.

    Args:
        warn_threshold: A warning is logged for an epoch whose maximum is above it.
    """

    priority = 12
    writes = ("max_grad_norm",)
    writes_in = "on_train_epoch_end"

    def __init__(self, warn_threshold: float = 1e4) -> None:
        self.warn_threshold = warn_threshold

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        """Measure this batch's gradients."""
        gradients = [
            parameter.grad
            for group in trainer.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if gradients:
            norm = torch.nn.utils.get_total_norm(gradients)
            trainer.recorder.record("max_grad_norm", norm, reduce="max")

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Warn about an explosion."""
        norm = trainer.state.metrics.get("max_grad_norm", 0.0)
        if norm > self.warn_threshold:
            logger.warning(
                "epoch %d: gradient norm %.3g is above %.3g: a smaller learning rate or clipping may help",
                trainer.state.epoch,
                norm,
                self.warn_threshold,
            )
