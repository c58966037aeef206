"""ModelSummary: logs the model's modules, the shapes of their outputs and their parameters."""

from __future__ import annotations

import logging

from trainer.callback import Callback, TrainerView
from trainer.model_summary import summary
from trainer.step.parts import lazy_parameters

logger = logging.getLogger(__name__)


class ModelSummary(Callback):
    """Logs a table of the model at the first batch of a fit: modules, shapes of outputs, parameters.

    The shapes come from one more call of the step, in eval mode and without gradients, which changes nothing of
    the run, unless the step itself counts its calls. Lazy modules get their weights in that batch, and the table
    is logged after it. In code without a trainer `trainer.summary` makes the table.

    Args:
        depth: Levels of modules to list; deeper modules are counted in the module that contains them.

    Example::

        Trainer(model, optimizer, loss, callbacks=[ModelSummary(depth=3)])

        callbacks: {model_summary: {depth: 3}}

    Raises:
        ValueError: ``depth`` is below 0.
    """

    rank_zero_only = True
    needs_whole_model = "calls the model in rank 0 alone"
    transient = ("_logged",)

    def __init__(self, depth: int = 2) -> None:
        if depth < 0:
            raise ValueError(f"depth is {depth}: give at least 0")
        self.depth = depth
        self._logged = False

    def on_fit_start(self, trainer: TrainerView) -> None:  # noqa: ARG002 - the hook's signature
        """Make the next batch log the table."""
        self._logged = False

    def on_train_batch_start(self, trainer: TrainerView) -> None:
        """Log the table once; not of a model with lazy modules, whose weights the extra call would draw."""
        if not self._logged and not lazy_parameters(trainer.model):
            self._log(trainer)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Log the table of a model whose lazy modules have got their weights."""
        if not self._logged:
            self._log(trainer)

    def _log(self, trainer: TrainerView) -> None:
        self._logged = True
        found = summary(trainer.model, trainer.state.batch, step=trainer.step, depth=self.depth)
        logger.info("the model\n%s", found)
