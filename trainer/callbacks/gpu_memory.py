"""GPUMemory: the most memory that an epoch took on the GPU."""

from __future__ import annotations

import logging

import torch

from trainer.callback import Callback, TrainerView

logger = logging.getLogger(__name__)

_MB = 2**20


class GPUMemory(Callback):
    """Records the peak memory of each epoch, validation included, on the trainer's CUDA device.

    - ``gpu_memory_peak_mb``: the most that tensors took at one time.
    - ``gpu_memory_reserved_mb``: the most that PyTorch's allocator held for them, which is what other processes
      miss (without the few hundred MB of CUDA itself).

    Both in MB of 2²⁰ bytes, of this process, from the allocator's own counts: the device is not waited for. On any
    other device nothing is recorded, which the log says once a fit. See ``torch.cuda.max_memory_allocated``.

    Example::

        Trainer(model, optimizer, loss, callbacks=[GPUMemory()])

        callbacks: {gpu_memory: true}
    """

    priority = 60
    writes = ("gpu_memory_peak_mb", "gpu_memory_reserved_mb")

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Start to measure, also where an epoch resumes."""
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.device)
        else:
            logger.info("no GPU memory is recorded: the run is on %s", trainer.device)

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        """Measure each epoch on its own."""
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.device)

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Add the peaks to the epoch's metrics."""
        if trainer.device.type == "cuda":
            metrics, device = trainer.state.metrics, trainer.device
            metrics["gpu_memory_peak_mb"] = torch.cuda.max_memory_allocated(device) / _MB
            metrics["gpu_memory_reserved_mb"] = torch.cuda.max_memory_reserved(device) / _MB
