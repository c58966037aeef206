"""Parameters that were tried before: a sampler that draws others, and the result that is known of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Final

from optuna import Study, samplers
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    _get_single_value,
)
from optuna.trial import FrozenTrial, TrialState

from hpo.config.space import SearchSpace
from hpo.search.per_trial import PerTrialSampler
from hpo.storage.attributes import IMPORTED_ATTR
from hpo.storage.lineage import forked_from
from hpo.storage.optuna_private import all_trials

#: Draws for one trial, where the points are too many to list.
_DRAWS: Final = 20
#: Draws for one trial before one of the points that are left is taken.
_FEW_DRAWS: Final = 5
_MOST_LISTED: Final = 10_000


def point_key(params: Mapping[str, Any]) -> Hashable:
    """The same for equal parameters in any order; true and 1 are not equal, 1 and 1.0 are."""
    return frozenset((name, isinstance(value, bool), value) for name, value in params.items())


def twin(study: Study, number: int, params: Mapping[str, Any]) -> FrozenTrial | None:
    """The earliest trial but ``number`` with these parameters and a result: complete, diverged or pruned.

    Not one of another study: that may have been trained in another way, and has no checkpoint here. Nor a fork,
    whose result is not that of its parameters alone.
    """
    states, key = (TrialState.COMPLETE, TrialState.PRUNED), point_key(params)
    for other in study.get_trials(deepcopy=False, states=states):
        foreign = IMPORTED_ATTR in other.system_attrs or forked_from(other) is not None
        own = other.number != number and not foreign
        if own and point_key(other.params) == key:
            return other
    return None


class DistinctSampler(PerTrialSampler):
    """Draws again where the parameters are those of another of the study's own trials, running ones included.

    A point that another study has tried is no reason: the best of them are to be tried here, too. Where a few
    draws bring nothing new, one of the points that are left is taken; where none is left, or they are too many
    to list, the last draw is. A draw depends on the study's seed, the trial's number, how often it was drawn, and
    what is known of the study, so a study can be repeated.

    Args:
        make: Makes the sampler from a seed in [0, 2**32).
        seed: The study's seed.
        shown: What the sampler is shown in place of a study.
        space: The study's search space.
        every_point: Whether the sampler may come to every point of the space.
    """

    def __init__(
        self,
        make: Callable[[int], samplers.BaseSampler],
        seed: int,
        shown: Callable[[Study], Study],
        space: SearchSpace,
        *,
        every_point: bool = True,
    ) -> None:
        super().__init__(make, seed, shown)
        self._space = space
        listed = every_point and _most_points(space) <= _MOST_LISTED
        self._points = {point_key(point): point for point in space.grid()} if listed else {}
        self._left: Mapping[str, Any] = {}
        self._keys: dict[int, Hashable] = {}

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Give the trial its sampler."""
        self._left = {}
        super().before_trial(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The first draw that makes a new point; empty where one of those left is taken."""
        drawn = super().sample_relative(study, trial, search_space)
        if trial.params or "fixed_params" in trial.system_attrs:  # it resumes, or was given by a person
            return drawn
        tried, joint = self._tried(study, trial), drawn
        left = [point for key, point in self._points.items() if key not in tried]
        if self._points and not left:
            return drawn
        for _ in range(_FEW_DRAWS if left else _DRAWS):
            point = self._space.draw(partial(self._value, study, trial, drawn))
            if point_key(point) not in tried:
                return drawn
            last, joint = joint, self.draw_again(study, trial, search_space)
            # What comes to the same again (QMC's place in its sequence is the trial's) is drawn one by one.
            drawn = {} if joint == last else joint
        if left:
            self._left, drawn = random.Random(self._seed_of(trial)).choice(left), {}
        return drawn

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The value at the point that was taken, if one was; else as the trial's sampler does."""
        if param_name in self._left:
            return self._left[param_name]
        return super().sample_independent(study, trial, param_name, param_distribution)

    def _tried(self, study: Study, trial: FrozenTrial) -> set[Hashable]:
        others = all_trials(study)
        keys: set[Hashable] = set()
        for other in others:
            if other.number == trial.number or not other.params or IMPORTED_ATTR in other.system_attrs:
                continue
            if other.state.is_finished():
                keys.add(self._keys.setdefault(other.number, point_key(other.params)))
            else:
                keys.add(point_key(other.params))
        return keys

    def _value(
        self, study: Study, trial: FrozenTrial, drawn: Mapping[str, Any], name: str, distribution: BaseDistribution
    ) -> Any:
        """The value that the trial would get, by Optuna's rules."""
        if distribution.single():
            return _get_single_value(distribution)
        return drawn[name] if name in drawn else self.sample_independent(study, trial, name, distribution)


def _most_points(space: SearchSpace) -> float:
    """As many points as the space has at most: conditions leave some of them out."""
    return math.prod(map(_values, space.distributions.values()))


def _values(distribution: BaseDistribution) -> float:
    if isinstance(distribution, CategoricalDistribution):
        return len(distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    if distribution.single():
        return 1
    step = distribution.step
    return math.inf if step is None else round((distribution.high - distribution.low) / step) + 1
