"""One decision of the freeze-thaw scheduler: whether breadth, successive halving, an unjudged trial or the model.

*Even* points come from the even sequence, not from the model. A trial runs *unjudged* while its grants do not
depend on its values.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from itertools import dropwhile, pairwise
from typing import Final

from hpo.search.schedulers.curves import as_learnt
from hpo.search.schedulers.freeze_thaw import agreement
from hpo.search.schedulers.freeze_thaw.choice import ModelChoice
from hpo.search.schedulers.freeze_thaw.study_view import StudyView
from hpo.search.schedulers.rungs import Climbers, climbing, ladder, promotion
from hpo.search.schedulers.scheduler import New, Next, Resume, Wait, Why
from hpo.search.schedulers.seen import Curve

#: The factor between rungs; one in `_FACTOR` trials at a rung is promoted, or one in its square where ranks agree.
_FACTOR: Final = 3
#: Epochs for all of the first trials: `_OPENING`, but at most those of `_WHOLE_TRIALS` whole trials, at least this
#: share of a whole trial, and at most this share of the budget.
_OPENING: Final = 27
_WHOLE_TRIALS: Final = 1.5
_OF_A_TRIAL: Final = 0.5
_OF_THE_BUDGET: Final = 0.1
#: The least number of first trials, and of trials with a finite report before the model is used.
_FEWEST: Final = 4
#: Number of whole trials after which a study ends whose losses are all equal.
_LEVEL: Final = 4
#: Number of the best trials of earlier studies that are tried first.
_LEADERS: Final = 2
#: Halving's share of the time, where the model's trials are better than even ones, and where they are not.
_HALVING_LEAST: Final = 0.05
_HALVING_MOST: Final = 0.75
#: How fast halving's share falls with the share of comparisons above a half that the model's trials win.
_HALVING_SLOPE: Final = 4.0
#: Share of new trials at even points, where parameters depend on others.
_BREADTH: Final = 0.25
#: Share of the epochs for unjudged trials, where early ranks agree with late ones, and where they do not.
_WHOLE_LEAST: Final = 0.05
_WHOLE_MOST: Final = 0.3


class Mixture:
    """One decision of the scheduler.

    Args:
        view: The study at this decision.
    """

    def __init__(self, view: StudyView) -> None:
        self._view = view
        self._rungs = ladder(view.horizon, _FACTOR)
        self._base = agreement.base_rung(self._rungs, view.switch)

    def first_rung(self) -> int | None:
        """The epoch at which an enqueued trial pauses first."""
        return self._view.until(self._first)

    def answer(self) -> Next:
        """The answer to a free worker; see `Scheduler.next`."""
        if self._view.standing.epochs_left == 0:
            return Wait()
        return self._leaders() or self._opening() or self._unjudged() or self._granted() or self._last_resort()

    @cached_property
    def _agreement(self) -> dict[int, float]:
        return agreement.agreements(self._view.own, self._rungs, self._base)

    @cached_property
    def _first(self) -> int:
        return agreement.first_rung(self._agreement, self._rungs, self._opening_trials)

    def _opening_trials(self, rung: int) -> float:
        """How many trials can start and reach a rung in the time of the opening."""
        switch = self._view.switch
        return self._opening_epochs / self._base * (self._base + switch) / (rung + switch)

    @cached_property
    def _even(self) -> list[Curve]:
        """The study's trials at even points."""
        return [curve for curve in self._view.own if agreement.is_even(curve)]

    @cached_property
    def _singles(self) -> list[Curve]:
        """The trials of `_even` that are not represented by a twin."""
        return [curve for curve in self._even if curve.number not in self._view.twins]

    @cached_property
    def _untouched(self) -> list[Curve]:
        """The trials of `_singles` that are paused and have run unjudged so far."""
        resumable = [curve for curve in self._singles if curve.resumable]
        return [curve for curve in resumable if agreement.unjudged(curve, self._base) == curve.done]

    @cached_property
    def _climbers(self) -> Climbers:
        return climbing(self._singles)

    @cached_property
    def _opening_epochs(self) -> float:
        horizon = self._view.horizon
        epochs = max(min(_OPENING, _WHOLE_TRIALS * horizon), _OF_A_TRIAL * horizon)
        budget = self._view.standing.n_epochs
        return epochs if budget is None else min(epochs, _OF_THE_BUDGET * budget)

    def _leaders(self) -> New | None:
        """A new trial with the parameters of one of earlier studies' best; these come first, to the base rung."""
        tried = sum("earlier" in curve.seen.kinds[:1] for curve in self._view.own)
        if not self._view.earlier or tried >= _LEADERS or not self._view.may_start:
            return None
        learnt = self._view.learnt
        known = {self._view.encoding.key(curve.seen.params) for curve in self._view.own}
        allowed = [params for params in learnt.leaders if self._view.encoding.allows(params)]
        for params in allowed[:_LEADERS]:
            if self._view.encoding.key(params) not in known:
                state = {**self._view.standing.state, "earlier": learnt.scales}
                return self._view.new(params, self._base, Why("earlier"), state)
        return None

    def _opening(self) -> Next | None:
        """Trials at even points until the opening's time is used: first to the base rung, then to the first rung.

        Promotions are decided once all of these have begun, with the model; before that, a trial is promoted only
        where that takes little time.
        """
        initial = max(int(self._opening_trials(self._base)), _FEWEST)
        if trials := self._view.standing.n_trials:
            initial = min(initial, max(trials // _FACTOR, _FEWEST))
        if len(self._even) < max(initial, self._view.standing.workers):
            return self._cheap_promotion() or self._view.even(self._base, "initial")
        if self._first >= self._base or len(self._even) >= int(self._opening_trials(self._first)):
            return None
        return self._view.even(self._first, "breadth")

    def _cheap_promotion(self) -> Resume | None:
        """A promotion, if it takes less time than two new trials, of which each costs a switch."""
        found = self._promoted(min(self._first, self._base))
        return found if found and self._time(found) < 2 * (self._base + self._view.switch) else None

    def _unjudged(self) -> Next | None:
        """A grant for an unjudged trial to its next rung, if the share of epochs for such trials covers it."""
        lowest = min(self._base, self._first)
        steps = [(early, late) for early, late in pairwise(self._rungs) if early >= lowest]
        runners = [curve for curve in self._even if "whole" in curve.seen.kinds]
        spent = {
            late: sum(max(0, min(self._view.reach(curve), late) - early) for curve in runners)
            for early, late in steps
        }
        trust = agreement.to_the_end(self._agreement, self._first)
        share = _WHOLE_MOST - (_WHOLE_MOST - _WHOLE_LEAST) * trust
        left = share * sum(map(self._view.reach, self._view.own)) - sum(spent.values())
        # Lower rungs come first: the k-th step gets 1/k of the epochs of the first.
        for _, (early, late) in sorted(enumerate(steps), key=lambda each: (each[0] + 1) * spent[each[1][1]]):
            for curve in self._untouched:
                if early <= curve.done < late:
                    # Early in a study a whole training would be much of all epochs so far: the share is saved up.
                    return self._view.resume(curve, late, Why("whole")) if late - curve.done <= left else None
        return None

    def _granted(self) -> New | Resume | None:
        wins = agreement.wins(self._view.own)
        share = min(max(_HALVING_MOST - _HALVING_SLOPE * (wins - 0.5), _HALVING_LEAST), _HALVING_MOST)
        coin = self._view.rng.random()
        halving, model = self._halving(), self._model()
        if halving is None or model is None:
            return halving or model
        if isinstance(model, New) and self._breadth_is_due() and (even := self._view.even(self._first, "breadth")):
            return replace(even, state=model.state)
        # The coin is weighted by length, so that the shares are of time: halving's grants are longer.
        most, least = share * self._time(model), (1 - share) * self._time(halving)
        return replace(halving, state=model.state) if coin * (most + least) < most else model

    def _breadth_is_due(self) -> bool:
        """Whether trials at even points have less than their share of those begun since the model's first.

        Only where a parameter brings others with it. There a few trials that are poor because of those others
        count against a whole branch of the space, and the model's trials in another branch win against even ones
        without being good.
        """
        begun = list(dropwhile(lambda curve: "model" not in curve.seen.kinds[:1], self._view.own))
        branches = any(self._view.standing.conditions.values())
        return branches and sum(map(agreement.is_even, begun)) < _BREADTH * len(begun)

    def _time(self, step: New | Resume) -> float:
        """Epochs that could be trained in the time that a grant takes."""
        goal = step.until or self._view.horizon
        if isinstance(step, New):
            return goal + self._view.switch
        switch = 0.0 if step.number == self._view.standing.here else self._view.switch
        return goal - self._view.standing.epochs_of(step.number) + switch

    def _model(self) -> New | Resume | None:
        # With equal losses everywhere, the model would give every trial a chance of a half to be the best.
        if self._is_level or sum(math.isfinite(curve.best) for curve in as_learnt(self._view.curves)) < _FEWEST:
            return None
        return ModelChoice(self._view, self._first).best()

    def _halving(self) -> New | Resume | None:
        """Successive halving among the trials at even points, independent of the model's."""
        return self._promoted(self._first) or self._view.even(self._first, "breadth")

    def _promoted(self, lowest: int) -> Resume | None:
        """The trial that halving promotes, from the rung ``lowest`` up.

        The better the ranks of promoted trials agree with those at the next rung, the fewer trials are promoted,
        and the more new ones start.
        """
        rungs = [rung for rung in self._rungs if rung >= lowest]
        for early, late in reversed(list(pairwise(rungs))):
            factor = int(_FACTOR ** (1 + agreement.among_promoted(self._singles, early, late)))
            if found := promotion(self._climbers, [early, late], factor):
                place, rung = found
                return self._view.resume(self._singles[place], rung, Why("promotion"))
        return None

    def _last_resort(self) -> Next:
        """The answer where no paused trial might win and no untried point is left, or no trial may start."""
        if self._view.may_start:
            return New(None, self._view.until(self._first), Why("breadth"))
        ends = sum(curve.seen.whole or curve.seen.state == "running" for curve in self._view.own)
        enough = ends >= (_LEVEL if self._is_level else 1)
        return Wait() if self._view.may_end and enough else self._rest() or Wait()

    @cached_property
    def _is_level(self) -> bool:
        """Whether all finite losses are equal."""
        losses = (loss for curve in self._view.curves for loss in curve.losses if math.isfinite(loss))
        first = next(losses, None)
        return all(loss == first for loss in losses)

    def _rest(self) -> Resume | None:
        """The best paused trial to its next rung, since epochs are left to be used, or no trial is complete."""

        def rank(curve: Curve) -> tuple[bool, bool, float, int]:
            return curve.number in self._view.twins, not curve.seen.feasible, curve.best, curve.number

        best = min((curve for curve in self._view.own if curve.resumable), key=rank, default=None)
        if best is None:
            return None
        goal = next((rung for rung in self._rungs if rung > best.done), self._view.horizon)
        return self._view.resume(best, goal, Why("rest"))
