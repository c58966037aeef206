"""ProgressBar: shows the progress of an epoch, on a terminal or in lines of text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from shutil import get_terminal_size
from time import monotonic

from trainer.callback import Callback, TrainerView
from trainer.callbacks.metric_names import MetricNames
from trainer.callbacks.screen import Screen
from trainer.events import LOG_PRIORITY
from trainer.step_log import StepRecord

# Seconds between two drawings, and characters of the bar itself.
_REFRESH_S = 0.2
_WIDTH = 20


class ProgressBar(Callback):
    """Shows the progress of the current epoch on stderr, with batches per second and chosen metrics.

    On a terminal a line is drawn anew a few times a second, and cleared for what others print. Where there is
    none, or only one that can't go back in a line (``TERM=dumb``), a line is printed at each tenth of an epoch,
    for epochs of unknown length none. An epoch that has its length in steps (``validate_every``) shows its steps.
    The metrics are those of the latest epoch, with `StepMetrics` those of the latest steps that came over: nothing
    is read from the device for them.

    Example::

        Trainer(model, optimizer, loss, callbacks=[ProgressBar(["train_loss", "val_accuracy"])])

        callbacks: {progress_bar: true, console: false}

    Args:
        metrics: Patterns such as ``val_*`` for the metrics to show.
    """

    priority = LOG_PRIORITY - 1
    reads = ("*",)
    reads_in = "on_log_metrics"
    rank_zero_only = True
    transient = ("_drawn", "_length", "_tenth", "_values", "_started", "_first", "_live", "_screen")

    def __init__(self, metrics: Sequence[str] = ("train_loss", "val_loss")) -> None:
        self.metrics = MetricNames(metrics)
        self._screen = Screen("stderr")
        self._live = False
        self._values: dict[str, float] = {}
        self._drawn = self._started = 0.0
        self._length = 0  # length of the line on the terminal
        self._tenth = 0
        self._first = 0  # batches of the epoch that were finished before the clock started

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Find out whether the output is a terminal that can redraw a line."""
        self._live = self._screen.is_terminal and os.environ.get("TERM") != "dumb"
        self._values = dict(trainer.state.metrics)
        self._begin(trainer)

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        """Start the epoch's clock."""
        self._begin(trainer)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Draw the bar, or print a line, if it is due."""
        if self._live:
            now = monotonic()
            if now - self._drawn >= _REFRESH_S:
                self._drawn = now
                self._draw(trainer)
        elif (tenth := _tenth(trainer)) > self._tenth:
            self._tenth = tenth
            self._screen.write(f"{self._line(trainer)}\n")

    def on_log_steps(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:  # noqa: ARG002
        """Take over the latest metrics, and clear the line for what others print."""
        self._values.update(records[-1].values)
        self._clear()

    def on_train_epoch_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Clear the line for that of the epoch."""
        self._clear()

    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        """Take over the latest metrics."""
        self._values = dict(metrics)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:  # noqa: ARG002
        """Clear the line for what others print about the error."""
        self._clear()

    def on_fit_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Clear the line before others print how the run ended."""
        self._clear()

    def _begin(self, trainer: TrainerView) -> None:
        self._drawn = self._started = monotonic()
        self._first = trainer.state.batch_index
        self._tenth = _tenth(trainer)

    def _draw(self, trainer: TrainerView) -> None:
        line = self._line(trainer)[: get_terminal_size().columns - 1]
        self._screen.write("\r" + line.ljust(self._length))
        self._length = len(line)

    def _clear(self) -> None:
        if self._length:
            self._screen.write("\r" + " " * self._length + "\r")
            self._length = 0

    def _line(self, trainer: TrainerView) -> str:
        state = trainer.state
        done, total = _progress(trainer)
        if total:
            share = min(1.0, done / total)
            bar = ("#" * int(share * _WIDTH)).ljust(_WIDTH, ".")
            where = f"{share:4.0%} [{bar}] {done}/{total}"
        else:
            where = f"batch {state.batch_index}"
        seconds = monotonic() - self._started
        pace = f"  {(state.batch_index - self._first) / seconds:.3g} batches/s" if seconds > 0 else ""
        chosen = [(name, value) for name, value in self._values.items() if name in self.metrics]
        numbers = "".join(f"  {name} {value:.4g}" for name, value in chosen)
        return f"epoch {state.epoch + 1}/{state.max_epochs}  {where}{pace}{numbers}"


def _progress(trainer: TrainerView) -> tuple[int, int | None]:
    """What is done of the epoch, and how much it is, if known: in batches, or in steps where these decide."""
    state, steps = trainer.state, trainer.plan.epoch_steps
    if steps is None:
        return state.batch_index, state.batches_per_epoch
    return state.step - state.epoch_start_step, steps


def _tenth(trainer: TrainerView) -> int:
    done, total = _progress(trainer)
    return 10 * done // total if total else 0
