"""Throughput: how fast an epoch trained, what it waited for, and when the run will end."""

from __future__ import annotations

import math
from time import perf_counter

import torch

from trainer.callback import Callback, TrainerView
from trainer.data.batches import batch_length


class Throughput(Callback):
    """Records the speed of each epoch's training, and how long the run will still take.

    - ``samples_per_second`` and ``batches_per_second``: of training alone, in this process.
    - ``data_seconds_share``: the share, 0 to 1, of that time that went by between batches: waiting for the data,
      plus the hooks that run after this callback's at a batch's end and before it at the next one's start.
    - ``eta_seconds``: time to the end of the run at the pace of this fit's epochs, validation and all callbacks
      included. The first epoch of a fit is the estimate only until there is another.
    - ``flops_per_second`` and ``flops_utilisation``: with ``flops_per_sample`` and ``peak_flops``. The second is
      the model FLOPs utilisation (MFU) of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

    The first batch of a fit counts in no rate: it compiles, chooses kernels and fills the memory pool. An epoch
    that has no other batch records no rate, and one that a fit resumes inside records no ``eta_seconds``. On a
    CUDA device the clock is read once its queue is empty, after that first batch and at the end of each epoch.

    Example::

        Trainer(model, optimizer, loss, callbacks=[Throughput()])
        Throughput(flops_per_sample=6 * 125e6 * 1024, peak_flops=989e12)  # 125M parameters, 1,024 tokens, an H100

        callbacks: {throughput: true}

    Args:
        flops_per_sample: Floating-point operations of forward and backward for one sample; for a transformer
            about 6 times parameters times tokens (Kaplan et al. 2020, arXiv:2001.08361).
        peak_flops: Operations per second that the device can do at most in the precision that is used.

    Raises:
        ValueError: A number is not above 0 and finite, or ``peak_flops`` comes without ``flops_per_sample``.
    """

    priority = 60
    writes = (
        "samples_per_second",
        "batches_per_second",
        "data_seconds_share",
        "eta_seconds",
        "flops_per_second",
        "flops_utilisation",
    )
    transient = ("_warm", "_started", "_last", "_seconds", "_samples", "_batches", "_waited", "_epochs", "_since")

    def __init__(self, flops_per_sample: float | None = None, peak_flops: float | None = None) -> None:
        for name, value in (("flops_per_sample", flops_per_sample), ("peak_flops", peak_flops)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}: give a finite number above 0, or leave it out")
        if peak_flops is not None and flops_per_sample is None:
            raise ValueError(f"peak_flops is {peak_flops}, but flops_per_sample is missing: give both")
        self.flops_per_sample = flops_per_sample
        self.peak_flops = peak_flops
        self._warm = False
        self._resumed_inside = False
        self._epochs = 0
        self._since = 0.0
        self._started = 0.0
        self._last = 0.0
        self._seconds = 0.0
        self._waited = 0.0
        self._samples = 0
        self._batches = 0

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Forget the fit before."""
        self._warm = False
        self._resumed_inside = trainer.state.batch_index > 0
        self._epochs = 0
        self._begin()
        self._since = self._started

    def on_train_epoch_start(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Start the epoch's clock."""
        self._begin()

    def on_train_batch_start(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """What went by since the batch before was waiting."""
        self._waited += perf_counter() - self._last

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Count the batch, unless it is the fit's first."""
        if not self._warm:
            self._warm = True
            _finish_work(trainer.device)
            self._begin()
            return
        self._samples += batch_length(trainer.state.batch)
        self._batches += 1
        self._last = perf_counter()

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Stop the epoch's clock."""
        _finish_work(trainer.device)
        self._seconds = perf_counter() - self._started

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Add the numbers to the epoch's metrics."""
        if self._batches and self._seconds > 0:
            trainer.state.metrics.update(self._rates())
        self._estimate(trainer)

    def _begin(self) -> None:
        self._started = self._last = perf_counter()
        self._seconds = self._waited = 0.0
        self._samples = self._batches = 0

    def _rates(self) -> dict[str, float]:
        samples_per_second = self._samples / self._seconds
        rates = {
            "samples_per_second": samples_per_second,
            "batches_per_second": self._batches / self._seconds,
            "data_seconds_share": self._waited / self._seconds,
        }
        if self.flops_per_sample is not None:
            rates["flops_per_second"] = samples_per_second * self.flops_per_sample
            if self.peak_flops is not None:
                rates["flops_utilisation"] = rates["flops_per_second"] / self.peak_flops
        return rates

    def _estimate(self, trainer: TrainerView) -> None:
        state, now = trainer.state, perf_counter()
        self._epochs += 1
        first = self._epochs == 1
        if not (first and self._resumed_inside):
            per_epoch = (now - self._since) / max(1, self._epochs - 1)
            left = 0 if state.stop_reason else max(0, state.max_epochs - state.epoch)
            state.metrics["eta_seconds"] = left * per_epoch
        if first:  # its warm-up says nothing about the epochs to come
            self._since = now


def _finish_work(device: torch.device) -> None:
    """Wait until the device has done what it was given; the CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
