"""StabilityMonitor: counts the steps whose loss or gradient norm is far above those before them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.callback import Callback, TrainerView
from trainer.checks import check_count
from trainer.step.norms import total_norm

logger = logging.getLogger(__name__)

# How many rows wait on the device before each is folded into one number.
_FOLD = 256
# How many steps are judged at a time; each needs a window of numbers.
_BLOCK = 4096
# The relative rounding error of a 32-bit loss.
_ROUNDING = torch.finfo(torch.float32).eps


class StabilityMonitor(Callback):
    """Records ``loss_spikes`` and ``grad_norm_spikes``: steps whose value is far above those before them.

    A step spikes when its value lies more than ``threshold`` standard deviations above the mean of the ``window``
    steps before it, in the epochs before too. The loss is each batch's, as it is recorded; the gradient norm is
    the global L2 norm before each optimizer step. A step with fewer than a quarter of the window before it is not
    judged. Values that are not finite (a batch that overflows in fp16, a run that diverges) are no spikes, and
    count in no window: scaling and `NaNDetection` see to them. A spike widens the windows that hold it, so of a
    burst the first steps count. A warning names the spikes of an epoch and the largest.

    ``loss_spike_score`` and ``grad_norm_spike_score`` are the share of spikes, 0 to 1, among the latest
    ``rolling_window`` steps at the epoch's end, once there are as many; with ``_total`` behind the name, among all
    steps of the run.

    A step only keeps numbers on the device; they are read and judged once, at the epoch's end. The defaults are
    those of OLMo-core's monitor of this name.

    Example::

        Trainer(model, optimizer, loss, callbacks=[StabilityMonitor(threshold=4.0)])

        callbacks: {stability_monitor: {threshold: 4.0}}

    Args:
        window: Number of preceding steps that a step is compared with, at least 2.
        threshold: How many standard deviations above their mean a spike is, above 0.
        rolling_window: Number of steps that the score covers, at least 1.

    Raises:
        ValueError: A number is out of range.
    """

    priority = 12
    reads_batches = True
    graph_safe = True
    writes = ("loss_spike*", "grad_norm_spike*")

    def __init__(self, window: int = 128, threshold: float = 6.0, rolling_window: int = 10_000) -> None:
        check_count("window", window, 2)
        if not threshold > 0:
            raise ValueError(f"threshold is {threshold}: give a number of standard deviations above 0")
        check_count("rolling_window", rolling_window)
        self.rolling_window = rolling_window
        self.window = window
        self.threshold = threshold
        self._losses = _Series(window, lambda rows: rows[:, 0])
        self._norms = _Series(window, lambda rows: torch.linalg.vector_norm(rows, dim=1))

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Forget all steps if the run is new."""
        if trainer.state.is_new:
            self._losses.clear()
            self._norms.clear()

    def on_before_backward(self, trainer: TrainerView) -> None:
        """Keep a copy of the loss: it is still the recorded one, but may change in place from now on."""
        state = trainer.state
        assert state.loss is not None
        if not (state.manual or state.evaluation):
            self._losses.add((state.loss.detach().clone(),))

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        """Keep the norms of the gradients."""
        norms = trainer.state.gradient_norms(trainer.optimizer)
        if norms and not (trainer.state.manual or trainer.state.evaluation):
            self._norms.add(norms)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """For a step that makes its own updates, keep its returned loss and the norm of all its gradients."""
        state = trainer.state
        if state.manual and not state.skipped_step and state.loss is not None:
            self._losses.add((state.loss.detach().clone(),))
            if norms := list(state.grad_norms.values()):
                self._norms.add((total_norm(norms),))

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Judge the epoch's steps."""
        for what, series in (("loss", self._losses), ("grad_norm", self._norms)):
            scores = series.take_scores()
            spikes = scores[scores > self.threshold]
            trainer.state.metrics[f"{what}_spikes"] = float(len(spikes))
            shares = series.count_spikes(scores > self.threshold, self.rolling_window)
            for name, share in zip(("score", "score_total"), shares, strict=True):
                if share is not None:
                    trainer.state.metrics[f"{what}_spike_{name}"] = share
            if len(spikes):
                logger.warning(
                    "epoch %d: %d %s spikes, the largest %.1f standard deviations above the mean of the %d steps "
                    "before it",
                    trainer.state.epoch,
                    len(spikes),
                    what.replace("_", " "),
                    spikes.max().item(),
                    self.window,
                )

    def state_dict(self) -> dict[str, Any]:
        """The windows, and the values of the running epoch."""
        return {"losses": self._losses.state_dict(), "norms": self._norms.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both."""
        self._losses.load_state_dict(state["losses"])
        self._norms.load_state_dict(state["norms"])


class _Series:
    """The values of one quantity: those of the running epoch, on the device, and the window before them.

    Args:
        window: How many values to keep from earlier epochs.
        combine: Combines each row into one value, [rows, columns] → [rows].
    """

    def __init__(self, window: int, combine: Callable[[Tensor], Tensor]) -> None:
        self._window = window
        self._combine = combine
        self.clear()

    def clear(self) -> None:
        self._before = torch.empty(0, dtype=torch.float64)
        self._folded: list[Tensor] = []
        self._rows: list[tuple[Tensor, ...]] = []
        self._seen = 0
        self._spikes = 0
        self._recent: list[int] = []  # numbers of the latest spikes, from 1

    def add(self, row: tuple[Tensor, ...]) -> None:
        if self._rows and (len(self._rows) >= _FOLD or len(self._rows[0]) != len(row)):
            self._fold()
        self._rows.append(row)

    def take_scores(self) -> Tensor:
        """End the epoch: the `spike_scores` of its values."""
        self._fold()
        values = torch.cat([self._before[:0], *(part.cpu().double() for part in self._folded)])
        scores = spike_scores(self._before, values, self._window)
        self._before = torch.cat([self._before, values])[-self._window :]
        self._folded = []
        return scores

    def count_spikes(self, spiked: Tensor, rolling: int) -> tuple[float | None, float | None]:
        """Count an epoch's spikes, bool [steps]; returns their share in the latest ``rolling`` steps, and in all.

        The first share is None before there are that many steps; both are None before there is any step.
        """
        numbers = (self._seen + 1 + spiked.nonzero().flatten()).tolist()
        self._seen += len(spiked)
        self._spikes += len(numbers)
        self._recent = [number for number in (*self._recent, *numbers) if number > self._seen - rolling]
        recent = len(self._recent) / rolling if self._seen >= rolling else None
        return recent, self._spikes / self._seen if self._seen else None

    def state_dict(self) -> dict[str, Any]:
        # Not folded further, so that a resumed epoch folds the same rows together.
        return {
            "before": self._before,
            "folded": list(self._folded),
            "rows": [list(row) for row in self._rows],
            "spikes": [self._seen, self._spikes, list(self._recent)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before = state["before"][-self._window :].cpu()
        self._folded = list(state["folded"])
        self._rows = [tuple(row) for row in state["rows"]]
        self._seen, self._spikes, recent = state["spikes"]
        self._recent = list(recent)

    def _fold(self) -> None:
        if self._rows:
            device = self._rows[-1][0].device
            numbers = [number.to(device) for row in self._rows for number in row]
            self._folded.append(self._combine(torch.stack(numbers).view(len(self._rows), -1)))
            self._rows = []


def spike_scores(before: Tensor, values: Tensor, window: int) -> Tensor:
    """How many standard deviations each value is above the mean of the values before it.

    Args:
        before: At most ``window`` earlier values, float64 [n].
        values: The values to judge, float64 [steps].
        window: How many preceding values each is compared with; those that are not finite are left out.

    Returns:
        float64 [steps]; NaN for a value that is not finite, or that has fewer finite values in its window than a
        quarter of the window, or than 2. The standard deviation is that of the whole window (not of a sample), and
        at least the rounding error of 32 bits.
    """
    missing = before.new_full((window - len(before),), math.nan)
    windows = torch.cat([missing, before, values]).unfold(0, window, 1)[:-1]
    pairs = zip(torch.split(values, _BLOCK), torch.split(windows, _BLOCK), strict=True)
    return torch.cat([_block_scores(*pair) for pair in pairs])


def _block_scores(values: Tensor, windows: Tensor) -> Tensor:
    known = windows.isfinite()
    count = known.sum(dim=1)
    mean = torch.where(known, windows, 0.0).sum(dim=1) / count
    squares = torch.where(known, windows - mean[:, None], 0.0).square()
    sigma = torch.maximum((squares.sum(dim=1) / count).sqrt(), _ROUNDING * mean.abs())
    judged = values.isfinite() & (count >= max(2, windows.shape[1] // 4))
    return torch.where(judged, (values - mean) / sigma, math.nan)
