"""A sampler that draws untried points that satisfy `where`, and a search for a trial with equal parameters."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Final

from optuna import Study, samplers
from optuna.distributions import BaseDistribution, _get_single_value
from optuna.trial import FrozenTrial, TrialState

from hpo.config.space import SearchSpace
from hpo.search.axes import counted, most_points
from hpo.search.per_trial import PerTrialSampler
from hpo.search.valid_points import ValidPoints
from hpo.storage.attributes import IMPORTED_ATTR
from hpo.storage.lineage import forked_from
from hpo.storage.optuna_private import all_trials, fixed_params

#: Draws for one trial before one of the listed untried points is taken.
_FEW_DRAWS: Final = 5
_MOST_LISTED: Final = 10_000


def point_key(params: Mapping[str, Any], space: Mapping[str, BaseDistribution]) -> Hashable:
    """A key that is the same for equal parameters in any order; true and 1 differ, 1 and 1.0 are equal.

    Two real numbers at the same step of their parameter's distribution in the space are equal.
    """
    return frozenset(
        (name, isinstance(value, bool), counted(space.get(name), value)) for name, value in params.items()
    )


def twin(
    study: Study, number: int, params: Mapping[str, Any], space: Mapping[str, BaseDistribution]
) -> FrozenTrial | None:
    """The earliest trial other than ``number`` with these parameters and a result: complete, diverged or pruned.

    Imported trials don't count: they may have been trained in another way, and have no checkpoint here. Forks
    don't count either: their result does not depend on their parameters alone.
    """
    states, key = (TrialState.COMPLETE, TrialState.PRUNED), point_key(params, space)
    for other in study.get_trials(deepcopy=False, states=states):
        foreign = IMPORTED_ATTR in other.system_attrs or forked_from(other) is not None
        own = other.number != number and not foreign
        if own and point_key(other.params, space) == key:
            return other
    return None


class WholePointSampler(PerTrialSampler):
    """Draws whole points, and draws again where a point violates ``where`` or another trial already has it.

    All of the study's own trials count, running ones too. Imported trials don't: the best of their points are to
    be tried in this study too.

    Where a few draws find no such point, the sampler takes one of the untried points if the points can be listed.
    Else it takes the last draw that satisfies ``where``. If no draw does, it takes the point that satisfies
    ``where`` nearest to the last draw, or any such point for a sampler without preferences (``random``, ``qmc``).
    A draw depends on the study's seed, the trial's number, how often that trial was drawn, and what is known of
    the study, so a study can be repeated.

    The whole point is chosen before Optuna asks for the first of its values. A trial that resumes, or was
    enqueued, keeps the values that it has.

    Args:
        make: Makes the sampler from a seed in [0, 2**32).
        seed: The study's seed.
        shown: Returns what the sampler is shown in place of a study.
        space: The study's search space.
        distinct: Whether to draw again where another trial has the point.
        fixed: Values that each point has; if there are any, the points are not listed.
        nearest: From a point and a seed, finds the nearest point that satisfies ``where`` and has the fixed
            values; None: any valid point will do.
        draws: Draws for one trial, where there are too many points to list.
    """

    def __init__(
        self,
        make: Callable[[int], samplers.BaseSampler],
        seed: int,
        shown: Callable[[Study], Study],
        space: SearchSpace,
        *,
        distinct: bool,
        fixed: Mapping[str, Any],
        nearest: Callable[[Mapping[str, Any], int], dict[str, Any] | None] | None,
        draws: int,
    ) -> None:
        super().__init__(make, seed, shown)
        self._space, self._distinct, self._nearest, self._draws = space, distinct, nearest, draws
        self._fixed = fixed
        listed = distinct and not fixed and most_points(space.distributions) <= _MOST_LISTED
        self._points = {self._key(point): point for point in space.grid()} if listed else {}
        self._point: Mapping[str, Any] = {}

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Give the trial its sampler."""
        self._point = {}
        super().before_trial(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Choose the whole point and return nothing: `sample_independent` gives the point's values.

        A trial that already has values gets what the trial's sampler draws, unless the study has ``where``.
        """
        drawn = super().sample_relative(study, trial, search_space)
        given = self._given(trial)
        if given and not self._space.where:  # it resumes, or was given by a person
            return drawn
        tried = self._tried(study, trial) if self._distinct and not given else set()
        self._point = self._settled(study, trial, search_space, drawn, given, tried)
        return {}

    def _given(self, trial: FrozenTrial) -> dict[str, Any]:
        """The values that a trial already has, without parameters of one value: Optuna stores those up front."""
        values = fixed_params(trial) | trial.params
        space = self._space.distributions
        return {name: value for name, value in values.items() if name not in space or not space[name].single()}

    def _settled(
        self,
        study: Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
        drawn: dict[str, Any],
        given: Mapping[str, Any],
        tried: set[Hashable],
    ) -> Mapping[str, Any]:
        left = [point for key, point in self._points.items() if key not in tried]
        if not left:  # all are tried, or they can't be listed
            tried = set() if self._points else tried
        joint, valid, point = drawn, None, {}
        for at in range(_FEW_DRAWS if self._points else self._draws):
            if at:
                last, joint = joint, self.draw_again(study, trial, search_space)
                # A sampler that draws the same point again (QMC: one place per trial) draws value by value.
                drawn = {} if joint == last else joint
            point = self._space.draw(partial(self._value, study, trial, drawn, given))
            if self._space.violated(point) is None:
                valid = point
                if self._key(point) not in tried:
                    return point
        if left and not given:
            return random.Random(self._seed_of(trial)).choice(left)
        return valid or self._valid(trial, point, given)

    def _valid(self, trial: FrozenTrial, point: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
        """A point that satisfies the conditions: near ``point`` if the sampler has preferences, else any."""
        seed = self._seed_of(trial)
        near = self._nearest(point, seed) if self._nearest is not None and not given else None
        points = ValidPoints(self._space, random.Random(seed))
        # The values that a person gave may leave no valid point with the fixed values.
        return near or (points.found({**self._fixed, **given}) if self._fixed else None) or points.any(given)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The parameter's value at the chosen point, if one was chosen; else what the trial's sampler draws."""
        if param_name in self._point:
            return self._point[param_name]
        return super().sample_independent(study, trial, param_name, param_distribution)

    def _tried(self, study: Study, trial: FrozenTrial) -> set[Hashable]:
        return {
            self._key(other.params)
            for other in all_trials(study)
            if other.number != trial.number and other.params and IMPORTED_ATTR not in other.system_attrs
        }

    def _key(self, params: Mapping[str, Any]) -> Hashable:
        return point_key(params, self._space.distributions)

    def _value(
        self,
        study: Study,
        trial: FrozenTrial,
        drawn: Mapping[str, Any],
        given: Mapping[str, Any],
        name: str,
        distribution: BaseDistribution,
    ) -> Any:
        """The value that Optuna would give the trial: given, single, drawn jointly, or drawn independently."""
        if name in given:
            return given[name]
        if distribution.single():
            return _get_single_value(distribution)
        return drawn[name] if name in drawn else self.sample_independent(study, trial, name, distribution)
