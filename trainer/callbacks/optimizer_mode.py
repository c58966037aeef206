"""OptimizerMode: train and eval mode of optimizers that have one."""

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
        """An epoch that resumes inside is trained on, also if the model was evaluated since it stopped."""
        self._training = trainer.state.batch_index > 0
        if self._training:
            _switch(trainer.optimizer, "train")

    def on_train_batch_start(self, trainer: TrainerView) -> None:
        """To the weights that are trained, at an epoch's first batch: a run may still be stopped at its start."""
        if not self._training:
            self._training = True
            _switch(trainer.optimizer, "train")

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """To the weights that are evaluated and saved, also where nothing is validated."""
        self._training = False
        _switch(trainer.optimizer, "eval")

    def on_validation_start(self, trainer: TrainerView) -> None:
        """To the weights that are evaluated."""
        _switch(trainer.optimizer, "eval")

    def on_validation_end(self, trainer: TrainerView) -> None:
        """Back, where a hook had it evaluated in the middle of an epoch."""
        self._go_back(trainer)

    def on_test_start(self, trainer: TrainerView) -> None:
        """To the weights that are evaluated."""
        _switch(trainer.optimizer, "eval")

    def on_test_end(self, trainer: TrainerView) -> None:
        """Back, as after a validation."""
        self._go_back(trainer)

    def on_predict_start(self, trainer: TrainerView) -> None:
        """To the weights that are evaluated."""
        _switch(trainer.optimizer, "eval")

    def on_predict_end(self, trainer: TrainerView) -> None:
        """Back, as after a validation."""
        self._go_back(trainer)

    def on_fit_end(self, trainer: TrainerView) -> None:
        """What is evaluated from here on is no part of training."""
        self._training = False
        if trainer.state.batch_index and trainer.state.stop_reason == DIVERGED:
            # Here and not at the next evaluation: until then other weights may come into the model.
            _switch(trainer.optimizer, "eval")

    def _go_back(self, trainer: TrainerView) -> None:
        if self._training:
            _switch(trainer.optimizer, "train")


def _switch(optimizer: Optimizer, mode: str) -> None:
    for each in each_of(optimizer).values():
        method: Callable[[], None] | None = getattr(each, mode, None)
        if callable(method) and (mode == "train" or each.state):
            method()
