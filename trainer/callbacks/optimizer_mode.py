"""OptimizerMode: switches optimizers that have a train and an eval mode."""

from collections.abc import Callable

from torch.optim import Optimizer

from trainer.callback import Callback, TrainerView
from trainer.state import DIVERGED
from trainer.step.optimizers import each_of


class OptimizerMode(Callback):
    """Switches optimizers such as ScheduleFree and SPlus between training weights and averaged weights.

    Training uses the ``train()`` weights, validation, test and prediction the ``eval()`` ones. They stay in eval
    mode from the end of an epoch's training to the next epoch's first batch, so a checkpoint made in between holds
    the very weights that were evaluated, and training continues the same whether or not one was made. An optimizer
    without these methods is left alone, and so is one before its first step, which has no average yet. An
    evaluation inside an epoch switches there and back, which may round: two such runs are equal only if both
    evaluate there.

    Example::

        Trainer(model, optimizer, loss, callbacks=[OptimizerMode()])

        callbacks: {optimizer_mode: false}  # switches it off
    """

    priority = 10
    transient = ("_training",)

    def __init__(self) -> None:
        self._training = False

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Switch to train mode if the fit resumes inside an epoch, as an evaluation may have switched it."""
        self._training = trainer.state.batch_index > 0
        if self._training:
            _switch(trainer.optimizer, "train")

    def on_train_batch_start(self, trainer: TrainerView) -> None:
        """Switch to train mode at an epoch's first batch, not at its start, where the run may still be stopped."""
        if not self._training:
            self._training = True
            _switch(trainer.optimizer, "train")

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Switch to eval mode, also without a validation: checkpoints save the weights that are evaluated."""
        self._training = False
        _switch(trainer.optimizer, "eval")

    def on_validation_start(self, trainer: TrainerView) -> None:
        """Switch to eval mode."""
        _switch(trainer.optimizer, "eval")

    def on_validation_end(self, trainer: TrainerView) -> None:
        """Switch back to train mode after an evaluation inside an epoch."""
        self._go_back(trainer)

    def on_test_start(self, trainer: TrainerView) -> None:
        """Switch to eval mode."""
        _switch(trainer.optimizer, "eval")

    def on_test_end(self, trainer: TrainerView) -> None:
        """Switch back, as after a validation."""
        self._go_back(trainer)

    def on_predict_start(self, trainer: TrainerView) -> None:
        """Switch to eval mode."""
        _switch(trainer.optimizer, "eval")

    def on_predict_end(self, trainer: TrainerView) -> None:
        """Switch back, as after a validation."""
        self._go_back(trainer)

    def on_fit_end(self, trainer: TrainerView) -> None:
        """End training; switch to eval mode if the run diverged inside an epoch."""
        self._training = False
        if trainer.state.batch_index and trainer.state.stop_reason == DIVERGED:
            # Now rather than at the next evaluation, as other weights may be put into the model before that.
            _switch(trainer.optimizer, "eval")

    def _go_back(self, trainer: TrainerView) -> None:
        if self._training:
            _switch(trainer.optimizer, "train")


def _switch(optimizer: Optimizer, mode: str) -> None:
    for each in each_of(optimizer).values():
        method: Callable[[], None] | None = getattr(each, mode, None)
        if callable(method) and (mode == "train" or each.state):
            method()
