"""StepLog: the file with the metrics of single optimizer steps, from which trackers get steps that they lack."""

from __future__ import annotations

import csv
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from trainer.files import json_line, replacing

logger = logging.getLogger(__name__)


@dataclass
class StepRecord:
    """The metrics of one optimizer step.

    Attributes:
        step: Its number, from 1.
        epoch: Its epoch, from 1.
        values: Metrics by name; hooks of ``on_log_steps`` may add to them.
    """

    step: int
    epoch: int
    values: dict[str, float] = field(default_factory=dict)

    def flat(self, prefix: str = "") -> dict[str, float]:
        """One mapping of ``step``, ``epoch`` and the metrics, whose names get the prefix.

        Raises:
            ValueError: A metric is called ``step`` or ``epoch``.
        """
        taken = {"step", "epoch"} & self.values.keys()
        if taken:
            name = min(taken)
            raise ValueError(f"a metric is called {name!r}, as the number of the {name} is: give it another name")
        return {
            "step": self.step,
            "epoch": self.epoch,
            **{f"{prefix}{name}": float(value) for name, value in self.values.items()},
        }


class StepLog:
    """A file with one line per recorded step, in CSV or JSON Lines by its suffix.

    It is cut back to the step from which a run resumes, so that it never has a step twice, nor one that the run
    has lost. While the file can't be written, the records wait in memory, with one warning.

    Args:
        path: The file, ``….csv`` or ``….jsonl``; its folder is made if needed.
        earlier: The same file of each earlier attempt at this run.

    Attributes:
        epoch_ends: The last step of each epoch, by the epoch's number.
        unwritten: The records that wait to be written.
    """

    def __init__(self, path: Path, earlier: Iterable[Path] = ()) -> None:
        self.path = path
        self.earlier = tuple(earlier)
        self.epoch_ends: dict[int, int] = {}
        self.unwritten: list[StepRecord] = []
        self._columns: list[str] = []
        self._is_csv = path.suffix == ".csv"
        self._size = 0
        self._refused = False

    def __iter__(self) -> Iterator[StepRecord]:
        """The records in the file, in order; without those that wait."""
        return _read(self.path)

    def cut(self, last: int) -> int:
        """Start the file with the steps up to ``last`` from this file or one of an earlier attempt.

        The file that reaches furthest is used.

        Returns:
            The last step in the file; 0 if it has none.

        Raises:
            OSError: The file can't be written.
        """
        self.unwritten, self._refused = [], False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        source = max((self.path, *self.earlier), key=lambda path: _last_step(path, last))
        reached = _last_step(source, last)
        kept = (record for record in _read(source) if record.step <= reached)
        self._rewrite(kept, _header(source) if reached and self._is_csv else [])
        return reached

    def append(self, records: Sequence[StepRecord]) -> None:
        """Write the waiting records and then these; on an OSError all wait for the next call."""
        self.unwritten += records
        try:
            columns = self._needed_columns()
            if not self.path.exists():
                self._rewrite([], columns)
            elif columns != self._columns:
                os.truncate(self.path, self._size)  # cut what a failed write left; these records still wait
                self._rewrite(_read(self.path), columns)
            self._add()
        except OSError as error:
            if not self._refused:
                logger.warning("%s can't be written, and lacks steps until it can: %s", self.path, error)
            self._refused = True
        else:
            self.unwritten, self._refused = [], False

    def _needed_columns(self) -> list[str]:
        if not self._is_csv:
            return []
        return list(
            dict.fromkeys((*self._columns, *(name for record in self.unwritten for name in record.flat())))
        )

    def _add(self) -> None:
        # Not mode "a": a part of a line that a failed write left must be overwritten.
        with self.path.open("r+", encoding="utf-8", newline="") as file:
            file.seek(self._size)
            file.truncate()
            self._write(file, self.unwritten, self._columns)
            file.flush()
            size = file.tell()
        self._size = size

    def _rewrite(self, records: Iterable[StepRecord], columns: list[str]) -> None:
        with replacing(self.path) as file:
            if columns:
                csv.DictWriter(file, columns).writeheader()
            self._write(file, records, columns)
        self._size, self._columns = self.path.stat().st_size, columns

    def _write(self, file: TextIO, records: Iterable[StepRecord], columns: list[str]) -> None:
        if self._is_csv:
            csv.DictWriter(file, columns).writerows(record.flat() for record in records)
        else:
            file.writelines(json_line(record.flat()) for record in records)


def _read(path: Path) -> Iterator[StepRecord]:
    """The records of a file; none if it does not exist."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", newline="") as file:
        lines = _whole_lines(file)
        rows: Iterator[Mapping[str, Any]]
        rows = csv.DictReader(lines) if path.suffix == ".csv" else map(json.loads, lines)
        for row in rows:
            values = {name: float(value) for name, value in row.items() if value != ""}
            yield StepRecord(int(values.pop("step")), int(values.pop("epoch")), values)


def _whole_lines(file: TextIO) -> Iterator[str]:
    """The lines without one that a killed process left unfinished."""
    return (line for line in file if line.endswith("\n"))


def _last_step(path: Path, limit: int) -> int:
    """The last step up to ``limit`` in a file; 0 if there is none."""
    return max((record.step for record in _read(path) if record.step <= limit), default=0) if limit else 0


def _header(path: Path) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file))
