"""GradientMonitor: records the largest gradient norm of each epoch."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.callback import Callback, TrainerView
from trainer.step.norms import total_norm

logger = logging.getLogger(__name__)

# How many steps' norms wait on the device before they are folded into one maximum.
_FOLD = 256


class GradientMonitor(Callback):
    """Records ``max_grad_norm``: the largest global L2 norm of the gradients over the epoch's batches.

    A step computes the norms of the single tensors, in one call, and waits for nothing; they are combined on
    the device when an epoch ends. Of several optimizers that a step updates by name, each has its own
    ``max_grad_norm_<name>`` too. With one that evaluates a closure several times, a step's norm is the first one.

    Example::

        Trainer(model, optimizer, loss, callbacks=[GradientMonitor(warn_threshold=100.0)])

        callbacks: {gradient_monitor: {warn_threshold: 100.0}}

    Args:
        warn_threshold: Log a warning for an epoch whose maximum is above this; it names the first batch and
            optimizer step above it.
    """

    priority = 12
    graph_safe = True
    writes = ("max_grad_norm",)
    writes_in = "on_train_epoch_end"

    def __init__(self, warn_threshold: float = 1e4) -> None:
        self.warn_threshold = warn_threshold
        self._norms: list[tuple[Tensor, ...]] = []
        self._places: list[tuple[int, int]] = []  # for each of these: batch of the epoch and step of the run
        self._largest: Tensor | None = None
        self._first: Tensor | None = None  # the place of the first norm above the threshold; zeros: none
        self._overflows = False

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Note whether steps may overflow, as in fp16, where their norms are ignored."""
        self._overflows = trainer.precision.kind == "fp16"

    def on_train_epoch_start(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Forget the previous epoch."""
        self._norms, self._places, self._largest, self._first = [], [], None, None

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        """Measure this batch's gradients."""
        state = trainer.state
        if state.evaluation:  # a further evaluation of the closure in the same step
            return
        norms = state.gradient_norms(trainer.optimizer)
        if name := norms and state.optimizer_name:
            norms = (total_norm(norms),)  # one value per optimizer, however many parameters it has
            trainer.recorder.record(f"max_grad_norm_{name}", self._said(norms[0]), reduce="max")
        if norms:
            if len(self._norms) >= _FOLD or (self._norms and len(self._norms[0]) != len(norms)):
                self._fold()
            self._norms.append(norms)
            self._places.append((state.batch_index + 1, state.step + 1))

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Record the maximum as a metric of the epoch."""
        self._fold()
        if self._largest is not None:
            trainer.recorder.record("max_grad_norm", self._largest, reduce="max")

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Warn if the maximum is above the threshold."""
        norm = trainer.state.metrics.get("max_grad_norm", 0.0)
        if norm > self.warn_threshold and self._first is not None:
            state = trainer.state
            batch, step = self._first.tolist()
            # The step of batches left over to accumulate comes after the last batch.
            batch = min(batch, state.batches_per_epoch or batch)
            logger.warning(
                "epoch %d: gradient norm %.3g is above %.3g, first in batch %d, step %d: a smaller learning rate "
                "or clipping may help",
                state.epoch,
                norm,
                self.warn_threshold,
                batch,
                step,
            )

    def state_dict(self) -> dict[str, Any]:
        """The maximum so far, and where the threshold was first exceeded, for a resume inside the epoch."""
        self._fold()
        return {"largest": self._largest, "first": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both."""
        self._norms, self._places, self._largest, self._first = [], [], state["largest"], state["first"]

    def _said(self, norms: Tensor) -> Tensor:
        """The norms, with those of overflowed steps replaced by 0."""
        return norms.nan_to_num(0.0, 0.0, 0.0) if self._overflows else norms

    def _fold(self) -> None:
        if not self._norms:
            return
        norms = [norm for step in self._norms for norm in step]
        device = norms[0].device
        if any(norm.device != device for norm in self._norms[0]):
            norms = [norm.to(device) for norm in norms]
        rows = torch.stack(norms).view(len(self._norms), -1)
        totals = self._said(torch.linalg.vector_norm(rows, dim=1))
        largest = totals.max()
        if device.type != "cpu" or largest > self.warn_threshold:  # on a CPU, the check costs less than the search
            self._note_first(totals)
        if self._largest is not None:
            largest = torch.maximum(largest, self._largest.to(device))
        self._norms, self._places, self._largest = [], [], largest

    def _note_first(self, totals: Tensor) -> None:
        """Keep the place of the first of these norms above the threshold, unless there was an earlier one."""
        above = totals > self.warn_threshold
        places = torch.tensor(self._places).to(totals.device, non_blocking=True)
        # Not plain indexing by a device tensor, which would wait for the device.
        first = places.index_select(0, above.to(torch.uint8).argmax(keepdim=True))[0] * above.any()
        if self._first is not None:
            earlier = self._first.to(totals.device)
            first = torch.where(earlier[1] > 0, earlier, first)
        self._first = first
