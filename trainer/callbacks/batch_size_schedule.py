"""BatchSizeSchedule: batches that change in size during a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from trainer.callback import Callback, TrainerView
from trainer.lr_schedulers import scale_rates

Scaling = Literal["none", "linear", "sqrt"]


class BatchSizeSchedule(Callback):
    """Sets the batch size of each pass over the data, and on request the learning rate that goes with it.

    At each change the learning rates of all groups are multiplied once, by the ratio of the sizes or its square
    root, together with everything from which the scheduler computes later ones
    (`trainer.lr_schedulers.scale_rates`). So they are the scheduler's, times the ratio to the first size or its
    root.
    Linear: Goyal et al., arXiv:1706.02677 (SGD). Square root: Malladi et al., arXiv:2205.10287 (Adam and its kin).

    A scheduler that goes with the step must be built for the number of steps that the sizes make. The data must
    not come in batches of its own (a DataLoader).

    Args:
        sizes: Samples a batch by the number of finished passes from which on they hold; 0 must be among them. Text
            such as ``"10"`` will do for a number, since the keys of a study file are text.
        lr_scaling: ``"none"``, ``"linear"`` or ``"sqrt"``.

    Raises:
        ValueError: ``sizes`` lacks 0 or holds a number out of range, or there is no such ``lr_scaling``; at fit
            start, if epochs are no whole passes (``validate_every``), or the data comes in batches of its own.

    Example::

        Trainer(model, optimizer, loss, callbacks=[BatchSizeSchedule({0: 32, 10: 64}, lr_scaling="sqrt")])

        callbacks: {batch_size_schedule: {sizes: {"0": 32, "10": 64}, lr_scaling: sqrt}}  # in a study file
    """

    priority = 1

    def __init__(self, sizes: Mapping[int, int] | Mapping[str, int], lr_scaling: Scaling = "none") -> None:
        by_pass = {_whole(start, sizes): _whole(size, sizes) for start, size in sizes.items()}
        if 0 not in by_pass:
            raise ValueError(f"sizes is {dict(sizes)}: give the size of the first pass under 0")
        for start, size in by_pass.items():
            if start < 0 or size < 1:
                raise ValueError(f"sizes has {start}: {size}: give passes from 0 on, and batches of at least 1")
        if lr_scaling not in {"none", "linear", "sqrt"}:
            raise ValueError(f"lr_scaling is {lr_scaling!r}: give 'none', 'linear' or 'sqrt'")
        self.sizes = dict(sorted(by_pass.items()))
        self.lr_scaling = lr_scaling
        # The size that the learning rates are scaled for.
        self._size = self.sizes[0]

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Set the size of the pass that starts or resumes; its learning rates come with a resumed state."""
        if trainer.plan.validate_every is not None:
            raise ValueError(
                f"validate_every is {trainer.plan.validate_every}: a batch size can only change between epochs "
                "that are passes over the data; leave it out"
            )
        trainer.set_batch_size(self._size_of(trainer.state.data_epoch))
        self._scale(trainer)

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Prepare the next pass, after the scheduler and before a checkpoint."""
        size = self._size_of(trainer.state.data_epoch)
        if size != self._size:
            trainer.set_batch_size(size)
            self._scale(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The size that the learning rates are scaled for."""
        return {"size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The loaded learning rates are scaled already."""
        self._size = state["size"]

    def _size_of(self, data_epoch: int) -> int:
        return [size for start, size in self.sizes.items() if start <= data_epoch][-1]

    def _scale(self, trainer: TrainerView) -> None:
        size = self._size_of(trainer.state.data_epoch)
        ratio = size / self._size
        self._size = size
        if self.lr_scaling != "none" and ratio != 1:
            factor = ratio if self.lr_scaling == "linear" else math.sqrt(ratio)
            scale_rates(trainer.optimizer, trainer.scheduler, factor)


def _whole(value: int | str, sizes: Mapping[Any, int]) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise ValueError(f"sizes is {dict(sizes)}: {value!r} is no whole number") from None
