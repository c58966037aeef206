"""Plan: computes how long a run is and where its epochs end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.data.options import fraction_of
from trainer.state import CONTINUED, TrainState


class UnknownLengthError(ValueError):
    """The number of epochs of a run is unknown, because the training data has no length."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of a run and of its epochs; the first limit that is reached ends the run.

    Attributes:
        max_epochs: Passes over the training data; None: as many as ``max_steps`` needs.
        max_steps: Optimizer steps; the epoch in which they are reached ends there, with its validation.
        validate_every: The length of an epoch, which ends with a validation. None: one pass over the data; an int:
            this number of optimizer steps; a fraction in (0, 1): that part of a pass, in whole batches.

    Raises:
        ValueError: Neither limit is given, or a number is out of range.
    """

    max_epochs: int | None
    max_steps: int | None = None
    validate_every: int | float | None = None

    def __post_init__(self) -> None:
        if self.max_epochs is None and self.max_steps is None:
            raise ValueError("a run needs an end: give max_epochs or max_steps")
        for name, value in (("max_epochs", self.max_epochs), ("max_steps", self.max_steps)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"{name} is {value!r}: give a whole number, 0 or more")
        every = self.validate_every
        if every is None:
            return
        whole = isinstance(every, int) and not isinstance(every, bool)
        if every < 1 if whole else not (isinstance(every, float) and 0 < every < 1):
            raise ValueError(
                f"validate_every is {every!r}: give steps (an integer of at least 1), or a fraction of a pass "
                "over the data (above 0, below 1)"
            )

    def lay_out(self, state: TrainState, pass_length: int | None) -> None:
        """Set the run's length on the state, computed from the state's present position.

        Args:
            state: The state whose ``max_epochs``, ``total_steps`` and ``batches_per_epoch`` are set.
            pass_length: Batches in one pass over the data; None if unknown.

        Raises:
            UnknownLengthError: The length is needed and unknown.
            ValueError: A pass has no batch.
        """
        if pass_length == 0:
            raise no_batch()
        state.batches_per_epoch = self.epoch_batches(pass_length)
        state.total_steps = self._total_steps(state, pass_length)
        state.max_epochs = self._epochs(state)

    def epoch_batches(self, pass_length: int | None) -> int | None:
        """Batches of an epoch; None if steps or the end of the data decide.

        Raises:
            UnknownLengthError: ``validate_every`` is a fraction of an unknown length.
        """
        if self.validate_every is None:
            return pass_length
        if isinstance(self.validate_every, int):
            return None
        if pass_length is None:
            raise UnknownLengthError(
                f"validate_every is {self.validate_every}, but the training data has no length: give it in steps"
            )
        return fraction_of(pass_length, self.validate_every)

    @property
    def epoch_steps(self) -> int | None:
        """Optimizer steps of an epoch; None if batches decide."""
        return self.validate_every if isinstance(self.validate_every, int) else None

    def ends_epoch(self, state: TrainState) -> bool:
        """Whether the batch just trained ends the running epoch, although the pass may have more batches."""
        if state.stop_now or state.epoch_stopped:
            return True
        if self.max_steps is not None and state.step >= self.max_steps:
            return True
        if self.validate_every is None:
            return False
        if self.epoch_steps is not None:
            return state.step - state.epoch_start_step >= self.epoch_steps
        return state.batch_index >= (state.batches_per_epoch or 1)

    def reached(self, state: TrainState) -> bool:
        """Whether the run has reached one of its limits."""
        if self.max_steps is not None and state.step >= self.max_steps:
            return True
        return self.max_epochs is not None and state.data_epoch >= self.max_epochs

    def broken_off(self, state: TrainState) -> bool:
        """Whether a run that has ended was interrupted or paused before its end, and is to resume.

        A run that an error interrupted may have reached its length without having ended.
        """
        unfinished = state.batch_index > 0 or state.failed or not self.reached(state)
        return state.stop_reason in CONTINUED and unfinished

    def _total_steps(self, state: TrainState, pass_length: int | None) -> int | None:
        if self.max_epochs is None or pass_length is None:
            return self.max_steps
        batches = max(0, (self.max_epochs - state.data_epoch) * pass_length - state.data_batch)
        if state.batches_per_epoch is None:
            steps = _epoch_start(state) + state.steps_of(batches + state.batch_index)
        else:
            # From the running epoch's start: each epoch's last optimizer step may have fewer batches.
            epochs, rest = divmod(batches + state.batch_index, state.batches_per_epoch)
            each = state.steps_of(state.batches_per_epoch)
            steps = _epoch_start(state) + epochs * each + state.steps_of(rest)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def _epochs(self, state: TrainState) -> int:
        if self.validate_every is None and self.max_epochs is not None:
            if self.max_steps is None or state.batches_per_epoch is None:
                return self.max_epochs
        elif state.total_steps is None or (self.epoch_steps is None and state.batches_per_epoch is None):
            raise UnknownLengthError(
                "the training data has no length, so the number of epochs is unknown: give "
                "validate_every in steps, with max_steps"
            )
        assert state.total_steps is not None
        each = self.epoch_steps or max(1, state.steps_of(state.batches_per_epoch or 1))
        return state.epoch + math.ceil((state.total_steps - _epoch_start(state)) / each)


def no_batch() -> ValueError:
    """The error for training data that gave no batch."""
    return ValueError(
        "the training data gave no batch: it is empty, can be iterated only once, or is smaller than a batch, "
        "which drop_last leaves out"
    )


def _epoch_start(state: TrainState) -> int:
    """The number of optimizer steps at the start of the running epoch, or of the next one between epochs."""
    return state.epoch_start_step if state.batch_index else state.step
