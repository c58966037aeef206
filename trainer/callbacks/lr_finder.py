"""LRFinder: suggests a learning rate by a short run over growing learning rates."""

from __future__ import annotations

import logging
import math

import numpy as np
from torch.optim import Optimizer

from trainer.callback import Callback, TrainerView
from trainer.checkpoint.manager import snapshot
from trainer.checks import check_count
from trainer.lr_schedulers import set_rate
from trainer.state import SCHEDULER_STEP, VALIDATION
from trainer.step.parts import refuse_lazy

logger = logging.getLogger(__name__)

_REASON = "lr_finder"


class LRFinder(Callback):
    """Trains a few batches with exponentially growing learning rates and suggests one.

    A fit with this callback is a run of its own. It ends after ``steps`` batches, however long the trainer's is,
    or when the smoothed loss has risen from its lowest value by ``divergence`` - 1 times that value's magnitude
    (the first tenth of the batches is not looked at, because the running mean then rests on few losses). Then,
    also after an error, the trainer is as it was: weights, optimizer, scheduler, progress and the states of the
    other callbacks. Nothing is validated, and the scheduler waits.

    Epochs end in this run as in any other, so use a trainer without callbacks that write files or stop early.

    The groups' learning rates keep the ratios that they have (those of ``initial_lr``, where a scheduler has set
    it); the numbers given and found here are the first group's.

    Source: Smith, "Cyclical learning rates for training neural networks", arXiv:1506.01186, where the rate grows
    linearly; the exponential growth and the end at four times the lowest loss are fastai's.

    Args:
        min_lr: Learning rate of the first batch, above 0.
        max_lr: Learning rate of the last batch, above ``min_lr``.
        steps: Batches, at least 2.
        smoothing: Weight of the newest loss in the running mean, in (0, 1]; 1 leaves the losses as they are.
        divergence: See above; above 1, ``inf`` to continue to ``max_lr``.

    Attributes:
        learning_rates: The first group's learning rate, by batch.
        losses: The loss of each batch before its step.
        smoothed_losses: Their running mean, corrected for its start at 0.
        suggestion: The learning rate in the middle of the tenth of the batches over which the smoothed loss fell
            most, on its way to the minimum; None if it never fell, or before a run.

    Raises:
        ValueError: An argument is out of range; at fit start, if the first group's learning rate is not above 0,
            or the model has lazy modules without weights.

    Example::

        finder = LRFinder(max_lr=10.0)
        with trainer.callbacks.add(finder):
            trainer.fit(train)
        print(finder.suggestion)
    """

    priority = 1
    reads_batches = True
    needs_whole_model = "keeps and restores all weights"
    transient = ("learning_rates", "losses", "smoothed_losses", "suggestion", "_mean", "_before")

    def __init__(
        self,
        min_lr: float = 1e-7,
        max_lr: float = 1.0,
        steps: int = 100,
        smoothing: float = 0.05,
        divergence: float = 4.0,
    ) -> None:
        if not 0 < min_lr < max_lr < math.inf:
            raise ValueError(f"min_lr is {min_lr} and max_lr {max_lr}: give 0 < min_lr < max_lr")
        check_count("steps", steps, 2)
        if not 0 < smoothing <= 1:
            raise ValueError(f"smoothing is {smoothing}: give the weight of the newest loss, in (0, 1]")
        if not divergence > 1:
            raise ValueError(f"divergence is {divergence}: give a factor above 1")
        self.min_lr = min_lr
        self.max_lr = max_lr
        self.steps = steps
        self.smoothing = smoothing
        self.divergence = divergence
        self.learning_rates: list[float] = []
        self.losses: list[float] = []
        self.smoothed_losses: list[float] = []
        self.suggestion: float | None = None
        self._mean = 0.0
        self._before: _Before | None = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Save the trainer's state."""
        self.learning_rates, self.losses, self.smoothed_losses = [], [], []
        self.suggestion, self._mean = None, 0.0
        refuse_lazy(trainer.model, "a fit with LRFinder, which puts all weights back")
        self._before = _Before(trainer)

    def on_train_batch_start(self, trainer: TrainerView) -> None:
        """Set the learning rate of this batch."""
        step = len(self.losses)
        rate = self.min_lr * (self.max_lr / self.min_lr) ** (step / (self.steps - 1))
        assert self._before is not None
        for group, ratio in zip(trainer.optimizer.param_groups, self._before.ratios, strict=True):
            set_rate(group, rate * ratio)
        trainer.state.skip(SCHEDULER_STEP)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Note the loss; end the run after the last batch, or if the loss diverges."""
        if trainer.state.loss is None:  # a hook has skipped the batch
            return
        loss = float(trainer.state.loss.detach())
        self.learning_rates.append(float(trainer.optimizer.param_groups[0]["lr"]))
        self.losses.append(loss)
        self._mean = (1 - self.smoothing) * self._mean + self.smoothing * loss
        self.smoothed_losses.append(self._mean / (1 - (1 - self.smoothing) ** len(self.losses)))
        if len(self.losses) >= self.steps or self._diverges():
            trainer.state.stop(_REASON, now=True)

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Skip the validation and the scheduler: the end of an epoch has no meaning in this run."""
        trainer.state.skip(VALIDATION)
        trainer.state.skip(SCHEDULER_STEP)

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Rewind the progress, so that the run continues past the trainer's own end."""
        assert self._before is not None
        self._before.rewind(trainer)

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Restore the trainer, and find the steepest fall."""
        if self._before is None:
            return
        before, self._before = self._before, None
        before.restore(trainer)
        self.suggestion = self._steepest()

    @property
    def _start(self) -> int:
        """The first batch whose smoothed loss is the mean of enough losses to be used."""
        return self.steps // 10

    def _diverges(self) -> bool:
        latest = self.smoothed_losses[-1]
        if not math.isfinite(latest):
            return True
        lowest = min(self.smoothed_losses[self._start :], default=latest)
        return latest - lowest > (self.divergence - 1) * abs(lowest)

    def _steepest(self) -> float | None:
        losses = np.array([loss for loss in self.smoothed_losses[self._start :] if math.isfinite(loss)])
        lowest = int(losses.argmin()) if len(losses) else 0
        if lowest == 0:
            logger.warning(
                "in %d batches from learning rate %g on the loss never fell: begin lower, or take more steps",
                len(self.losses),
                self.min_lr,
            )
            return None
        # Over several batches: from one to the next, the loss may fall by chance.
        width = min(max(1, self.steps // 10), lowest)
        falls = losses[: lowest + 1 - width] - losses[width : lowest + 1]
        return self.learning_rates[self._start + int(falls.argmax()) + width // 2]


class _Before:
    """The state of a trainer before the run.

    Attributes:
        ratios: The groups' learning rates divided by the first group's.
    """

    def __init__(self, trainer: TrainerView) -> None:
        self.ratios = _ratios(trainer.optimizer)
        self._checkpoint = snapshot(trainer.state_dict())
        self._progress = trainer.state.data_epoch, trainer.state.step
        self._gradients = [
            None if parameter.grad is None else parameter.grad.clone() for parameter in trainer.model.parameters()
        ]

    def rewind(self, trainer: TrainerView) -> None:
        """Reset the progress, so that the run does not reach the trainer's own end."""
        trainer.state.data_epoch, trainer.state.step = self._progress

    def restore(self, trainer: TrainerView) -> None:
        """Restore the trainer."""
        trainer.load_state_dict(self._checkpoint)
        for parameter, gradient in zip(trainer.model.parameters(), self._gradients, strict=True):
            parameter.grad = gradient


def _ratios(optimizer: Optimizer) -> list[float]:
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if not rates[0] > 0:
        raise ValueError(
            f"the first group's learning rate is {rates[0]}: give one above 0; the others keep their ratio to it"
        )
    return [rate / rates[0] for rate in rates]
