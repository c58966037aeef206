"""SaveRules: decide when a checkpoint is due, by epochs, steps and seconds."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.checkpoint.retention import REMOVALS
from trainer.checks import check_count, check_mode
from trainer.state import TrainState


@dataclass(frozen=True)
class SaveRules:
    """When a checkpoint is due; `trainer.callbacks.Checkpoint` describes the rules and their errors.

    Attributes:
        every_n_epochs: Epochs between removable checkpoints at the ends of epochs.
        every_n_steps: Optimizer steps between removable checkpoints inside epochs.
        every_seconds: Seconds between removable checkpoints inside epochs.
        cooldown_steps: Steps after any checkpoint during which no removable one is written inside an epoch.
        keep_every_n_epochs: Epochs between permanent checkpoints.
        keep_every_n_steps: Optimizer steps between permanent checkpoints.
        at_steps: Optimizer steps with a permanent checkpoint, sorted.
    """

    every_n_epochs: int
    every_n_steps: int | None
    every_seconds: float | None
    cooldown_steps: int
    keep_every_n_epochs: int | None
    keep_every_n_steps: int | None
    at_steps: Sequence[int]

    def __post_init__(self) -> None:
        check_count("every_n_epochs", self.every_n_epochs)
        for name in ("every_n_steps", "keep_every_n_epochs", "keep_every_n_steps"):
            check_count(name, getattr(self, name), optional=True)
        for step in self.at_steps:
            check_count("a step in at_steps", step)
        check_count("cooldown_steps", self.cooldown_steps, 0)
        if self.every_seconds is not None and not 0 < self.every_seconds < math.inf:
            raise ValueError(f"every_seconds is {self.every_seconds!r}: give a finite number above 0")

    @property
    def look_inside(self) -> bool:
        """Whether any rule may ask for a checkpoint inside an epoch."""
        return bool(self.at_steps or self.every_n_steps or self.every_seconds or self.keep_every_n_steps)

    def permanent(self, state: TrainState, looked: int) -> bool:
        """Whether a permanent checkpoint is due: for this epoch's end, or for a step in (looked, state.step]."""
        ends = state.batch_index == 0 and state.epoch > 0
        if self.keep_every_n_epochs is not None and ends and state.epoch % self.keep_every_n_epochs == 0:
            return True
        return bisect_right(self.at_steps, state.step) > bisect_right(self.at_steps, looked) or _passed(
            self.keep_every_n_steps, state.step, looked
        )

    def by_steps(self, state: TrainState, looked: int, saved: int) -> bool:
        """Whether ``every_n_steps`` asks for a checkpoint; ``saved`` is the step of the latest one."""
        return _passed(self.every_n_steps, state.step, looked) and state.step - saved >= self.cooldown_steps

    def by_seconds(self, state: TrainState, waited: float, saved: int) -> bool:
        """Whether ``every_seconds`` asks for a checkpoint, ``waited`` seconds after the latest one."""
        limit = self.every_seconds
        return limit is not None and waited >= limit and state.step - saved >= self.cooldown_steps

    def by_epochs(self, state: TrainState) -> bool:
        """Whether ``every_n_epochs`` asks for a checkpoint at the end of this epoch."""
        return state.epoch % self.every_n_epochs == 0


def check_choices(max_overhead: float, mode: str, remove: str, on_write_error: str) -> None:
    """Check the arguments of `trainer.callbacks.Checkpoint` that are not in `SaveRules`.

    Raises:
        ValueError: An argument is out of range; the text names it.
    """
    if not 0 < max_overhead <= 1:
        raise ValueError(f"max_overhead is {max_overhead!r}: give a share above 0, at most 1")
    check_mode(mode)
    if remove not in REMOVALS:
        raise ValueError(f"remove is {remove!r}: give one of {', '.join(REMOVALS)}")
    if on_write_error not in {"stop", "continue"}:
        raise ValueError(f"on_write_error is {on_write_error!r}: give 'stop' or 'continue'")


def _passed(every: int | None, step: int, looked: int) -> bool:
    """Whether a multiple of ``every`` lies in (looked, step]."""
    return every is not None and step // every > looked // every
