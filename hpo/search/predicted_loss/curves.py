"""The learning curves of a study's ended trials as arrays, kept up to date trial by trial."""

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

# So many of the latest complete trials show how curves continue; older ones add cost and nothing else.
_REFERENCES = 24
# Shorter curves have no middle apart from their end.
_TELLING = 12
# Octaves that `settling` gives at most, either way.
_ROUGHER, _CALMER = -2.0, 6.0
# Epochs apart by this factor (as a logarithm) inform about each other's agreement.
_NEIGHBOURS = 0.35
# Before any are compared, so often the order of two trials is taken to hold until the end: between chance and
# certainty.
USUAL_AGREEMENT = 0.8


@dataclass(frozen=True)
class Population:
    """What the ended trials of a study say about one step; values are losses, lower is better.

    Attributes:
        ended: Trials that have ended, those that never got to this step among them.
        values: Value at this step of each that got there, inf where it had diverged; [reached].
        falls: How far each of them had fallen since half that step; [reached].
        best_fall: How far the trial that ended best had fallen since half this step; 0 where it was not finite.
        best_drop: How far that one still fell from here to its end; 0 where it rose.
        to_beat: The final value to beat: the best, or the k-th best.
        drops: How far the complete trials fell from here to their end; [complete].
        agreement: How often the order of two complete trials at this step was that of their final values, 0 to 1.
        compared: Weight of that observation: the number of complete trials less one.
        settling: By how many octaves the complete trials were calmer at their end than in the middle; see
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
    """Curves and final values of ended trials, a row each, turned so that lower is better.

    A step that a trial did not report repeats the value before it; after a complete trial's last report its
    final value holds.

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
        """Take in the complete and pruned trials of a study that are new since the last call.

        Returns:
            Whether these are the same trials and more; where some have gone, it takes new arrays.
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
        """How many audited trials ended better than the median survivor, and how many ended."""
        if not self._survivors:
            return 0, len(self._audited)
        return bisect_left(self._audited, self._survivors[len(self._survivors) // 2]), len(self._audited)

    def add(self, reports: dict[int, float], final: float | None) -> None:
        """Add a trial's reports, by step; ``final`` is the value of a trial that ran to its end, else None.

        A value that is not finite is the worst, whichever it is.
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
        """Another with the same curves, to add to."""
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
        """What they say about a step; one of them at least must be complete."""
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
        """Everyone's value at a step; NaN for those that were not there, or not yet."""
        column = self._column(step)
        known = self._values[: len(self._curves), max(column, 0)]
        return np.where(self._until >= step, known, np.nan) if column >= 0 else np.full(len(known), np.nan)

    def _column(self, step: int) -> int:
        return int(np.searchsorted(self._steps, step, side="right")) - 1

    def _agreements(self) -> Array:
        """By column: how often two complete trials were in their final order, smoothed over log step."""
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

    Rough means the median size of its second differences, which a trend leaves alone. A learning rate that decays
    to nothing freezes the weights, and the curve with them, for any loss; with a constant rate a curve is as
    rough at its end as before.

    Returns:
        A number from -2 to 6; 0 for a curve too short or not finite.
    """
    if len(curve) < _TELLING or not np.isfinite(curve).all():
        return 0.0
    bends, quarter = np.abs(np.diff(curve, 2)), len(curve) // 4
    floor = 1e-3 * float(np.median(bends)) + np.finfo(np.float64).tiny
    middle = float(np.median(bends[quarter : 2 * quarter])) + floor
    end = float(np.median(bends[-(quarter // 2) - 1 :])) + floor
    return min(max(math.log2(middle / end), _ROUGHER), _CALMER)


def fall(before: npt.ArrayLike, now: npt.ArrayLike) -> Array:
    """How far a value fell: its whole size where it came down from infinity, -inf where it has diverged."""
    before, now = np.asarray(before, np.float64), np.asarray(now, np.float64)
    diverged, recovered = np.isinf(now), np.isinf(before)
    fallen = np.where(recovered, np.abs(now), np.where(recovered, 0.0, before) - np.where(diverged, 0.0, now))
    return np.where(diverged, -np.inf, fallen)


def _compare(left: Array, right: Array) -> Array:
    """Left minus right, 0 where both are infinite."""
    both = np.isinf(left) & np.isinf(right)
    return np.where(both, 0.0, left) - np.where(both, 0.0, right)
