"""ConsoleLogging: a line of numbers for people to follow."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.callback import Callback, TrainerView


class ConsoleLogging(Callback):
    """Prints a line of metrics every ``every_n_epochs`` epochs, for the first and the last.

    Args:
        every_n_epochs: Epochs between lines.

    Raises:
        ValueError: ``every_n_epochs`` is below 1.

    Example::

        Trainer(model, optimizer, loss, callbacks=[ConsoleLogging(every_n_epochs=5)])
    """

    priority = 80
    reads = ("*",)
    reads_in = "on_log_metrics"
    rank_zero_only = True
    transient = ("_printed",)

    def __init__(self, every_n_epochs: int = 10) -> None:
        if every_n_epochs < 1:
            raise ValueError("every_n_epochs must be at least 1")
        self.every_n_epochs = every_n_epochs
        self._printed = 0

    def on_fit_start(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Nothing of this fit has been printed yet."""
        self._printed = 0

    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:
        """Print where a line is due."""
        epoch = trainer.state.epoch
        if epoch == 1 or epoch % self.every_n_epochs == 0:
            self._print(trainer, metrics)

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Print the last epoch if it was not, and why the run ended."""
        state = trainer.state
        if state.epoch not in {0, self._printed}:
            self._print(trainer, state.metrics)
        reason = f" ({state.stop_reason})" if state.stop_reason else ""
        print(f"training ended after epoch {state.epoch} of {state.max_epochs}{reason}", flush=True)

    def _print(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:
        state = trainer.state
        # Those of single tensors, `grad_norm/0.weight`, are for files.
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if "/" not in name)
        print(f"epoch {state.epoch:>{len(str(state.max_epochs))}}/{state.max_epochs}  {numbers}", flush=True)
        self._printed = state.epoch
