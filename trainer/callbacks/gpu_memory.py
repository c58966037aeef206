"""GPUMemory: records the peak memory of each epoch on the GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from trainer.callback import Callback, TrainerView
from trainer.step_log import StepRecord

logger = logging.getLogger(__name__)

_MB = 2**20


class GPUMemory(Callback):
    """Records the peak memory of each epoch, validation included, on the trainer's CUDA device.

    - ``gpu_memory_peak_mb``: the most that tensors took at one time.
    - ``gpu_memory_active_mb``: the same, with what is freed but still in use by work that waits in a queue.
    - ``gpu_memory_reserved_mb``: the most that PyTorch's allocator held for them, which is what other processes
      miss (without the few hundred MB of CUDA itself).
    - ``gpu_memory_retries``: how often in the epoch the allocator had to free its reserve and try again, because
      the device was full: each waits for the device, and a run with some is close to its limit.

    The first three in MB of 2²⁰ bytes, of this process, from the allocator's own counts: the device is not waited
    for. On any other device nothing is recorded, which the log says once a fit. With `StepMetrics` the last of the
    steps that come over together has what the epoch took so far. See ``torch.cuda.memory_stats``.

    Example::

        Trainer(model, optimizer, loss, callbacks=[GPUMemory()])

        callbacks: {gpu_memory: true}
    """

    priority = 60
    writes = ("gpu_memory_peak_mb", "gpu_memory_active_mb", "gpu_memory_reserved_mb", "gpu_memory_retries")
    transient = ("_retries",)

    def __init__(self) -> None:
        self._retries = 0  # the allocator's count before this epoch

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Start measuring, also if the fit resumes inside an epoch."""
        if trainer.device.type == "cuda":
            self._reset(trainer.device)
        else:
            logger.info("no GPU memory is recorded: the run is on %s", trainer.device)

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        """Measure each epoch on its own."""
        if trainer.device.type == "cuda":
            self._reset(trainer.device)

    def on_log_steps(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:
        """Add the peaks of the epoch so far to the last of the steps."""
        if trainer.device.type == "cuda":
            records[-1].values.update(self._taken(trainer.device))

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Add the peaks to the epoch's metrics."""
        if trainer.device.type == "cuda":
            trainer.state.metrics.update(self._taken(trainer.device))

    def _reset(self, device: torch.device) -> None:
        torch.cuda.reset_peak_memory_stats(device)
        self._retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)

    def _taken(self, device: torch.device) -> dict[str, float]:
        counts = torch.cuda.memory_stats(device)  # empty before the first allocation
        return {
            "gpu_memory_peak_mb": torch.cuda.max_memory_allocated(device) / _MB,
            "gpu_memory_active_mb": counts.get("active_bytes.all.peak", 0) / _MB,
            "gpu_memory_reserved_mb": torch.cuda.max_memory_reserved(device) / _MB,
            "gpu_memory_retries": counts.get("num_alloc_retries", 0) - self._retries,
        }
