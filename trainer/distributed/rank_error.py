"""RankError, raised in the other processes when one fails, and the stop reason of a run that ends by an error."""

from __future__ import annotations

from trainer.state import DIVERGED, ERROR, INTERRUPTED, PRUNED


class RankError(RuntimeError):
    """Another process of the group has failed or died.

    Attributes:
        rank: Its rank; None if unknown.
        reason: Why its run ended, as in ``state.stop_reason``; None if it did not say so.
    """

    def __init__(self, message: str, failed: int | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.rank = failed
        self.reason = reason


def reason_after(error: BaseException, stop_reason: str | None) -> str:
    """The stop reason of a run that ends by ``error``; ``stop_reason`` is the one it had before, if any."""
    if isinstance(error, RankError) and error.reason is not None:
        return error.reason
    if stop_reason in {DIVERGED, PRUNED}:
        return stop_reason
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else ERROR
