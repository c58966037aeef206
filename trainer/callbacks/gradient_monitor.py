"""GradientMonitor: the largest gradient norm of an epoch."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.callback import Callback, TrainerView
from trainer.step.norms import total_norm

logger = logging.getLogger(__name__)

# Steps whose norms wait on the device before they are folded into one maximum.
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
        self._places: list[tuple[int, int]] = []  # of each of these norms: batch of the epoch and step of the run
        self._largest: Tensor | None = None
        self._first: Tensor | None = None  # the place of the first above the threshold; zeros: none
        self._overflows = False

    def on_fit_start(self, trainer: TrainerView) -> None:
        """With fp16, steps overflow now and then, and are left out; they say nothing."""
        self._overflows = trainer.precision.kind == "fp16"

    def on_train_epoch_start(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Forget the epoch before."""
        self._norms, self._places, self._largest, self._first = [], [], None, None

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        """Measure this batch's gradients."""
        state = trainer.state
        if state.evaluation:  # of the same step, somewhere else
            return
        norms = state.gradient_norms(trainer.optimizer)
        if name := norms and state.optimizer_name:
            norms = (total_norm(norms),)  # one row for each, however many parameters they have
            trainer.recorder.record(f"max_grad_norm_{name}", self._said(norms[0]), reduce="max")
        if norms:
            if len(self._norms) >= _FOLD or (self._norms and len(self._norms[0]) != len(norms)):
                self._fold()
            self._norms.append(norms)
            self._places.append((state.batch_index + 1, state.step + 1))

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Hand the maximum to the epoch's metrics."""
        self._fold()
        if self._largest is not None:
            trainer.recorder.record("max_grad_norm", self._largest, reduce="max")

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Warn about an explosion."""
        norm = trainer.state.metrics.get("max_grad_norm", 0.0)
        if norm > self.warn_threshold and self._first is not None:
            state = trainer.state
            batch, step = self._first.tolist()
            # What is left to accumulate makes its step after the last batch.
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
        """The maximum so far and where it was passed first, for an epoch that resumes."""
        self._fold()
        return {"largest": self._largest, "first": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self._norms, self._places, self._largest, self._first = [], [], state["largest"], state["first"]

    def _said(self, norms: Tensor) -> Tensor:
        """Norms without those that say nothing."""
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
        if device.type != "cpu" or largest > self.warn_threshold:  # to ask a CPU costs less than to look for it
            self._note_first(totals)
        if self._largest is not None:
            largest = torch.maximum(largest, self._largest.to(device))
        self._norms, self._places, self._largest = [], [], largest

    def _note_first(self, totals: Tensor) -> None:
        """Keep the place of the first of these norms that is above the threshold, if none was before."""
        above = totals > self.warn_threshold
        places = torch.tensor(self._places).to(totals.device, non_blocking=True)
        # Indexing by a number of the device would wait for it.
        first = places.index_select(0, above.to(torch.uint8).argmax(keepdim=True))[0] * above.any()
        if self._first is not None:
            earlier = self._first.to(totals.device)
            first = torch.where(earlier[1] > 0, earlier, first)
        self._first = first
