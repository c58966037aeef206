"""Parameters that were tried before: a sampler that draws others, and the result that is known of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Final

from optuna import Study, samplers
from optuna.distributions import BaseDistribution, _get_single_value
from optuna.trial import FrozenTrial, TrialState

from hpo.per_trial import PerTrialSampler
from hpo.space import SearchSpace

#: Draws for one trial; a space that is nearly exhausted may have nothing new in so many.
_DRAWS: Final = 20


def point_key(params: Mapping[str, Any]) -> Hashable:
    """The same for equal parameters in any order; true and 1 are not equal, 1 and 1.0 are."""
    return frozenset((name, isinstance(value, bool), value) for name, value in params.items())


def twin(study: Study, number: int, params: Mapping[str, Any]) -> FrozenTrial | None:
    """The earliest trial but ``number`` with these parameters and a result: complete, diverged or pruned."""
    states, key = (TrialState.COMPLETE, TrialState.PRUNED), point_key(params)
    for other in study.get_trials(deepcopy=False, states=states):
        if other.number != number and point_key(other.params) == key:
            return other
    return None


class DistinctSampler(PerTrialSampler):
    """Draws again where the parameters are those of another trial, running ones included.

    A draw depends on the study's seed, the trial's number, how often it was drawn, and what is known of the
    study, so a study can be repeated. When nothing new comes of `_DRAWS` draws, the last one is taken.

    Args:
        make: Makes the sampler from a seed in [0, 2**32).
        seed: The study's seed.
        space: The study's search space.
    """

    def __init__(self, make: Callable[[int], samplers.BaseSampler], seed: int, space: SearchSpace) -> None:
        super().__init__(make, seed)
        self._space = space
        self._keys: dict[int, Hashable] = {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The first draw that makes a new point."""
        drawn = super().sample_relative(study, trial, search_space)
        if trial.params or "fixed_params" in trial.system_attrs:  # it goes on, or was given by a person
            return drawn
        tried = self._tried(study, trial)
        for _ in range(_DRAWS):
            point = self._space.draw(partial(self._value, study, trial, drawn))
            if point_key(point) not in tried:
                break
            self.draw_again(study, trial)
            drawn = super().sample_relative(study, trial, search_space)
        return drawn

    def _tried(self, study: Study, trial: FrozenTrial) -> set[Hashable]:
        # Not study.get_trials: with Hyperband that study shows the trials of one bracket only.
        others = study._storage.get_all_trials(study._study_id, deepcopy=False)  # noqa: SLF001
        keys: set[Hashable] = set()
        for other in others:
            if other.number == trial.number or not other.params:
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
