"""GradientDump: writes the gradients of chosen steps to files."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from torch import Tensor

from trainer.callback import Callback, TrainerView
from trainer.callbacks.tensor_statistics import at_work, pattern
from trainer.checks import check_count
from trainer.files import aside_of

logger = logging.getLogger(__name__)


class GradientDump(Callback):
    """Writes the gradients of chosen optimizer steps to ``gradients-step-<step>.pt``, for later inspection.

    A file is a mapping from the names of parameters to their gradients before clipping, unscaled, in the host's
    memory; ``torch.load`` reads it. The steps are ``first_step``, and every ``every_n_steps`` after it up to
    ``last_step``, at most ``max_files`` of them, which bounds the disk that they take. A step that is written
    waits for the device and the disk; the others do nothing. Of several optimizers that a step updates by name, a
    file has the parameters of each that made an update, with the gradients of its last one in that step. Of one
    that evaluates a closure several times, it has those of the first evaluation. A resumed run writes the same
    files again. A file that can't be written is left out with a warning.

    Example::

        Trainer(model, optimizer, loss, callbacks=[GradientDump("gradients", first_step=100, names="^encoder")])

        callbacks: {gradient_dump: {every_n_steps: 100, max_files: 20}}

    Args:
        folder: Where the files go; made when the first is written.
        every_n_steps: Steps between two files, at least 1.
        first_step: The first step that is written, from 1.
        last_step: The last step that may be written; None: no limit.
        max_files: Most files to write, at least 1.
        first_elements: Keep only so many elements of each gradient, as one row; None: all, in its shape.
        names: Regular expression that must be found in the name of a parameter; None: all.

    Raises:
        ValueError: A number is not an integer of at least 1, or ``names`` is not a regular expression.
    """

    priority = 12
    graph_safe = True
    rank_zero_only = True
    needs_whole_model = "writes whole gradients"
    transient = ("_step", "_gradients")

    def __init__(
        self,
        folder: Path | str,
        every_n_steps: int = 1,
        first_step: int = 1,
        last_step: int | None = None,
        max_files: int = 100,
        first_elements: int | None = None,
        names: str | None = None,
    ) -> None:
        check_count("every_n_steps", every_n_steps)
        check_count("first_step", first_step)
        check_count("last_step", last_step, optional=True)
        check_count("max_files", max_files)
        check_count("first_elements", first_elements, optional=True)
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.first_step = first_step
        self.max_files = max_files
        self.last_step = last_step
        self.first_elements = first_elements
        self.names: re.Pattern[str] | None = pattern(names)
        self._step = 0
        self._gradients: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        """Write the gradients, if this step is chosen."""
        if trainer.state.evaluation:  # a further evaluation of the closure in the same step
            return
        step = trainer.state.step + 1
        number, rest = divmod(step - self.first_step, self.every_n_steps)
        late = self.last_step is not None and step > self.last_step
        if number < 0 or rest or number >= self.max_files or late:
            return
        if step != self._step:
            self._step, self._gradients = step, {}
        self._gradients |= {
            name: self._kept(parameter.grad)
            for name, parameter in at_work(trainer)
            if parameter.grad is not None and (self.names is None or self.names.search(name))
        }
        path = self.folder / f"gradients-step-{step:08d}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with aside_of(path) as aside:
                torch.save(self._gradients, aside)
        except (OSError, RuntimeError) as error:  # torch raises its own error for a full disk
            logger.warning("%s can't be written: %s", path, error)

    def _kept(self, gradient: Tensor) -> Tensor:
        kept = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        if self.first_elements is not None:
            kept = kept.flatten()[: self.first_elements]
        # A copy, as the file of a view would hold the whole tensor behind it.
        return kept.cpu().clone()
