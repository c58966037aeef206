"""The error of a run that another of its processes has ended, and what a run's end is called after an error."""

from __future__ import annotations

from trainer.state import DIVERGED, ERROR, INTERRUPTED, PRUNED


class RankError(RuntimeError):
    """Another process of the group has failed or died.

    Attributes:
        rank: Its rank; None where that is not known.
        reason: Why its run ended, as in ``state.stop_reason``; None where it left no word.
    """

    def __init__(self, message: str, failed: int | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.rank = failed
        self.reason = reason


def reason_after(error: BaseException, stop_reason: str | None) -> str:
    """Why a run ends that an error breaks off; ``stop_reason`` is why it was to end before, if it was."""
    if isinstance(error, RankError) and error.reason is not None:
        return error.reason
    if stop_reason in {DIVERGED, PRUNED}:
        return stop_reason
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else ERROR
