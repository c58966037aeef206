"""NaNDetection: ends a run whose loss is no longer finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.callback import Callback, TrainerView
from trainer.checks import check_count
from trainer.metrics.epoch import KEPT, EpochMetrics, stacked_weights
from trainer.state import DIVERGED

logger = logging.getLogger(__name__)


class NaNDetection(Callback):
    """Stops the run with the reason ``"diverged"`` when a watched metric is NaN or infinite.

    It checks all of these metrics at the end of an epoch. Those that every training batch records, such as
    ``train_loss``, it also checks every ``every_n_batches`` batches, for all batches since the last check; batches
    without weight do not count. The run then ends after the current batch. A check does no work in the step and
    waits for nothing: on a CUDA device the answer to one check is read at the next one.

    Example::

        Trainer(model, optimizer, loss, callbacks=[NaNDetection(["train_loss", "val_loss"])])

        callbacks: {nan_detection: {metrics: [train_loss, val_loss]}}

    Args:
        metrics: Names of the metrics to watch; one that an epoch does not record is skipped.
        every_n_batches: Batches between two checks inside an epoch, 1 to 128.

    Raises:
        TypeError: ``metrics`` is one name, not a list.
        ValueError: ``every_n_batches`` is out of range.
    """

    priority = 5
    transient = ("_asked",)

    def __init__(self, metrics: Sequence[str] = ("train_loss", "val_loss"), every_n_batches: int = 32) -> None:
        if isinstance(metrics, str):
            raise TypeError(f"metrics is {metrics!r}: give a list of names, such as [{metrics!r}]")
        check_count("every_n_batches", every_n_batches)
        if every_n_batches > KEPT:
            raise ValueError(f"every_n_batches is {every_n_batches}: give 1 to {KEPT}")
        self.metrics = tuple(metrics)
        self.every_n_batches = every_n_batches
        self._watched = tuple(name for name in self.metrics if name.startswith("train_"))
        self._asked: list[_Question] = []

    def on_fit_start(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Drop open questions of an earlier fit."""
        self._asked = []

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """If a check is due, check the batches since the previous one."""
        state = trainer.state
        if state.batch_index % self.every_n_batches:
            return
        asked, self._asked = self._asked, self._ask(trainer)
        if not answers_late(trainer.device):
            asked, self._asked = self._asked, []
        for question in asked:
            batch = question.answer()
            if batch:
                logger.warning(
                    "epoch %d: %s of batch %d is not finite: diverged, and ended after batch %d, step %d",
                    state.epoch + 1,
                    question.name,
                    batch,
                    state.batch_index,
                    state.step,
                )
                state.stop(DIVERGED, now=True)

    def on_train_epoch_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Drop open questions: the metrics of the epoch answer them."""
        self._asked = []

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Check the epoch's metrics."""
        state = trainer.state
        bad = [name for name in self.metrics if not math.isfinite(state.metrics.get(name, 0.0))]
        if bad:
            verb = "is" if len(bad) == 1 else "are"
            logger.warning("epoch %d: %s %s not finite: diverged", state.epoch, ", ".join(bad), verb)
            state.stop(DIVERGED)

    def _ask(self, trainer: TrainerView) -> list[_Question]:
        recorder, last = trainer.recorder, trainer.state.batch_index
        bad = {name: _not_finite(recorder, name, self.every_n_batches) for name in self._watched}
        return [_Question.of(name, last, flags) for name, flags in bad.items() if flags is not None]


@dataclass(frozen=True)
class _Question:
    """Which of the latest batches were not finite, in transfer to the host.

    Attributes:
        name: The name of the metric.
        last: The number of the last of these batches.
        flags: For each batch, whether it was not finite; on the host once ``ready`` is done.
        ready: The event to wait for; None if there is none.
    """

    name: str
    last: int
    flags: Tensor
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, name: str, last: int, flags: Tensor) -> _Question:
        if not flags.is_cuda:
            return cls(name, last, flags, None)
        host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        host.copy_(flags, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(flags.device))
        return cls(name, last, host, ready)

    def answer(self) -> int:
        """The number of the first batch that was not finite; 0 if there is none."""
        if self.ready is not None:
            self.ready.synchronize()
        flags = self.flags.tolist()
        return self.last - len(flags) + flags.index(True) + 1 if True in flags else 0


def answers_late(device: torch.device) -> bool:
    """Whether answers of the device are read only at the next check, so that nothing waits for them."""
    return device.type == "cuda"


def _not_finite(recorder: EpochMetrics, name: str, batches: int) -> Tensor | None:
    """For each of the latest batches, whether its value was not finite and has weight.

    None if no batch recorded the metric, or if a device that answers at once shows that all are finite.
    """
    values, weights = recorder.latest(name, batches)
    if not values:
        return None
    stacked = torch.stack(values)
    if not answers_late(stacked.device) and math.isfinite(stacked.sum()):
        return None
    return ~stacked.isfinite() & (stacked_weights(weights, stacked.device, torch.float32) != 0)
