"""Checkpoint: saves fully evaluated epochs, the best and the latest."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from trainer.callback import Callback, TrainerView
from trainer.checkpoint import CheckpointManager, list_checkpoints, snapshot
from trainer.state import DIVERGED, ERROR, Mode, best_epoch

logger = logging.getLogger(__name__)


class Checkpoint(Callback):
    """Keeps the best epoch's checkpoint and the latest ones on disk.

    An epoch is written when it is due and the last write is long enough ago that writing takes no more than
    ``max_overhead`` of the time; where epochs take longer than that, each due epoch is written. A new best that
    comes in between waits in memory and is written no later than the next one, so the best epoch of what lies
    on disk lies there with it. Training is bit-exact, so epochs after the latest checkpoint come out the same
    when they are trained again. The end of training writes whatever waits.

    A diverged state is never written. An interruption inside an epoch is written as it stands.

    Args:
        folder: Where the files go.
        monitor: The metric that says which epoch is best.
        mode: ``"min"`` or ``"max"``.
        every_n_epochs: Epochs between checkpoints.
        keep_last: Latest checkpoints kept, at least 1; a damaged one is replaced by the one before it.
        max_overhead: Largest share of the time that writing may take, above 0; 1 writes whenever due.
    """

    priority = 95
    rank_zero_only = True
    saves = True
    transient = ("_written", "_waiting", "_last_write", "_cost")

    def __init__(
        self,
        folder: Path | str,
        monitor: str = "val_loss",
        mode: Mode = "min",
        every_n_epochs: int = 1,
        keep_last: int = 2,
        max_overhead: float = 0.05,
    ) -> None:
        if every_n_epochs < 1 or keep_last < 1 or not 0 < max_overhead <= 1:
            raise ValueError("every_n_epochs and keep_last must be at least 1, max_overhead in (0, 1]")
        if mode not in {"min", "max"}:
            raise ValueError(f"mode is {mode!r}: give 'min' or 'max'")
        self.manager = CheckpointManager(Path(folder))
        self.monitor = monitor
        self.mode: Mode = mode
        self.every_n_epochs = every_n_epochs
        self.keep_last = keep_last
        self.max_overhead = max_overhead
        self.reads = (monitor,)
        self._written: list[int] = []
        self._waiting: tuple[int, dict[str, Any]] | None = None
        self._last_write = 0.0
        self._cost = 0.0

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Start the clock; a resumed run takes over the files of the epochs that it goes on from."""
        files = list_checkpoints([self.manager.folder])
        self._written = [file.epoch for file in files if not file.batch and file.epoch <= trainer.state.epoch]
        self._last_write = time.monotonic()

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Write or hold the epoch."""
        state = trainer.state
        due = state.epoch % self.every_n_epochs == 0 and self._affordable()
        best = best_epoch(state.history, self.monitor, self.mode) == state.epoch
        if state.stop_reason == DIVERGED or not (due or best) or not _is_finite(trainer):
            return
        if due:
            self._write(trainer)
        else:
            self._waiting = (state.epoch, snapshot(self._made(trainer)))

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Write what waits, and the state in which training ended, unless it is of no use."""
        state = trainer.state
        if state.stop_reason in {DIVERGED, ERROR} or not _is_finite(trainer):
            self._write_waiting(trainer)
        elif state.batch_index or (state.epoch and state.epoch not in self._written):
            self._write(trainer)

    def _affordable(self) -> bool:
        since = time.monotonic() - self._last_write
        return since * self.max_overhead >= self._cost * (1 - self.max_overhead)

    def _made(self, trainer: TrainerView) -> dict[str, Any]:
        checkpoint = trainer.state_dict()
        trainer.fire("on_save_checkpoint", checkpoint)
        return checkpoint

    def _write(self, trainer: TrainerView) -> None:
        started = time.monotonic()
        state = trainer.state
        if best_epoch(state.history, self.monitor, self.mode) != state.epoch:
            self._write_waiting(trainer)
        path = self.manager.write(self._made(trainer), state.epoch, state.batch_index)
        self._waiting = None
        if not state.batch_index:
            self._written.append(state.epoch)
        self._retain(trainer)
        trainer.fire("on_after_save_checkpoint", path)
        self._last_write = time.monotonic()
        self._cost = self._last_write - started

    def _write_waiting(self, trainer: TrainerView) -> None:
        if self._waiting is None:
            return
        epoch, checkpoint = self._waiting
        path = self.manager.write(checkpoint, epoch)
        self._waiting = None
        self._written.append(epoch)
        trainer.fire("on_after_save_checkpoint", path)

    def _retain(self, trainer: TrainerView) -> None:
        best = best_epoch(trainer.state.history, self.monitor, self.mode)
        self.manager.retain({*sorted(self._written)[-self.keep_last :], *([best] if best else [])})


def _is_finite(trainer: TrainerView) -> bool:
    """Whether the weights are; the loss may not have seen the latest step yet, or nobody looked at it."""
    return all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())
