"""JSONLogging: writes one JSON object per epoch to a JSON Lines file."""

from __future__ import annotations

from typing import TextIO

from trainer.callbacks.history_file import HistoryFile, Record
from trainer.files import json_line


class JSONLogging(HistoryFile):
    """Writes the history to ``path``, one line per finished epoch: ``{"epoch": 1, "train_loss": 0.7, …}``.

    The lines are strict JSON (RFC 8259), in UTF-8, numbers to the last digit. A number that is not finite is the
    string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``, which ``float`` reads back. An epoch that lacks a metric
    lacks its key. A resumed run starts the file anew from the history it resumed with. If the disk fails,
    training continues with one warning, and the file is brought up to date once it can be written.

    Args:
        path: The file, such as ``metrics.jsonl``; its folder is made if needed.

    Raises:
        OSError: The file can't be written when a fit starts.
        ValueError: A metric is called ``epoch``.

    Example::

        Trainer(model, optimizer, loss, callbacks=[JSONLogging("run/metrics.jsonl")])
    """

    def write_line(self, file: TextIO, record: Record) -> None:
        """Write one object and a line feed."""
        file.write(json_line(record))
