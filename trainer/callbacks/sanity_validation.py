"""SanityValidation: a few batches of the validation before the first epoch, whose errors then show at once."""

from trainer.callback import Callback, TrainerView


class SanityValidation(Callback):
    """Evaluates a few batches of each validation set before the first epoch, and throws the numbers away.

    An error that only validation meets, in the data, a metric or the model's eval mode, then ends the run before
    an hour of training instead of after it. The run is the same to the bit with and without. A resumed run has
    been through this.

    Example::

        Trainer(model, optimizer, loss, callbacks=[SanityValidation(batches=2)])

        callbacks: {sanity_validation: {batches: 2}}  # in a study file

    Args:
        batches: Batches of each validation set.

    Raises:
        ValueError: ``batches`` is no whole number of at least 1.
    """

    priority = 15

    def __init__(self, batches: int = 2) -> None:
        if not isinstance(batches, int) or isinstance(batches, bool) or batches < 1:
            raise ValueError(f"batches is {batches!r}: give a whole number of at least 1")
        self.batches = batches

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        """Evaluate, if nothing is trained yet."""
        if trainer.state.step or trainer.state.epoch:
            return
        for prefix in dict.fromkeys(trainer.evaluation.names.values()):
            trainer.evaluation.now(prefix, self.batches)
