"""Which checkpoints stay: the best, the latest, and the permanent ones."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, get_args

from trainer.checkpoint.files import Progress
from trainer.state import Mode

#: What may be removed: all that the rules do not keep, of that only what lies inside epochs, or nothing.
Removal = Literal["all_non_permanent", "ephemeral_only", "never"]
REMOVALS: Final[tuple[Removal, ...]] = get_args(Removal)


def best_epochs(
    history: Sequence[Mapping[str, float]], metric: str, mode: Mode, count: int, *, after: int = 0
) -> list[int]:
    """Numbers (from 1) of the ``count`` epochs with the best values, the best first, the earlier of equals first.

    An epoch without the metric, or with one that is not finite, is never among them, and none up to ``after``.
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
    """Which of a run's checkpoints stay.

    Args:
        saved: Those that there are.
        best: Epochs whose ends stay.
        keep_last: Latest ends of epochs that stay, and latest checkpoints inside the epoch after those.
        permanent: Those that stay for ever.
        remove: Of the others, what may go.

    Returns:
        Those that stay; the one with the most progress is always among them.
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
