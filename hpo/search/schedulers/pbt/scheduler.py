"""`Pbt`: population-based training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from hpo.search.schedulers.curves import affordable, curves_of, until
from hpo.search.schedulers.granting import GrantScheduler
from hpo.search.schedulers.pbt.members import Members
from hpo.search.schedulers.pbt.perturbation import perturbed
from hpo.search.schedulers.scheduler import Fork, New, Next, Resume, Standing, Wait, Why
from hpo.search.schedulers.seen import Curve

#: Looks at a member in a whole trial, where ``every`` is not given.
_GENERATIONS: Final = 10


@dataclass(frozen=True)
class Pbt(GrantScheduler):
    """A population of trials, whose worst are replaced by forks of its best as they train.

    Each member pauses after every ``every`` epochs. The member with the fewest epochs is looked at first. Where it
    is among the worst of those that have come to its epoch, it is pruned, and a new trial takes its place: a
    *fork* that begins with the checkpoint which one of the best had there, and with that one's parameters,
    perturbed. Else it resumes. A member that has diverged, failed or violates a bound that training does not mend
    is replaced by a fork too; no worker waits for others while a member is paused. One that is retried after that
    trains beside the population, and pauses for good once it is among the worst. Jaderberg et al., Population
    Based Training of Neural Networks (2017), with truncation selection, and asynchronous as there.

    Kinds of its grants: ``"initial"`` (a member of the first population), ``"survivor"`` and ``"fork"``.

    Attributes:
        population: Members that train at a time.
        every: Epochs between two looks at a member; None: a tenth of a whole trial, 1 where that is not known.
        quantile: The share of the members that count as the worst, and as the best; at most a half.
        resample: How likely a perturbed parameter is drawn anew, in place of a move to a neighbouring value.
        perturb: The parameters that a fork may change. Left out, those of the optimizer, the loss and the step,
            and ``loader.batch_size``, as far as a checkpoint can be trained on with another value. All others
            stay as the leader has them.

    Raises:
        ValueError: An argument is out of range, or the population has no worst ``quantile``.
    """

    forks: ClassVar[bool] = True

    population: int = 8
    every: int | None = None
    quantile: float = 0.25
    resample: float = 0.25
    perturb: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not 0 < self.quantile <= 0.5:
            raise ValueError(f"quantile is {self.quantile!r}: give a share above 0, at most 0.5")
        if math.floor(self.population * self.quantile) < 1:
            raise ValueError(
                f"population is {self.population!r}: a quantile of {self.quantile:g} holds no member; give "
                f"at least {math.ceil(1 / self.quantile)}"
            )
        if self.every is not None and self.every < 1:
            raise ValueError(f"every is {self.every!r}: give at least 1 epoch")
        if not 0 <= self.resample <= 1:
            raise ValueError(f"resample is {self.resample!r}: give a probability")

    def first(self, standing: Standing) -> int | None:
        """The epoch of the first look at a member."""
        return until(standing, curves_of(standing), self._interval(standing))

    def next(self, standing: Standing) -> Next:
        """A fork or a new member where one is missing, else the paused member with the fewest epochs.

        A trial whose grant ends always pauses, so that its checkpoint is on disk for forks.
        """
        if standing.epochs_left == 0 or standing.here is not None:
            return Wait()
        curves = curves_of(standing)
        members = Members([curve for curve in curves if not curve.seen.imported], self._interval(standing))
        if members.alive < self.population and standing.new_left != 0:
            return self._filled(standing, curves, members)
        for paused in members.resumable():
            step = paused.seen.epochs
            leaders = members.leaders(paused, step, self.quantile) if standing.new_left != 0 else []
            if not leaders:
                goal = until(standing, curves, affordable(standing, step, self._goal(standing, step)))
                return Resume(paused.number, goal, Why("survivor"))
            if members.has_place(paused):
                return self._fork(standing, curves, leaders, step, paused.number)
        return Wait()

    def _filled(self, standing: Standing, curves: Sequence[Curve], members: Members) -> Next:
        """A fork in place of the lost member that came furthest; a new member where nothing can be forked."""
        for lost in members.lost():
            for step in members.steps_up_to(lost):
                if best := members.best(step, self.quantile):
                    return self._fork(standing, curves, best, step, lost.number)
        return New(None, until(standing, curves, affordable(standing, 0, self._goal(standing, 0))), Why("initial"))

    def _fork(
        self, standing: Standing, curves: Sequence[Curve], leaders: Sequence[Curve], step: int, replaces: int
    ) -> Fork:
        rng = np.random.default_rng((standing.seed, standing.decision))
        leader = leaders[int(rng.integers(len(leaders)))]
        params = perturbed(
            leader.seen.params, standing.space, self.perturb, rng, resample=self.resample, where=standing.where
        )
        goal = affordable(standing, step, self._goal(standing, step))
        return Fork(leader.number, step, params, until(standing, curves, goal), Why("fork"), replaces=replaces)

    def _interval(self, standing: Standing) -> int:
        if self.every is not None:
            return self.every
        return 1 if standing.horizon is None else math.ceil(standing.horizon / _GENERATIONS)

    def _goal(self, standing: Standing, step: int) -> int:
        """The epoch of the next look at a member, or of its training's end."""
        every = self._interval(standing)
        goal = (step // every + 1) * every
        return goal if standing.horizon is None else min(goal, standing.horizon)
