"""GarbageCollection: runs Python's garbage collector at fixed steps instead of automatically."""

from __future__ import annotations

import gc

from trainer.callback import Callback, TrainerView
from trainer.checks import check_count

# Generations 0 and 1: objects that have survived at most one collection.
_YOUNG = 1


class GarbageCollection(Callback):
    """Turns off Python's automatic garbage collection while batches are trained, and collects at fixed steps.

    A collection stops one process at a time of its own, and the others of a distributed run wait for it at their
    next exchange. At fixed steps all of them pause together. Between the collections only reference cycles
    stay in memory; everything else is freed immediately, as always.

    Every ``every_n_steps`` optimizer steps of the run, the objects made lately are collected (``gc.collect(1)``),
    and at the end of each epoch's training all that were made since the fit began (``gc.collect()``), some
    milliseconds each. Those made before, mostly what imports have made, are collected when the fit begins (0.1 to
    0.3 s once torch is imported), and not looked at again before its end (``gc.freeze()``): a reference cycle of
    theirs stays in memory until then. Where the process has frozen objects itself, they stay frozen, and nothing
    is added to them. Between epochs, where validation runs and worker processes of the data loading are started,
    and after the fit, automatic collection is as it was before; in a process that had switched it off itself, it
    stays off. See https://docs.python.org/3/library/gc.html.

    Example::

        Trainer(model, optimizer, loss, callbacks=[GarbageCollection(every_n_steps=500)])

        callbacks: {garbage_collection: {every_n_steps: 500}}

    Args:
        every_n_steps: Optimizer steps between two collections, at least 1.

    Raises:
        ValueError: ``every_n_steps`` is below 1 or no integer.
    """

    graph_safe = True

    def __init__(self, every_n_steps: int = 1000) -> None:
        check_count("every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self._was_enabled = False
        self._froze = False

    def on_fit_start(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Remember whether collection is enabled, and freeze the present objects."""
        self._was_enabled = gc.isenabled()
        if not gc.get_freeze_count():  # objects that other code froze could not be told apart at the end
            gc.collect()
            gc.freeze()
            self._froze = True

    def on_train_batch_start(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Switch automatic collection off; not at the start of an epoch, which a resumed epoch does not have."""
        gc.disable()

    def on_after_optimizer_step(self, trainer: TrainerView) -> None:
        """Collect if it is due; ``state.step`` does not count this step yet."""
        if (trainer.state.step + 1) % self.every_n_steps == 0:
            gc.collect(_YOUNG)

    def on_train_epoch_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Collect everything, and restore automatic collection until the next epoch."""
        gc.collect()
        self._restore()

    def teardown(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Restore automatic collection, also after an exception; without a fit there is nothing to restore."""
        self._restore()
        self._was_enabled = False
        if self._froze:
            gc.unfreeze()
            self._froze = False

    def _restore(self) -> None:
        if self._was_enabled:
            gc.enable()
