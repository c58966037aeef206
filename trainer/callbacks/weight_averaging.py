"""WeightAveraging: evaluates and saves the mean of the weights over the last part of a run."""

import logging

from torch.optim.swa_utils import get_swa_multi_avg_fn

from trainer.callback import TrainerView
from trainer.callbacks.averaged import AveragedWeights
from trainer.state import CONTINUED, DIVERGED, ERROR, PREFLIGHT, PRUNED

logger = logging.getLogger(__name__)


class WeightAveraging(AveragedWeights):
    """Evaluates and saves the mean of the weights after each of the run's last optimizer steps.

    Every step counts the same. Stochastic weight averaging (Izmailov et al. 2018, arXiv:1803.05407) takes the mean
    over the last quarter of a run at a constant or cyclic learning rate; Sanyal et al. 2023 (arXiv:2306.03241)
    average late checkpoints of language models, best at a high learning rate.

    From the epoch on in which averaging begins, validation, checkpoints and the model after the fit have the mean;
    see `trainer.callbacks.averaged.AveragedWeights`. A run that ends earlier than planned keeps the mean of what
    it averaged; one that ends before averaging began keeps its weights, with a warning. A resumed run with a
    longer plan begins anew.

    The running statistics of BatchNorm are the mean of those of training over the same steps: close to, but not
    the statistics of the averaged weights. Those need a pass over the training inputs after the fit::

        torch.optim.swa_utils.update_bn(inputs, trainer.model)

    Example::

        Trainer(model, optimizer, loss, max_steps=10_000, callbacks=[WeightAveraging(1000)])

        callbacks: {weight_averaging: {last_steps: 0.1}}

    Args:
        last_steps: An int: the number of optimizer steps, at least 1; a run with fewer is averaged as a whole. A
            float above 0 and below 1: their share of the run, rounded to at least one step.

    Raises:
        ValueError: ``last_steps`` is out of range; the fit does not know its number of steps; or see the base
            class.
    """

    def __init__(self, last_steps: float = 0.25) -> None:
        whole = isinstance(last_steps, int) and not isinstance(last_steps, bool)
        if last_steps < 1 if whole else not (isinstance(last_steps, float) and 0 < last_steps < 1):
            raise ValueError(
                f"last_steps is {last_steps!r}: give steps (an integer of at least 1), or a share of the run "
                "(above 0, below 1)"
            )
        super().__init__()
        self.last_steps = last_steps

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Check that the number of steps of the run is known."""
        self._first_step(trainer)
        super().on_fit_start(trainer)

    def _after_step(self, trainer: TrainerView, step: int) -> None:
        """Add the new weights to the mean, once averaging has begun."""
        before = self._first_step(trainer)
        if self._average and step - self._updates <= before:  # the plan has become longer
            self._forget()
        if step > before:
            self._update(trainer, get_swa_multi_avg_fn())  # type: ignore[no-untyped-call]

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Warn if nothing was averaged."""
        super().on_fit_end(trainer)
        state = trainer.state
        over = not state.batch_index and state.stop_reason not in CONTINUED | {DIVERGED, ERROR, PREFLIGHT, PRUNED}
        if over and state.step and not self._average:
            logger.warning(
                "no weights were averaged: the run ended after %d of %s planned steps, and averaging begins after "
                "%d; the weights are those of the last step",
                state.step,
                state.total_steps,
                self._first_step(trainer),
            )

    def _first_step(self, trainer: TrainerView) -> int:
        """The number of steps before the first averaged one; computed anew, as a new batch size changes it."""
        total = trainer.state.total_steps
        if total is None:
            raise ValueError(
                f"last_steps is {self.last_steps}, but the number of steps of this run is unknown, because its "
                "training data has no length: give max_steps"
            )
        if isinstance(self.last_steps, int):
            return max(0, total - self.last_steps)
        return total - min(total, max(1, round(self.last_steps * total)))
