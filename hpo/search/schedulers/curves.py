"""Turns a study's trials into curves of losses, of which less is better in any study, and finds the horizon."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, SupportsInt

from hpo.search.schedulers.scheduler import Standing
from hpo.search.schedulers.seen import Curve, Seen

#: An unknown horizon is guessed as `_ROOM` times the largest epoch seen, but at least `_LEAST`.
_ROOM: Final = 3
_LEAST: Final = 9


def curves_of(standing: Standing) -> list[Curve]:
    """Every trial as a curve of losses, except those of earlier studies, whose losses may be on another level."""
    return _curves(standing, (seen for seen in standing.trials if seen.source is None))


def earlier_curves(standing: Standing) -> dict[str, list[Curve]]:
    """The trials of earlier studies that have reported, as curves by the name of their study."""
    found: dict[str, list[Seen]] = {}
    for seen in standing.trials:
        if seen.source is not None and seen.values:
            found.setdefault(seen.source, []).append(seen)
    return {source: _curves(standing, trials) for source, trials in found.items()}


def _curves(standing: Standing, trials: Iterable[Seen]) -> list[Curve]:
    return [seen.falling if standing.minimize else seen.rising for seen in trials]


def as_learnt(curves: Iterable[Curve]) -> list[Curve]:
    """The curves as a model sees them: a trial that failed is infinite at its last report, as if it had diverged.

    Else a model would only see how well the trial began, and would propose parameters that fail again and again.
    The same holds for a trial that has ended outside of the bounds.
    """
    return [_failing(curve) if _is_bad(curve.seen) and curve.seen.values else curve for curve in curves]


def _is_bad(seen: Seen) -> bool:
    return seen.failed or (seen.state == "ended" and not seen.feasible)


def _failing(curve: Curve) -> Curve:
    return Curve(curve.seen, curve.steps, [*curve.losses[:-1], math.inf])


def horizon_of(standing: Standing, curves: Sequence[Curve]) -> int:
    """Epochs of a whole trial; where the study does not say, those of the longest trial that trained to its end.

    Where no trial did, or a paused trial has come further (then those that ended had stopped early), the horizon
    is three times the largest epoch seen and at least 9, so that the best trials can train further.
    """
    whole = max((curve.done for curve in curves if curve.seen.whole), default=0)
    paused = max((curve.done for curve in curves if curve.resumable), default=0)
    return horizon_by(standing, whole, paused, max((curve.done for curve in curves), default=0))


def horizon_by(standing: Standing, whole: SupportsInt, paused: SupportsInt, longest: SupportsInt) -> int:
    """`horizon_of` from the epochs of the longest whole trial, the longest paused one, and the longest of all."""
    if standing.horizon is not None:
        return standing.horizon
    ended = int(whole)
    return ended if ended and ended >= int(paused) else max(_LEAST, _ROOM * int(longest))


def affordable(standing: Standing, done: int, goal: int) -> int:
    """The goal of a trial that has ``done`` epochs, lowered as far as the budget of epochs requires."""
    return goal if standing.epochs_left is None else min(goal, done + standing.epochs_left)


def until(standing: Standing, curves: Sequence[Curve], goal: int) -> int | None:
    """A goal in the form in which a grant stores it; see `as_granted`."""
    return as_granted(standing, horizon_of(standing, curves), goal, seen=any(curve.seen.whole for curve in curves))


def as_granted(standing: Standing, horizon: int, goal: int, *, seen: bool) -> int | None:
    """A goal in the form in which a grant stores it: None means the trial's end.

    The horizon is certain only where the study says it. Where it is the length of a trial that has trained to its
    end, another trial may be longer, and None would claim all that is left of a budget of epochs. One epoch more
    than the horizon lets a trial of that length reach its end.

    Args:
        standing: The study.
        horizon: The result of `horizon_of`.
        goal: The epoch.
        seen: Whether a trial has trained to its end.
    """
    if goal < horizon or not (seen or standing.horizon is not None):
        return goal
    bounded = standing.horizon is not None or standing.longest is not None
    return None if bounded or standing.n_epochs is None else max(goal, horizon + 1)
