"""OptimizerMode: train and eval mode of optimizers that have one."""

from collections.abc import Callable

from torch.optim import Optimizer

from trainer.callback import Callback, TrainerView


class OptimizerMode(Callback):
    """Switches ScheduleFree, SPlus and their like between training and averaged weights.

    Training uses the ``train()`` weights, validation and test the ``eval()`` ones. They stay in eval mode from the
    end of an epoch's training to the next epoch's start, so a checkpoint made in between holds the very weights
    that were evaluated, and training goes on the same whether or not one was made. An optimizer without these
    methods is left alone, and so is one before its first step: there is no average yet.

    Example::

        Trainer(model, optimizer, loss, callbacks=[OptimizerMode()])

        callbacks: {optimizer_mode: false}  # switches it off
    """

    priority = 10

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        """To the weights that are trained."""
        _switch(trainer.optimizer, "train")

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """To the weights that are evaluated and saved, also where nothing is validated."""
        _switch(trainer.optimizer, "eval")

    def on_validation_start(self, trainer: TrainerView) -> None:
        """To the weights that are evaluated."""
        _switch(trainer.optimizer, "eval")

    def on_test_start(self, trainer: TrainerView) -> None:
        """To the weights that are evaluated."""
        _switch(trainer.optimizer, "eval")


def _switch(optimizer: Optimizer, mode: str) -> None:
    method: Callable[[], None] | None = getattr(optimizer, mode, None)
    if callable(method) and (mode == "train" or optimizer.state):
        method()
