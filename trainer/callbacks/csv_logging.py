"""CSVLogging: one row an epoch in a CSV file."""

import csv
from collections.abc import Mapping
from pathlib import Path

from trainer.callback import Callback, TrainerView


class CSVLogging(Callback):
    """Keeps ``path`` equal to the history: a header, then one row per finished epoch.

    A resumed run starts the file anew from the history it resumed with, so that it never holds an epoch twice
    nor one that the run has forgotten. A metric that first appears later adds a column.

    Args:
        path: The file; its folder is made if needed.
    """

    priority = 80
    reads = ("*",)
    reads_in = "on_log_metrics"
    rank_zero_only = True
    transient = ("_columns",)

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._columns: list[str] = []

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Bring the file to the history."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rewrite(trainer)

    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:
        """Append the epoch, or write all anew where a column is new."""
        if metrics.keys() - set(self._columns):
            self._rewrite(trainer)
            return
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow([trainer.state.epoch, *(metrics.get(name, "") for name in self._columns)])

    def _rewrite(self, trainer: TrainerView) -> None:
        history = trainer.state.history
        self._columns = list(dict.fromkeys(name for metrics in history for name in metrics))
        aside = self.path.with_name(f".{self.path.name}.part")
        with aside.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["epoch", *self._columns])
            for epoch, metrics in enumerate(history, start=1):
                writer.writerow([epoch, *(metrics.get(name, "") for name in self._columns)])
        aside.replace(self.path)
