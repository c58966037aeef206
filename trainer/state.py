"""The typed progress of a run: what is checkpointed, what callbacks talk through."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

Mode = Literal["min", "max"]
Metrics = dict[str, float]

DIVERGED = "diverged"
EARLY_STOPPED = "early_stopping"
ERROR = "error"
INTERRUPTED = "interrupted"
PRUNED = "pruned"


@dataclass
class TrainState:
    """Progress of one run.

    Attributes:
        max_epochs: Epochs to train in all, resumed ones included.
        epoch: Finished epochs; inside the first epoch it is 0.
        step: Optimizer steps taken.
        batch_index: Finished batches of the running epoch; 0 between epochs.
        metrics: The latest epoch's numbers by name; callbacks add theirs in ``on_epoch_end``.
        history: One such mapping per finished epoch, the latest last (the same object as ``metrics``).
        user_state: Plain values that callbacks share; checkpointed.
        stop_reason: Why the run is to end, or None while it goes on.
        stop_now: True when it is to end after the running batch, without a validation.
        batch: The batch being worked on; hooks may replace it.
        outputs: What the step returned as outputs for that batch.
        loss: Its loss, a scalar tensor on the device; hooks may replace it.
    """

    max_epochs: int
    epoch: int = 0
    step: int = 0
    batch_index: int = 0
    metrics: Metrics = field(default_factory=dict)
    history: list[Metrics] = field(default_factory=list)
    user_state: dict[str, Any] = field(default_factory=dict)
    stop_reason: str | None = None
    stop_now: bool = False
    batch: Any = None
    outputs: Any = None
    loss: Tensor | None = None

    def stop(self, reason: str, *, now: bool = False) -> None:
        """Ask the run to end: after this epoch, or with ``now`` after this batch.

        The first reason stays, except that ``"diverged"`` outranks every other.
        """
        if self.stop_reason is None or reason == DIVERGED:
            self.stop_reason = reason
        self.stop_now = self.stop_now or now

    def state_dict(self) -> dict[str, Any]:
        """Progress as plain values; an interruption is not part of it, so that the run can go on."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "batch_index": self.batch_index,
            # NumPy's numbers pass for floats, but no checkpoint with one in it can be read.
            "history": [{name: float(value) for name, value in item.items()} for item in self.history],
            "user_state": self.user_state,
            # Inside an epoch no request to stop has been met yet.
            "stop_reason": None if self.batch_index or self.stop_reason == INTERRUPTED else self.stop_reason,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved progress; ``max_epochs`` stays as it was given to this run."""
        self.epoch = state["epoch"]
        self.step = state["step"]
        self.batch_index = state["batch_index"]
        self.history = [dict(metrics) for metrics in state["history"]]
        self.metrics = self.history[-1] if self.history else {}
        self.user_state = dict(state["user_state"])
        self.stop_reason = state["stop_reason"]
        self.stop_now = False


def is_better(value: float, best: float, mode: Mode) -> bool:
    """Whether ``value`` beats ``best``; a non-finite value beats nothing."""
    if not math.isfinite(value):
        return False
    return value < best if mode == "min" else value > best


def best_epoch(history: Sequence[Mapping[str, float]], metric: str, mode: Mode) -> int | None:
    """Number (from 1) of the epoch with the best finite value, the earliest of equals; None if there is none."""
    found: int | None = None
    best = math.inf if mode == "min" else -math.inf
    for number, metrics in enumerate(history, start=1):
        if is_better(metrics.get(metric, math.nan), best, mode):
            found, best = number, metrics[metric]
    return found
