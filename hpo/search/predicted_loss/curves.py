"""Keeps the learning curves of a study's ended trials as arrays, and derives what the pruner's model reads."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from optuna.trial import FrozenTrial, TrialState

from hpo.search.predicted_loss.audit import Condemned

Array = npt.NDArray[np.float64]

# Number of latest complete trials that are used to see how curves continue: older ones only add cost.
_REFERENCES = 24
# In shorter curves the middle can't be told from the end.
_TELLING = 12
# The range of `settling`, in octaves.
_ROUGHER, _CALMER = -2.0, 6.0
# Width of the Gaussian that smooths agreement over ln(step).
_NEIGHBOURS = 0.35
# How often the order of two trials is taken to hold until the end before any are compared: between chance (0.5)
# and certainty (1).
USUAL_AGREEMENT = 0.8


@dataclass(frozen=True)
class Population:
    """What the ended trials of a study say about one step; values are losses, lower is better.

    Attributes:
        ended: Number of ended trials, including those that did not reach this step.
        values: Value at this step of each trial that reached it [reached], inf where it had diverged.
        falls: How far each of them had fallen since half this step, where that is known [at most reached].
        best_fall: How far the trial with the best end had fallen since half this step; 0 where not finite.
        best_drop: How far that trial still fell from this step to its end; 0 where it rose.
        to_beat: The final value to beat: the best, or the k-th best.
        drops: How far the latest complete trials fell from this step to their end, where finite [compared + 1 at
            most].
        agreement: How often two complete trials were in the order of their final values at this step, 0 to 1.
        compared: Weight of that observation: the number of compared complete trials less one.
        settling: By how many octaves the complete trials were calmer at their end than in the middle (median); see
            `settling`.
    """

    ended: int
    values: Array
    falls: Array
    best_fall: float
    best_drop: float
    to_beat: float
    drops: Array
    agreement: float
    compared: int
    settling: float


class EndedCurves:
    """Curves and final values of ended trials, one row each, with signs such that lower is better.

    At a step that a trial did not report, it has the value before it; after its last report, a complete trial has
    its final value.

    Args:
        sign: 1 for a study that minimises, -1 for one that maximises.
    """

    def __init__(self, sign: int) -> None:
        self.sign = sign
        self._seen: set[int] = set()
        self._curves: list[tuple[npt.NDArray[np.int64], Array, float | None]] = []
        self._steps: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._values: Array = np.zeros((0, 0))
        self._until: Array = np.zeros(0)  # the last step of each, inf for a complete one
        self._placed = 0
        self._complete: list[int] = []
        self._settling: list[float] = []
        self._agreement: Array | None = None
        self._survivors: list[float] = []
        self._audited: list[float] = []
        self.longest = 0

    def update(self, trials: Collection[FrozenTrial]) -> bool:
        """Add the complete and pruned trials of a study that are new since the last call.

        Returns:
            False where there are fewer trials than before, so that the caller has to start with a new object.
        """
        if len(trials) < len(self._seen):
            return False
        if len(trials) > len(self._seen):
            for trial in trials:
                if trial.number not in self._seen:
                    self._seen.add(trial.number)
                    if trial.intermediate_values:
                        final = trial.values[0] if trial.values and trial.state == TrialState.COMPLETE else None
                        self.add(trial.intermediate_values, final)
                        if final is not None:
                            ends = self._survivors if Condemned.of(trial) is None else self._audited
                            insort(ends, self.sign * final if math.isfinite(final) else math.inf)
        return True

    def audit(self) -> tuple[int, int]:
        """How many audited trials ended better than the median survivor, and how many audited trials ended."""
        if not self._survivors:
            return 0, len(self._audited)
        return bisect_left(self._audited, self._survivors[len(self._survivors) // 2]), len(self._audited)

    def add(self, reports: dict[int, float], final: float | None) -> None:
        """Add a trial's reports by step; ``final`` is its value if it ran to its end, else None.

        Any value that is not finite counts as the worst.
        """
        steps = np.array(sorted(reports), np.int64)
        values = self.sign * np.array([reports[step] for step in steps], np.float64)
        values[~np.isfinite(values)] = np.inf
        outcome = None if final is None else self.sign * final if math.isfinite(final) else math.inf
        self._curves.append((steps, values, outcome))
        if outcome is not None:
            self.longest = max(self.longest, int(steps[-1]))
            if np.isfinite(outcome):
                self._complete.append(len(self._curves) - 1)
                self._settling.append(settling(values))
                self._agreement = None

    def _catch_up(self) -> None:
        """Write the new curves into their rows; steps that no trial reported before make new columns."""
        first, count = self._placed, len(self._curves)
        if first == count:
            return
        steps = np.unique(np.concatenate([self._steps, *(curve[0] for curve in self._curves[first:])]))
        if len(steps) > len(self._steps):
            self._steps, first, self._agreement = steps, 0, None
            self._values = np.full((0, len(steps)), np.nan)
        if count > len(self._values):
            more = np.full((max(64, 2 * count) - len(self._values), len(steps)), np.nan)
            self._values = np.concatenate([self._values, more])
        for row in range(first, count):
            self._values[row] = self._on_grid(row)
        until = [np.inf if final is not None else float(steps[-1]) for steps, _, final in self._curves[first:]]
        self._until = np.concatenate([self._until[:first], until])
        self._placed = count

    def _on_grid(self, row: int) -> Array:
        steps, values, final = self._curves[row]
        latest = np.searchsorted(steps, self._steps, side="right") - 1
        placed = np.where(latest >= 0, values[np.maximum(latest, 0)], np.nan)
        placed[self._steps > steps[-1]] = np.nan if final is None else final
        return placed

    def copy(self) -> EndedCurves:
        """A copy with the same curves, to which others can be added."""
        other = EndedCurves(self.sign)
        for steps, values, final in self._curves:
            reports = dict(zip(steps.tolist(), (self.sign * values).tolist(), strict=True))
            other.add(reports, None if final is None else self.sign * final)
        return other

    def __len__(self) -> int:
        return len(self._curves)

    @property
    def complete(self) -> int:
        """Number of trials that ran to a finite end."""
        return len(self._complete)

    def at(self, step: int, top_k: int) -> Population:
        """What the trials say about a step; at least one of them must be complete with a finite value."""
        self._catch_up()
        now, before = self._at(step), self._at(max(1, step // 2))
        reached = ~np.isnan(now)
        falls = fall(before, now)
        finals = np.array([self._curves[row][2] for row in self._complete], np.float64)
        best = self._complete[int(np.argmin(finals))]
        recent = self._complete[-_REFERENCES:]
        drops = now[recent] - finals[-_REFERENCES:]
        column = max(self._column(step), 0)
        return Population(
            ended=len(self._curves),
            values=now[reached],
            falls=falls[~np.isnan(falls)],
            best_fall=float(falls[best]) if np.isfinite(falls[best]) else 0.0,
            best_drop=max(float(now[best] - finals.min()), 0.0) if np.isfinite(now[best]) else 0.0,
            to_beat=float(np.sort(finals)[min(top_k, len(finals)) - 1]),
            drops=drops[np.isfinite(drops)],
            agreement=float(self._agreements()[column]),
            compared=len(recent) - 1,
            settling=float(np.median(self._settling[-_REFERENCES:])),
        )

    def _at(self, step: int) -> Array:
        """Each trial's value at a step; NaN for a trial that ended before it or had not reported by then."""
        column = self._column(step)
        known = self._values[: len(self._curves), max(column, 0)]
        return np.where(self._until >= step, known, np.nan) if column >= 0 else np.full(len(known), np.nan)

    def _column(self, step: int) -> int:
        return int(np.searchsorted(self._steps, step, side="right")) - 1

    def _agreements(self) -> Array:
        """By column, how often two complete trials were in their final order, smoothed over ln(step)."""
        if self._agreement is None:
            rows = self._complete[-_REFERENCES:]
            values = np.nan_to_num(self._values[rows], nan=np.inf)
            finals = np.array([self._curves[row][2] for row in rows], np.float64)
            first, second = np.triu_indices(len(rows), 1)
            now = np.sign(_compare(values[first], values[second]))
            end = np.sign(_compare(finals[first], finals[second]))[:, None]
            shares = ((now * end > 0) + 0.5 * (now * end == 0)).mean(axis=0) if len(first) else None
            if shares is None:
                self._agreement = np.full(len(self._steps), USUAL_AGREEMENT)
            else:
                places = np.log(np.maximum(self._steps, 1))
                weights = np.exp(-0.5 * ((places[:, None] - places) / _NEIGHBOURS) ** 2)
                self._agreement = weights @ shares / weights.sum(axis=1)
        return self._agreement


def settling(curve: Array) -> float:
    """By how many octaves a curve is calmer in its last eighth than in its second quarter.

    Roughness is the median size of the second differences, which a trend does not change. A learning rate that
    decays to nothing freezes the weights, and so the curve of any loss; with a constant rate a curve stays as
    rough as it was.

    Returns:
        A number from -2 to 6; 0 for a curve that is too short or not finite.
    """
    if len(curve) < _TELLING or not np.isfinite(curve).all():
        return 0.0
    bends, quarter = np.abs(np.diff(curve, 2)), len(curve) // 4
    floor = 1e-3 * float(np.median(bends)) + np.finfo(np.float64).tiny
    middle = float(np.median(bends[quarter : 2 * quarter])) + floor
    end = float(np.median(bends[-(quarter // 2) - 1 :])) + floor
    return min(max(math.log2(middle / end), _ROUGHER), _CALMER)


def fall(before: npt.ArrayLike, now: npt.ArrayLike) -> Array:
    """How far a value fell: ``abs(now)`` where it was infinite before, -inf where it is infinite now."""
    before, now = np.asarray(before, np.float64), np.asarray(now, np.float64)
    diverged, recovered = np.isinf(now), np.isinf(before)
    fallen = np.where(recovered, np.abs(now), np.where(recovered, 0.0, before) - np.where(diverged, 0.0, now))
    return np.where(diverged, -np.inf, fallen)


def _compare(left: Array, right: Array) -> Array:
    """Left minus right, 0 where both are infinite."""
    both = np.isinf(left) & np.isinf(right)
    return np.where(both, 0.0, left) - np.where(both, 0.0, right)
