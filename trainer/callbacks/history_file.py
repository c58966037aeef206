"""HistoryFile: the base of callbacks that keep a file with one line per epoch."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TextIO

from trainer.callback import Callback, TrainerView
from trainer.events import LOG_PRIORITY
from trainer.files import replacing

logger = logging.getLogger(__name__)

#: The number of an epoch and its metrics.
Record = dict[str, float]


def epoch_record(epoch: int, metrics: Mapping[str, float]) -> Record:
    """One epoch for loggers: ``epoch``, then the metrics as plain floats.

    Raises:
        ValueError: A metric is called ``epoch``.
    """
    if "epoch" in metrics:
        raise ValueError("a metric is called 'epoch', as the number of the epoch is: give it another name")
    return {"epoch": epoch, **{name: float(value) for name, value in metrics.items()}}


class HistoryFile(Callback, ABC):
    """Keeps the file equal to the history: each epoch is appended when it ends.

    At its start, a fit rewrites the file from the history that it resumes from, so that the file never has an
    epoch twice, nor one that the run has lost. It rewrites it again at its end, for metrics that came after an
    epoch was logged. While the file can't be written, training continues, with one warning; the next successful
    write makes the file complete.

    Args:
        path: The file; its folder is made if needed.
    """

    priority = LOG_PRIORITY
    reads = ("*",)
    reads_in = "on_log_metrics"
    rank_zero_only = True
    transient: ClassVar[tuple[str, ...]] = ("_started", "_whole")

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._started = False
        self._whole = False

    def accepts(self, record: Record) -> bool:  # noqa: ARG002
        """Whether ``record`` can be appended to the present file."""
        return True

    @abstractmethod
    def write_line(self, file: TextIO, record: Record) -> None:
        """Write one epoch."""

    def write_all(self, file: TextIO, records: Sequence[Record]) -> None:
        """Write a whole file."""
        for record in records:
            self.write_line(file, record)

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Rewrite the file from the history."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rewrite(trainer)
        self._started = self._whole = True

    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:
        """Append the epoch, or rewrite the file if a line can't be appended."""
        record = epoch_record(trainer.state.epoch, metrics)
        if self._whole and self.accepts(record):
            self._try(lambda: self._append(record))
        else:
            self._try(lambda: self._rewrite(trainer))

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Rewrite the file from the history once more."""
        if not self._started:  # the fit failed before `on_fit_start`, so the file is another run's
            return
        self._started = False
        self._try(lambda: self._rewrite(trainer))
        if not self._whole:
            logger.warning("%s lacks epochs of the run, which has ended", self.path)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
            self._whole = True
        except OSError as error:
            if self._whole:
                logger.warning("%s can't be written, and lacks epochs until it can: %s", self.path, error)
            self._whole = False

    def _append(self, record: Record) -> None:
        # Not mode "a": if the file was removed, that would make a new one without the first rows.
        with self.path.open("r+", encoding="utf-8", newline="") as file:
            file.seek(0, os.SEEK_END)
            self.write_line(file, record)

    def _rewrite(self, trainer: TrainerView) -> None:
        history = trainer.state.history
        records = [epoch_record(epoch, metrics) for epoch, metrics in enumerate(history, start=1)]
        with replacing(self.path) as file:
            self.write_all(file, records)
