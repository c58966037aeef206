"""The outcome of a trial, one of seven, and the names of the states before it."""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from optuna.trial import FrozenTrial, TrialState

from hpo.storage.attributes import OUTCOME_ATTR
from hpo.storage.optuna_private import fixed_params
from hpo.storage.pausing import PAUSED, paused_at


class Outcome(StrEnum):
    """How a trial ended; the order is that of the tables shown to people."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    DIVERGED = "diverged"
    OUT_OF_MEMORY = "out_of_memory"
    ERROR = "error"
    TIMED_OUT = "timed_out"
    LOST = "lost"


#: States of a trial before its end, in place of an outcome.
UNFINISHED: Final = ("running", PAUSED, "waiting")

_OF_STATE: Final[Mapping[TrialState, str]] = {
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
    TrialState.COMPLETE: Outcome.COMPLETE,
    TrialState.PRUNED: Outcome.PRUNED,
    TrialState.FAIL: Outcome.ERROR,
}
#: Optuna's state for each outcome.
STATE_OF: Final[Mapping[str, TrialState]] = {
    Outcome.COMPLETE: TrialState.COMPLETE,
    Outcome.PRUNED: TrialState.PRUNED,
    Outcome.DIVERGED: TrialState.COMPLETE,
    Outcome.OUT_OF_MEMORY: TrialState.FAIL,
    Outcome.ERROR: TrialState.FAIL,
    Outcome.TIMED_OUT: TrialState.FAIL,
    Outcome.LOST: TrialState.FAIL,
}


def outcome_of(trial: FrozenTrial) -> str:
    """The outcome of a finished trial; for any other trial, one of `UNFINISHED`.

    The stored outcome counts only if it fits the state and value. A trial's process may have died after storing
    the outcome and before storing the state, and a later attempt may have ended otherwise.
    """
    if paused_at(trial) is not None:
        return PAUSED
    return ended_as(trial.state, trial.user_attrs.get(OUTCOME_ATTR), leading_value(trial))


def unclaimed(trial: FrozenTrial) -> list[str]:
    """Parameters that a trial was queued with but that nothing has asked for so far; they may be mistyped."""
    return [name for name in fixed_params(trial) if name not in trial.params]


def ended_as(state: TrialState, stored: str | None, value: float | None) -> str:
    """The outcome of a trial that is not paused, from its state, its stored outcome and its leading value."""
    if stored is None or state != STATE_OF.get(stored, TrialState.FAIL):
        return str(_OF_STATE[state])
    if stored == Outcome.DIVERGED and value is not None and math.isfinite(value):
        return str(Outcome.COMPLETE)
    return str(stored)


def leading_value(trial: FrozenTrial) -> float | None:
    """A trial's value; with several objectives the first one (where Optuna's ``value`` raises)."""
    return trial.values[0] if trial.values else None


def prediction_record(
    history: Sequence[Mapping[str, float]], metric: str, length: int, *, whole: bool, after: int = 0
) -> dict[str, Any] | None:
    """A trial's predicted final losses beside its actual one; see `trainer.callbacks.LossPrediction`.

    Args:
        history: The metrics of each epoch.
        metric: The predicted metric.
        length: Epochs of a run to the end. A value recorded at the last one is no prediction.
        whole: Whether the trial has run to its end.
        after: Number of first epochs whose predictions do not count: those of a fork's parent.

    Returns:
        ``metric``; ``epoch``, ``predicted_final_loss`` and ``std`` of the first prediction; ``final_loss``, None
        for a trial that has not run to its end; ``latest_epoch`` and ``latest`` of the last prediction, which is
        what a pruned trial was expected to end at. None where no prediction was made.
    """
    made = [
        (epoch, metrics)
        for epoch, metrics in enumerate(history[after:], start=after + 1)
        if epoch < length and "predicted_final_loss" in metrics
    ]
    if not made:
        return None
    (epoch, first), (latest_epoch, latest) = made[0], made[-1]
    return {
        "metric": metric,
        "epoch": epoch,
        "predicted_final_loss": first["predicted_final_loss"],
        "std": first.get("predicted_final_loss_std"),
        "final_loss": history[-1].get(metric) if whole else None,
        "latest_epoch": latest_epoch,
        "latest": latest["predicted_final_loss"],
    }


def finite(value: Any) -> Any:
    """The value as JSON allows it, with None for numbers that are not finite, also inside containers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
