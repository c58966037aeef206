"""ConsoleLogging: prints lines of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.callback import Callback, TrainerView
from trainer.callbacks.metric_names import MetricNames
from trainer.callbacks.screen import Screen
from trainer.checks import check_count
from trainer.step_log import StepRecord


class ConsoleLogging(Callback):
    """Prints a line of metrics for the first epoch, every ``every_n_epochs`` epochs, and the last; also for steps.

    While the output takes nothing, such as on a full disk, lines are lost with one warning.

    Args:
        every_n_epochs: Epochs between two lines.
        every_n_steps: Optimizer steps between two lines for single steps; needs the callback `StepMetrics`, and
            prints steps that it records, when it transfers them. None: no such lines.
        metrics: Patterns such as ``val_*`` for the metrics to print, in the order of recording. None: all but
            those of single tensors, whose names have a ``/``.

    Raises:
        ValueError: A number is not an integer of at least 1, or steps are to be printed and nothing records them.

    Example::

        Trainer(model, optimizer, loss, callbacks=[ConsoleLogging(every_n_epochs=5)])

        callbacks: {console: {every_n_steps: 100, metrics: [train_loss, lr]}, step_metrics: true}
    """

    priority = 80
    reads = ("*",)
    reads_in = "on_log_metrics"
    rank_zero_only = True
    transient = ("_printed", "_step", "_screen")

    def __init__(
        self, every_n_epochs: int = 10, every_n_steps: int | None = None, metrics: Sequence[str] | None = None
    ) -> None:
        check_count("every_n_epochs", every_n_epochs)
        check_count("every_n_steps", every_n_steps, optional=True)
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.metrics = None if metrics is None else MetricNames(metrics)
        self._screen = Screen("stdout")
        self._printed = 0
        self._step = 0

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Note that nothing of this fit has been printed, and check that steps are recorded if asked for."""
        self._printed, log = 0, trainer.state.step_log
        if self.every_n_steps is None:
            return
        if log is None:
            raise ValueError(
                f"every_n_steps of the console is {self.every_n_steps}, and nothing records single steps: add "
                "StepMetrics (step_metrics: true in a study file)"
            )
        # Not the run's present step, as a checkpoint may hold records that are still to be printed.
        self._step = max((record.step for record in log), default=0)

    def on_log_steps(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:
        """Print the steps that are due: the first recorded one at or after each multiple."""
        if self.every_n_steps is None:
            return
        total = trainer.state.total_steps
        for record in records:
            if record.step // self.every_n_steps > self._step // self.every_n_steps:
                of = f"{record.step:>{len(str(total))}}/{total}" if total else f"{record.step}"
                self._screen.write(f"step {of}  epoch {record.epoch}  {self._numbers(record.values)}\n")
            self._step = max(self._step, record.step)

    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:
        """Print a line if it is due."""
        epoch = trainer.state.epoch
        if epoch == 1 or epoch % self.every_n_epochs == 0:
            self._print(trainer, metrics)

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Print the last epoch if that was not done, and why the run ended."""
        state = trainer.state
        if state.epoch not in {0, self._printed}:
            self._print(trainer, state.metrics)
        reason = f" ({state.stop_reason})" if state.stop_reason else ""
        self._screen.write(f"training ended after epoch {state.epoch} of {state.max_epochs}{reason}\n")

    def _print(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:
        state = trainer.state
        of = f"{state.epoch:>{len(str(state.max_epochs))}}/{state.max_epochs}"
        self._screen.write(f"epoch {of}  {self._numbers(metrics)}\n")
        self._printed = state.epoch

    def _numbers(self, metrics: Mapping[str, float]) -> str:
        return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if self._wants(name))

    def _wants(self, name: str) -> bool:
        return "/" not in name if self.metrics is None else name in self.metrics
