"""What was seen of a study's trials, as losses: the least is best, whatever the study's direction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, SupportsInt

from hpo.search.schedulers.scheduler import Standing
from hpo.search.schedulers.seen import Curve, Seen

#: A horizon that is not known is taken to be this many times the largest epoch seen, and no less than that.
_ROOM: Final = 3
_LEAST: Final = 9


def curves_of(standing: Standing) -> list[Curve]:
    """Every trial as a curve of losses, but those of earlier studies: their losses may have another level."""
    return _curves(standing, (seen for seen in standing.trials if seen.source is None))


def earlier_curves(standing: Standing) -> dict[str, list[Curve]]:
    """The trials of earlier studies that have reported, as curves, by the study's name."""
    found: dict[str, list[Seen]] = {}
    for seen in standing.trials:
        if seen.source is not None and seen.values:
            found.setdefault(seen.source, []).append(seen)
    return {source: _curves(standing, trials) for source, trials in found.items()}


def _curves(standing: Standing, trials: Iterable[Seen]) -> list[Curve]:
    return [seen.falling if standing.minimize else seen.rising for seen in trials]


def as_learnt(curves: Iterable[Curve]) -> list[Curve]:
    """The curves as a model is to see them: one that failed is infinite at its last report, as if it had diverged.

    Else a model would know only how well it began, and propose what fails again and again. So it is for one that
    has ended outside of the bounds.
    """
    return [_failing(curve) if _is_bad(curve.seen) and curve.seen.values else curve for curve in curves]


def _is_bad(seen: Seen) -> bool:
    return seen.failed or (seen.state == "ended" and not seen.feasible)


def _failing(curve: Curve) -> Curve:
    return Curve(curve.seen, curve.steps, [*curve.losses[:-1], math.inf])


def horizon_of(standing: Standing, curves: Sequence[Curve]) -> int:
    """Epochs of a whole trial; where the study does not say, those of the longest that trained to its end.

    Where none has, or one that is paused has come further (those that ended have stopped early), three times the
    largest epoch seen: room for the leaders to go further.
    """
    whole = max((curve.done for curve in curves if curve.seen.whole), default=0)
    paused = max((curve.done for curve in curves if curve.resumable), default=0)
    return horizon_by(standing, whole, paused, max((curve.done for curve in curves), default=0))


def horizon_by(standing: Standing, whole: SupportsInt, paused: SupportsInt, longest: SupportsInt) -> int:
    """The same by the epochs of the longest trial that trained to its end, that is paused, and of all."""
    if standing.horizon is not None:
        return standing.horizon
    ended = int(whole)
    return ended if ended and ended >= int(paused) else max(_LEAST, _ROOM * int(longest))


def affordable(standing: Standing, done: int, goal: int) -> int:
    """The goal of a trial that has ``done`` epochs, or as far towards it as the budget of epochs allows."""
    return goal if standing.epochs_left is None else min(goal, done + standing.epochs_left)


def until(standing: Standing, curves: Sequence[Curve], goal: int) -> int | None:
    """A goal as a grant has it; see `as_granted`."""
    return as_granted(standing, horizon_of(standing, curves), goal, seen=any(curve.seen.whole for curve in curves))


def as_granted(standing: Standing, horizon: int, goal: int, *, seen: bool) -> int | None:
    """A goal as a grant has it: None for the trial's end, which is certain only where the horizon is known.

    Where it is that of a trial that has trained to its end, another may be longer: None would claim all that a
    budget of epochs has left. One epoch more than the horizon lets a trial of its length come to its end.

    Args:
        standing: The study.
        horizon: Of `horizon_of`.
        goal: The epoch.
        seen: Whether a trial has trained to its end.
    """
    if goal < horizon or not (seen or standing.horizon is not None):
        return goal
    bounded = standing.horizon is not None or standing.longest is not None
    return None if bounded or standing.n_epochs is None else max(goal, horizon + 1)
