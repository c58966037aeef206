"""Decides which checkpoints are kept: the best, the latest, and the permanent ones."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, get_args

from trainer.checkpoint.files import Progress
from trainer.state import Mode

#: What may be removed of the checkpoints that the rules do not keep: all, only those inside epochs, or none.
Removal = Literal["all_non_permanent", "ephemeral_only", "never"]
REMOVALS: Final[tuple[Removal, ...]] = get_args(Removal)


def best_epochs(
    history: Sequence[Mapping[str, float]], metric: str, mode: Mode, count: int, *, after: int = 0
) -> list[int]:
    """Numbers (from 1) of the ``count`` epochs with the best values, the best first, the earlier of equals first.

    Epochs up to ``after`` are left out, and so are those without a finite value of the metric.
    """
    sign = 1 if mode == "min" else -1
    values = (
        (metrics.get(metric, math.nan), epoch) for epoch, metrics in enumerate(history[after:], start=after + 1)
    )
    ranked = sorted((sign * value, epoch) for value, epoch in values if math.isfinite(value))
    return [epoch for _, epoch in ranked[:count]]


def retained(
    saved: Iterable[Progress],
    *,
    best: Collection[int],
    keep_last: int,
    permanent: Collection[Progress],
    remove: Removal = "all_non_permanent",
) -> set[Progress]:
    """The checkpoints of a run that are kept.

    Args:
        saved: The run's checkpoints.
        best: Epochs whose end-of-epoch checkpoints are kept.
        keep_last: How many of the latest end-of-epoch checkpoints are kept, and as many of the latest ones inside
            the epoch after them.
        permanent: Checkpoints that are always kept.
        remove: Which of the others may be removed.

    Returns:
        Those to keep; the one with the most progress is always among them.
    """
    ordered = sorted(saved)
    if remove == "never":
        return set(ordered)
    ends = [progress for progress in ordered if not progress[1]]
    inside = [progress for progress in ordered if progress[1] and (not ends or progress > ends[-1])]
    last = ends if remove == "ephemeral_only" else ends[-keep_last:]
    always = {
        progress for progress in ordered if progress in permanent or (not progress[1] and progress[0] in best)
    }
    return always | set(last) | set(inside[-keep_last:])
