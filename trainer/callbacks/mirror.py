"""What the callbacks share that copy a run to a service: a service may be away, and a run has an outcome."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

import torch

from trainer.callback import TrainerView
from trainer.state import CONTINUED, DIVERGED, ERROR, INTERRUPTED, PRUNED, Mode, TrainState, best_epoch

COMPLETE: Final = "complete"
OUT_OF_MEMORY: Final = "out_of_memory"

# Seconds in which a service that did not answer is not asked again: each asking waits for a time-out.
_AWAY_S = 600.0

logger = logging.getLogger(__name__)


class Service:
    """A service as this process knows it: whether it is away, and what was said of it.

    One for all runs of a process, so that an outage costs one time-out and one warning, not one a run.

    Args:
        name: For people.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._said: set[str] = set()
        self._ask_again = 0.0

    @property
    def is_away(self) -> bool:
        """Whether it did not answer a short while ago."""
        return time.monotonic() < self._ask_again

    def answered(self) -> None:
        """It is there: a later failure is news again."""
        self._said.clear()

    def failed(self, what: str, error: BaseException | str, *, away: bool = False) -> None:
        """Warn, unless the same was said since it last answered.

        Args:
            what: What the run is without, and what to do.
            error: What happened.
            away: Whether it did not answer, so that for ten minutes it is not asked again.
        """
        level = logging.INFO if what in self._said else logging.WARNING
        self._said.add(what)
        logger.log(level, "%s: %s", what, error)
        if away:
            self._ask_again = time.monotonic() + _AWAY_S

    def forget(self) -> None:
        """Know nothing of it, as a new process would."""
        self._said.clear()
        self._ask_again = 0.0


def outcome_of(trainer: TrainerView, error: BaseException | None) -> str:
    """How a fit ended.

    Args:
        trainer: The trainer, after the fit.
        error: What the fit raised, if anything.

    Returns:
        ``complete`` (also where it stopped early), ``pruned``, ``diverged``, ``out_of_memory``, ``error``, or
        ``interrupted``: it was stopped before its end, and may resume.
    """
    reason = trainer.state.stop_reason
    if reason == ERROR:
        return OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError | MemoryError) else ERROR
    if reason in CONTINUED:
        return COMPLETE if trainer.plan.reached(trainer.state) else INTERRUPTED
    return reason if reason in {DIVERGED, PRUNED} else COMPLETE


def best_of(state: TrainState, monitor: str, mode: Mode) -> dict[str, Any]:
    """``best_epoch`` and ``best_<monitor>``; empty where no epoch has a finite value."""
    epoch = best_epoch(state.history, monitor, mode, after=state.inherited)
    if epoch is None:
        return {}
    return {"best_epoch": epoch, f"best_{monitor}": float(state.history[epoch - 1][monitor])}
