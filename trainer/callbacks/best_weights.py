"""BestWeights: gives the model the weights of its best epoch when a run has finished."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from trainer.callback import Callback, TrainerView
from trainer.checkpoint.manager import snapshot
from trainer.checks import check_mode
from trainer.distributed.tensor_shards import load_model
from trainer.state import DIVERGED, ERROR, Mode, is_better
from trainer.step.parts import bare_model

logger = logging.getLogger(__name__)


class BestWeights(Callback):
    """Keeps a copy of the best epoch's model, and restores it when training is over.

    The copy holds parameters and buffers, lies in main memory, and is made whenever ``monitor`` beats its best so
    far: the earliest of equals stays, and a value that is not finite is never best, so a run that diverged, also
    inside an epoch, ends with its best one. It is put back in ``teardown``: `Checkpoint` and the other callbacks
    have seen the last state before. A fit that can resume, because it was interrupted, failed or stopped inside an
    epoch, keeps its weights; to train a finished run further, resume a checkpoint of it. Copy and best value are
    part of a checkpoint, which becomes larger by one model.

    The best of a fork is one of its own. With `EMA` or `WeightAveraging` the best weights are averaged ones,
    since those are what was evaluated.

    Example::

        Trainer(model, optimizer, loss, callbacks=[BestWeights("val_accuracy", "max")])

        callbacks: {best_weights: true}  # follows the study's metric

    Args:
        monitor: Name of the metric; an epoch without a value, because its validation was skipped or an `Evaluator`
            did not measure it there, is skipped.
        mode: ``"min"`` or ``"max"``.

    Raises:
        ValueError: ``mode`` is neither.
        KeyError: Nothing records ``monitor``.
    """

    priority = 94

    def __init__(self, monitor: str = "val_loss", mode: Mode = "min") -> None:
        check_mode(mode)
        self.monitor = monitor
        self.mode: Mode = mode
        self.reads = (monitor,)
        self._fitting = False
        self._best, self._epoch = _worst(mode), 0
        self._model: dict[str, Any] | None = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Forget the best epoch if the run is new or a new fork."""
        self._fitting = True
        if trainer.state.epoch == trainer.state.inherited:
            self._best, self._epoch, self._model = _worst(self.mode), 0, None

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Copy the model if it is the best so far."""
        value = trainer.state.metric(self.monitor)
        if value is not None and is_better(value, self._best, self.mode):
            self._best, self._epoch = value, trainer.state.epoch
            self._model = snapshot(bare_model(trainer.model).state_dict())

    def teardown(self, trainer: TrainerView) -> None:
        """Restore the best weights after a fit that has finished."""
        fitted, self._fitting = self._fitting, False
        state = trainer.state
        inside = state.batch_index and state.stop_reason != DIVERGED
        if not fitted or inside or state.stop_reason == ERROR or trainer.plan.broken_off(state):
            return
        if self._model is not None:
            load_model(bare_model(trainer.model), self._model)
            logger.info("the model has the weights of epoch %d, %s %.6g", self._epoch, self.monitor, self._best)
        elif state.epoch:
            logger.warning("no epoch had a finite %s: the model keeps its last weights", self.monitor)

    def state_dict(self) -> dict[str, Any]:
        """The best model, its epoch and its value."""
        return {"best": self._best, "epoch": self._epoch, "model": self._model}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best so far."""
        self._best, self._epoch = state["best"], state["epoch"]
        self._model = snapshot(state["model"])


def _worst(mode: Mode) -> float:
    return math.inf if mode == "min" else -math.inf
