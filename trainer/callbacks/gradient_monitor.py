"""GradientMonitor: the largest gradient norm of an epoch."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.callback import Callback, TrainerView

logger = logging.getLogger(__name__)

# Steps whose norms wait on the device before they are folded into one maximum.
_FOLD = 256


class GradientMonitor(Callback):
    """Records ``max_grad_norm``: the largest global L2 norm of the gradients over the epoch's batches.

    A step computes the norms of the single tensors, in one call, and waits for nothing; they are combined on
    the device when an epoch ends.

    Example::

        Trainer(model, optimizer, loss, callbacks=[GradientMonitor(warn_threshold=100.0)])

        callbacks: {gradient_monitor: {warn_threshold: 100.0}}

    Args:
        warn_threshold: A warning is logged for an epoch whose maximum is above it.
    """

    priority = 12
    graph_safe = True
    writes = ("max_grad_norm",)
    writes_in = "on_train_epoch_end"

    def __init__(self, warn_threshold: float = 1e4) -> None:
        self.warn_threshold = warn_threshold
        self._norms: list[tuple[Tensor, ...]] = []
        self._largest: Tensor | None = None
        self._overflows = False

    def on_fit_start(self, trainer: TrainerView) -> None:
        """With fp16, steps overflow now and then, and are left out; they say nothing."""
        self._overflows = trainer.precision.kind == "fp16"

    def on_train_epoch_start(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Forget the epoch before."""
        self._norms, self._largest = [], None

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        """Measure this batch's gradients."""
        gradients = [
            gradient.coalesce().values() if gradient.is_sparse else gradient
            for group in trainer.optimizer.param_groups
            for parameter in group["params"]
            if (gradient := parameter.grad) is not None
        ]
        if gradients:
            # What torch.nn.utils.get_total_norm calls, without its grouping, stacking and second norm per step.
            norms = torch._foreach_norm(gradients)  # noqa: SLF001
            if len(self._norms) >= _FOLD or (self._norms and len(self._norms[0]) != len(norms)):
                self._fold()
            self._norms.append(norms)

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Hand the maximum to the epoch's metrics."""
        self._fold()
        if self._largest is not None:
            trainer.recorder.record("max_grad_norm", self._largest, reduce="max")

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

    def state_dict(self) -> dict[str, Any]:
        """The maximum so far, for an epoch that resumes."""
        self._fold()
        return {"largest": self._largest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the maximum so far."""
        self._norms, self._largest = [], state["largest"]

    def _fold(self) -> None:
        if not self._norms:
            return
        norms = [norm for step in self._norms for norm in step]
        device = norms[0].device
        if any(norm.device != device for norm in self._norms[0]):
            norms = [norm.to(device) for norm in norms]
        rows = torch.stack(norms).view(len(self._norms), -1)
        totals = torch.linalg.vector_norm(rows, dim=1)
        largest = (totals.nan_to_num(0.0, 0.0, 0.0) if self._overflows else totals).max()
        if self._largest is not None:
            largest = torch.maximum(largest, self._largest.to(device))
        self._norms, self._largest = [], largest
