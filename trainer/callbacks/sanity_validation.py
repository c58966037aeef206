"""SanityValidation: evaluates a few validation batches before the first epoch, so that errors show at once."""

from trainer.callback import Callback, TrainerView
from trainer.checks import check_count
from trainer.step.parts import lazy_parameters


class SanityValidation(Callback):
    """Evaluates a few batches of each validation set before the first epoch, and discards the results.

    An error that only occurs in validation, in the data, a metric or the model's eval mode, then ends the run
    before an hour of training instead of after it. The run has the same bits with and without this callback: a
    model with lazy modules, which get their weights in the first batch, is evaluated after that batch. A resumed
    run does not repeat it.

    Example::

        Trainer(model, optimizer, loss, callbacks=[SanityValidation(batches=2)])

        callbacks: {sanity_validation: {batches: 2}}  # in a study file

    Args:
        batches: Batches of each validation set.

    Raises:
        ValueError: ``batches`` is not an integer of at least 1.
    """

    priority = 15
    transient = ("_waits",)

    def __init__(self, batches: int = 2) -> None:
        check_count("batches", batches)
        self.batches = batches
        self._waits = False

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        """Evaluate if nothing is trained yet; wait if the model has lazy modules."""
        new = not (trainer.state.step or trainer.state.epoch)
        self._waits = new and bool(lazy_parameters(trainer.model))
        if new and not self._waits:
            self._evaluate(trainer)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Evaluate a model whose lazy modules got their weights in the first batch."""
        if self._waits:
            self._waits = False
            self._evaluate(trainer)

    def _evaluate(self, trainer: TrainerView) -> None:
        for prefix in dict.fromkeys(trainer.evaluation.names.values()):
            trainer.evaluation.now(prefix, self.batches)
