"""A trial as a scheduler sees it, and its curve of losses."""

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
    """A trial as a scheduler sees it. A process keeps one that has ended, or is paused, from look to look.

    Attributes:
        number: Its number.
        params: Dotted path → value; a parameter whose condition does not hold is left out.
        values: Finished epochs → the metric as it was reported after them; it may be NaN or infinite, and epochs
            may be left out.
        state: ``"waiting"`` for a worker, ``"running"``, ``"paused"`` or ``"ended"``.
        until: The epoch to which it has been granted; None: its end, or nothing was granted.
        kinds: `Why.kind` of each grant, the first one first; empty for a trial that was never granted anything.
        whole: It has trained to its end.
        failed: It has ended without a result.
        diverged: It has ended by diverging, at its last report or within the epoch after it.
        imported: It was trained outside of the study: it counts against no budget.
        source: The study that it was imported from, perhaps of other data; None: none, or it is not known.
        feasible: It keeps to the study's bounds, as far as it was measured; else it can't be the best.
        measured: How far it violates the study's bounds is known: it has come to the end of a grant.
        mends: It violates bounds, and training may bring one that has not ended within them (`Mending`).
        inherited: Epochs at its beginning that another trial, its parent, has trained; it has no values there.
        replaces: The trial in whose place it was forked.
        taken_over: Its result is that of a trial with the same parameters: it has trained nothing.
        switch: Epochs of its own that could be trained in the time that each of its starts and resumptions took;
            None where that was not measured.
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
        """Epochs that it has finished, as far as they were reported, those of its parent included.

        One that has paused has had all of its grant, also where it reported nothing after the last epoch of it.
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
        """`kinds`, each once."""
        return frozenset(self.kinds)

    @cached_property
    def row(self) -> tuple[Any, ...]:
        """What `hpo.search.schedulers.columns.columns_of` needs of it; least and largest value both."""
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
        """Its losses where the metric is to fall."""
        return self._curve(1.0)

    @cached_property
    def rising(self) -> Curve:
        """Its losses where the metric is to rise."""
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
        """Whether it ended badly, and its last report, if there is one, does not say so."""
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
    """A trial with its losses: less is better, infinite where nothing finite was reported.

    They are infinite, too, where it violates a bound that training does not mend.

    One that diverged within an epoch has an infinite loss after that epoch, as if it had reported so. One that
    has ended without a report, as a trial that fails when it is built, has it after its first.

    Attributes:
        seen: The trial.
        steps: Epochs with a report, ascending.
        losses: The losses there.
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
        """The last epoch with a report, or of a paused trial where it has paused; 0: none."""
        if self.seen.state == "paused":
            return self.seen.epochs
        return self.steps[-1] if self.steps else 0

    @property
    def last(self) -> float:
        """The loss after it."""
        return self.losses[-1] if self.losses else math.inf

    @cached_property
    def best(self) -> float:
        """The least loss."""
        return min(self.losses, default=math.inf)

    @cached_property
    def resumable(self) -> bool:
        """Whether it is paused, and has not diverged."""
        return self.seen.state == "paused" and math.isfinite(self.last)

    def rank_at(self, epoch: int) -> tuple[bool, float, int]:
        """What orders trials after an epoch: who violates a bound comes last, then the loss, then the number."""
        return not self.seen.feasible, self.at(epoch), self.number

    def at(self, epoch: int) -> float:
        """The loss at the last report up to an epoch; infinite before the first."""
        index = bisect_right(self.steps, epoch)
        return self.losses[index - 1] if index else math.inf
