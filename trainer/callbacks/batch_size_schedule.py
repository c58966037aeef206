"""BatchSizeSchedule: changes the batch size during a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from trainer.callback import Callback, TrainerView
from trainer.callbacks.gradient_accumulation import refuse_no_step
from trainer.callbacks.stages import Stages
from trainer.lr_schedulers import scale_rates

Scaling = Literal["none", "linear", "sqrt"]


class BatchSizeSchedule(Callback):
    """Changes the batch size after given passes or steps, and, if asked to, scales the learning rate with it.

    At each change the learning rates of all groups are multiplied once, by the ratio of the sizes or its square
    root, together with everything from which the scheduler computes later ones
    (`trainer.lr_schedulers.scale_rates`). So they are the scheduler's, times the ratio to the first size or its
    root.
    Linear: Goyal et al., arXiv:1706.02677 (SGD). Square root: Malladi et al., arXiv:2205.10287 (Adam and its kin).

    A scheduler that goes with the step must be built for the number of steps that the sizes make. The data must
    not come in batches of its own (a DataLoader).

    Args:
        sizes: Number of finished passes, or steps → samples per batch from then on; 0 must be among the keys. A
            key may be text such as ``"10"``, since the keys of a study file are text.
        lr_scaling: How the learning rate follows the size: ``"none"``, ``"linear"`` or ``"sqrt"``.
        unit: What ``sizes`` counts: ``"pass"``, or ``"step"``: optimizer steps. A change inside a pass does not
            change its order of samples.

    Raises:
        ValueError: ``sizes`` lacks 0 or holds a number out of range, or there is no such ``lr_scaling`` or
            ``unit``; at fit start, if the data comes in batches of its own, or epochs are no whole passes
            (``validate_every``), or by steps fractions of one, or the data is iterable or limited by steps.

    Example::

        Trainer(model, optimizer, loss, callbacks=[BatchSizeSchedule({0: 32, 10: 64}, lr_scaling="sqrt")])

        callbacks: {batch_size_schedule: {sizes: {"0": 32, "10": 64}, lr_scaling: sqrt}}  # in a study file
    """

    priority = 1

    def __init__(
        self,
        sizes: Mapping[int, int] | Mapping[str, int],
        lr_scaling: Scaling = "none",
        unit: Literal["pass", "step"] = "pass",
    ) -> None:
        if lr_scaling not in {"none", "linear", "sqrt"}:
            raise ValueError(f"lr_scaling is {lr_scaling!r}: give 'none', 'linear' or 'sqrt'")
        self.sizes = Stages("sizes", sizes)
        if unit not in ("pass", "step"):
            raise ValueError(f"unit is {unit!r}: give 'pass' or 'step'")
        self.lr_scaling = lr_scaling
        self.unit = unit
        # The batch size for which the learning rates are scaled.
        self._size = self.sizes.at(0)

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Set the batch size for the point where the run starts or resumes; a resumed state has scaled rates."""
        every = trainer.plan.validate_every
        if self.unit == "pass" and every is not None:
            raise ValueError(
                f"validate_every is {every}: a batch size by passes can only change between epochs that are "
                "passes over the data; leave it out, or give unit='step'"
            )
        fraction = isinstance(every, float)
        if fraction:
            raise ValueError(
                f"validate_every is {every}: a fraction of a pass is no fixed number of batches where their size "
                "changes inside it; give steps"
            )
        if trainer.state.is_new:  # forget another trainer's run
            self._size = self.sizes.at(0)
        lengths = self._lengths(trainer)
        self._set(trainer)
        for length in lengths:
            refuse_no_step(trainer.state, length)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Set the size of the next batch."""
        if self.unit == "step" and self._due(trainer) != self._size:
            self._set(trainer)

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Set the size of the next pass: after the scheduler and all steps of the epoch, before a checkpoint."""
        if self._due(trainer) != self._size:
            self._set(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The batch size for which the learning rates are scaled."""
        return {"size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the size; the loaded learning rates are already scaled for it."""
        self._size = state["size"]

    def _due(self, trainer: TrainerView) -> int:
        """The batch size that applies from here on."""
        return self.sizes.at(trainer.state.step if self.unit == "step" else trainer.state.data_epoch)

    def _lengths(self, trainer: TrainerView) -> list[int | None]:
        """Batches per epoch with each batch size of the run; empty unless they may be too few for a step."""
        state, plan = trainer.state, trainer.plan
        if not state.drops_last_step or self.unit == "step" or state.data_batch:
            return []
        begins = [state.data_epoch, *(begin for begin in self.sizes if begin > state.data_epoch)]
        found: list[int | None] = []
        steps = state.step
        for begin, end in pairwise([*begins, begins[-1]]):
            over = plan.max_epochs is not None and begin >= plan.max_epochs
            if over or (plan.max_steps is not None and steps >= plan.max_steps):
                break
            trainer.set_batch_size(self.sizes.at(begin))
            found.append(state.batches_per_epoch)
            steps += (end - begin) * state.steps_of(found[-1] or 0)
        return found

    def _set(self, trainer: TrainerView) -> None:
        size = self._due(trainer)
        trainer.set_batch_size(size, now=self.unit == "step")
        ratio = size / self._size
        self._size = size
        if self.lr_scaling != "none" and ratio != 1:
            factor = ratio if self.lr_scaling == "linear" else math.sqrt(ratio)
            scale_rates(trainer.optimizer, trainer.scheduler, factor)
