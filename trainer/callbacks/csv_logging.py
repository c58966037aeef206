"""CSVLogging: writes one row per epoch to a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from trainer.callbacks.history_file import HistoryFile, Record


class CSVLogging(HistoryFile):
    """Writes the history to ``path`` as CSV: a header, then one row per finished epoch.

    A resumed run starts the file anew from the history it resumed with, so that it never holds an epoch twice
    nor one that the run has forgotten. A metric that first appears later adds a column; where an epoch lacks a
    metric its field is empty. If the disk fails, training continues with one warning, and the file is
    brought up to date once it can be written.

    Args:
        path: The file; its folder is made if needed.

    Raises:
        OSError: The file can't be written when a fit starts.
        ValueError: A metric is called ``epoch``.

    Example::

        Trainer(model, optimizer, loss, callbacks=[CSVLogging("run/metrics.csv")])
    """

    transient = (*HistoryFile.transient, "_columns")

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self._columns: list[str] = []

    def accepts(self, record: Record) -> bool:
        """Whether every metric has a column."""
        return record.keys() <= set(self._columns)

    def write_line(self, file: TextIO, record: Record) -> None:
        """Write one row."""
        csv.DictWriter(file, self._columns).writerow(record)

    def write_all(self, file: TextIO, records: Sequence[Record]) -> None:
        """Write the header, with a column for every metric of any epoch, and the rows."""
        self._columns = list(dict.fromkeys(["epoch", *(name for record in records for name in record)]))
        csv.DictWriter(file, self._columns).writeheader()
        super().write_all(file, records)
