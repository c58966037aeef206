"""ConsoleLogging: a line of numbers for people to follow."""

from collections.abc import Mapping

from trainer.callback import Callback, TrainerView


class ConsoleLogging(Callback):
    """Prints a line of metrics every ``every_n_epochs`` epochs, for the first and the last.

    Args:
        every_n_epochs: Epochs between lines.
    """

    priority = 80
    reads = ("*",)
    reads_in = "on_log_metrics"
    rank_zero_only = True

    def __init__(self, every_n_epochs: int = 10) -> None:
        if every_n_epochs < 1:
            raise ValueError("every_n_epochs must be at least 1")
        self.every_n_epochs = every_n_epochs

    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        """Print where a line is due."""
        state = trainer.state
        if state.epoch == 1 or state.epoch % self.every_n_epochs == 0:
            self._print(trainer)

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Print the last epoch if it was not, and why the run ended."""
        state = trainer.state
        if state.epoch > 1 and state.epoch % self.every_n_epochs != 0:
            self._print(trainer)
        reason = f" ({state.stop_reason})" if state.stop_reason else ""
        print(f"training ended after epoch {state.epoch} of {state.max_epochs}{reason}", flush=True)

    def _print(self, trainer: TrainerView) -> None:
        state = trainer.state
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in state.metrics.items())
        print(f"epoch {state.epoch:>{len(str(state.max_epochs))}}/{state.max_epochs}  {numbers}", flush=True)
