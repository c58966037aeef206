"""`Seen`, a trial as a scheduler sees it, and `Curve`, its losses by epoch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from optuna.trial import FrozenTrial, TrialState

from hpo.storage.pausing import paused_at

State = Literal["waiting", "running", "paused", "ended"]


@dataclass(frozen=True)
class Seen:
    """A trial as a scheduler sees it; a process reuses it for later decisions while the trial is ended or paused.

    Attributes:
        number: The trial's number.
        params: Dotted path → value, without parameters whose condition does not hold.
        values: Finished epoch → the metric reported after it, which may be NaN or infinite; not every epoch need
            have a value.
        state: ``"waiting"`` for a worker, ``"running"``, ``"paused"`` or ``"ended"``.
        until: The epoch to which it has been granted; None: to its end, or nothing was granted.
        kinds: `Why.kind` of each grant, in order; empty for a trial without a grant.
        whole: Whether it has trained to its end.
        failed: Whether it has ended without a result.
        diverged: Whether it has ended by diverging, at its last report or within the epoch after it.
        imported: Whether it was trained outside of the study; then it counts against no budget.
        source: The study from which it was imported, perhaps with other data; None: none, or not known.
        feasible: Whether it keeps to the study's bounds, as far as it was measured; else it can't be the best.
        measured: Whether it was measured against the study's bounds, which happens at the end of a grant.
        mends: Whether it violates bounds and training may bring it within them, if it has not ended (`Mending`).
        inherited: Number of its first epochs that its parent has trained; it has no values there.
        replaces: The trial whose place it took as a fork.
        taken_over: Whether it has trained nothing, because its result is that of a trial with equal parameters.
        switch: The time that each of its starts and resumptions took, measured in its own epochs; None where that
            was not measured.
    """

    number: int
    params: Mapping[str, Any]
    values: Mapping[int, float]
    state: State
    until: int | None = None
    kinds: Sequence[str] = ()
    whole: bool = False
    failed: bool = False
    diverged: bool = False
    imported: bool = False
    source: str | None = None
    feasible: bool = True
    measured: bool = False
    mends: bool = False
    inherited: int = 0
    replaces: int | None = None
    taken_over: bool = False
    switch: float | None = None

    @property
    def epochs(self) -> int:
        """Epochs that the trial has finished, as far as they were reported, including its parent's.

        A paused trial has finished its whole grant, even if it reported nothing after the grant's last epoch.
        """
        reported = max(self.values, default=self.inherited)
        return max(reported, self.until or 0) if self.state == "paused" else reported

    def best(self, pick: Callable[[Iterable[float]], float]) -> float | None:
        """The best finite value by ``pick``, min or max; None where there is none."""
        values: Collection[float] = self.values.values()
        if not math.isfinite(sum(values)):  # a sum is finite only where all of them are
            values = [value for value in values if math.isfinite(value)]
        return pick(values) if values else None

    @cached_property
    def all_kinds(self) -> frozenset[str]:
        """The set of its `kinds`."""
        return frozenset(self.kinds)

    @cached_property
    def row(self) -> tuple[Any, ...]:
        """Its entries for `hpo.search.schedulers.columns.columns_of`, both least and largest value included."""
        last = max(self.values, default=None)
        return (
            self.number,
            self.state,
            last,
            last is not None and math.isfinite(self.values[last]),
            self.best(min),
            self.best(max),
            self.until,
            len(self.kinds),
            self.whole,
            self.failed,
            self.diverged,
            self.imported,
            self.source is not None,
            self.feasible,
            self.measured,
            self.mends,
            self.taken_over,
            self.inherited,
        )

    @cached_property
    def falling(self) -> Curve:
        """Its losses where the metric is minimised."""
        return self._curve(1.0)

    @cached_property
    def rising(self) -> Curve:
        """Its losses where the metric is maximised."""
        return self._curve(-1.0)

    def _curve(self, sign: float) -> Curve:
        steps = sorted(self.values)
        hopeless = not self.feasible and not self.mends
        values = [math.inf if hopeless else sign * self.values[step] for step in steps]
        if not math.isfinite(sum(values)):  # a sum is finite only where all of them are
            values = [value if math.isfinite(value) else math.inf for value in values]
        if self._breaks_off:
            return Curve(self, [*steps, self.epochs + 1], [*values, math.inf])
        return Curve(self, steps, values)

    @property
    def _breaks_off(self) -> bool:
        """Whether it diverged or failed without a report that shows it: its curve then gets an infinite end."""
        if self.diverged:
            return not self.values or math.isfinite(self.values[max(self.values)])
        has_end = self.values or self.whole or self.imported  # an imported trial may have its final value alone
        return self.state == "ended" and bool(self.params) and not has_end  # it failed: these are bad parameters


def state_of(trial: FrozenTrial) -> State:
    """`Seen.state` of a trial."""
    if trial.state.is_finished():
        return "ended"
    if trial.state == TrialState.WAITING:
        return "waiting"
    return "running" if paused_at(trial) is None else "paused"


@dataclass(frozen=True, eq=False)
class Curve:
    """A trial with its losses by epoch, of which less is better.

    A loss is infinite where the report is not finite, and all are where the trial violates a bound that training
    does not mend. A trial that diverged within an epoch has an infinite loss after that epoch, as if it had
    reported it. A trial that has ended without a report, such as one that fails when it is built, has an infinite
    loss after its first epoch.

    Attributes:
        seen: The trial.
        steps: Epochs with a loss, ascending.
        losses: The losses after these epochs.
    """

    seen: Seen
    steps: Sequence[int]
    losses: Sequence[float]

    @property
    def number(self) -> int:
        """The trial's number."""
        return self.seen.number

    @cached_property
    def done(self) -> int:
        """The last epoch with a loss, or the epoch at which a paused trial has paused; 0 without either."""
        if self.seen.state == "paused":
            return self.seen.epochs
        return self.steps[-1] if self.steps else 0

    @property
    def last(self) -> float:
        """The loss reported last; infinite without one."""
        return self.losses[-1] if self.losses else math.inf

    @cached_property
    def best(self) -> float:
        """The least loss; infinite without one."""
        return min(self.losses, default=math.inf)

    @cached_property
    def resumable(self) -> bool:
        """Whether the trial is paused and its last loss is finite."""
        return self.seen.state == "paused" and math.isfinite(self.last)

    def rank_at(self, epoch: int) -> tuple[bool, float, int]:
        """The key that ranks trials after an epoch: those within the bounds first, then by loss and number."""
        return not self.seen.feasible, self.at(epoch), self.number

    def at(self, epoch: int) -> float:
        """The loss at the last report up to an epoch; infinite before the first."""
        index = bisect_right(self.steps, epoch)
        return self.losses[index - 1] if index else math.inf
