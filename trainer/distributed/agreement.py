"""Makes all processes of a run do what a hook in any one of them has asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from trainer.state import DIVERGED, VALIDATION, TrainState, prevailing

logger = logging.getLogger(__name__)


class Wishes(NamedTuple):
    """What hooks of one process have asked for; see the attributes of `TrainState`."""

    stop_reason: str | None
    stop_now: bool
    epoch_stopped: bool
    skip_validation: bool
    checkpoint_requests: tuple[int, int]


def wishes(state: TrainState) -> Wishes:
    """What the hooks of this process have asked for."""
    return Wishes(
        state.stop_reason,
        state.stop_now,
        state.epoch_stopped,
        VALIDATION in state.skips,
        state.checkpoint_requests,
    )


def agreed(state: TrainState, of_ranks: Sequence[Wishes | None], mine: Wishes) -> None:
    """Write to this process's state what any process has asked for.

    Of several reasons to stop, the one of the lowest rank counts as the first; see `TrainState.stop`.

    Args:
        state: The state to write to.
        of_ranks: The wishes of each process, by rank; None for a process with no new wishes.
        mine: The wishes of this process, new or not.
    """
    asked = [each for each in of_ranks if each is not None] + [mine]
    state.stop_now = any(each.stop_now for each in asked)
    cut = state.stop_now and state.batch_index > 0
    state.stop_reason = prevailing([each.stop_reason for each in asked], cut=cut)
    state.epoch_stopped = any(each.epoch_stopped for each in asked)
    if any(each.skip_validation for each in asked):
        state.skips.add(VALIDATION)
    requests = [each.checkpoint_requests for each in asked]
    state.checkpoint_requests = max(each[0] for each in requests), max(each[1] for each in requests)
    if state.stop_reason != mine.stop_reason:
        number = next(rank for rank, each in enumerate(of_ranks) if each and each.stop_reason == state.stop_reason)
        level = logging.WARNING if state.stop_reason == DIVERGED else logging.INFO
        logger.log(level, "rank %d asked the run to end: %s", number, state.stop_reason)
