"""`CurveGPSampler`: proposes parameters with a model of all learning curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial

from hpo.config.conditions import Condition
from hpo.search.one_thread import one_thread
from hpo.search.schedulers.freeze_thaw.encoding import Conditions, Encoding
from hpo.storage.optuna_private import all_trials

_STREAM: Final = 0xC5


class CurveGPSampler(BaseSampler):
    """Expected improvement by a Gaussian process over parameters and epochs, fitted to every trial's curve.

    The scheduler `freeze_thaw` uses the same model. The model reads the curves of complete, pruned, paused and
    running trials as they are, so it needs no complete trial, and none of the predicted values that other samplers
    are shown (`hpo.search.as_predicted`). It handles categories, integers and conditions; a trial that violates a
    constraint counts as the worst. The first trials are spread evenly over the space.

    Randomness comes from the seed and the trial's number.

    Args:
        space: Distributions by parameter; a parameter comes after those that its conditions name.
        conditions: By parameter, the values of other parameters under which it exists.
        seed: The study's seed.
        n_startup_trials: How many trials must have reported before the model is used; one of them must have a
            finite last value and keep to the constraints.
        where: Conditions that each point satisfies.
        independent_sampler: Draws a value that a point lacks: a person gave the others, or no point is untried.
    """

    def __init__(
        self,
        space: Mapping[str, BaseDistribution],
        conditions: Conditions,
        seed: int,
        n_startup_trials: int = 8,
        where: Sequence[Condition] = (),
        independent_sampler: BaseSampler | None = None,
    ) -> None:
        if n_startup_trials < 1:
            raise ValueError(f"n_startup_trials must be at least 1, but is {n_startup_trials}")
        self._space = {name: each for name, each in space.items() if not each.single()}
        self._encoding = Encoding(space, conditions, where)
        self._seed, self._startup = seed, n_startup_trials
        self._alone = independent_sampler or RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        """The whole space, whichever parameters the trials had."""
        return self._space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """An untried point; empty where none is found."""
        from hpo.search.schedulers.freeze_thaw.proposals import Proposals
        from hpo.search.trial_curves import curves_of_trials

        others = [other for other in all_trials(study) if other.number != trial.number]
        known = curves_of_trials(study, others, bounded=True)
        own = [curve for curve in known.curves if not curve.seen.imported]
        rng = np.random.default_rng((self._seed, _STREAM, trial.number))
        proposals = Proposals(self._encoding, {self._encoding.key(curve.seen.params) for curve in own}, rng)
        params: Mapping[str, Any] | None = None
        reported = [curve for curve in known.curves if curve.steps]
        if len(reported) >= self._startup and any(math.isfinite(curve.last) for curve in reported):
            # SciPy takes a quarter of a second to import; opening a study need not wait for it.
            from hpo.search.curve_proposal import proposed

            with one_thread():
                params = proposed(known, self._encoding, proposals)
        params = params or proposals.spread(trial.number, self._seed) or {}
        return {name: value for name, value in params.items() if name in search_space}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A value from ``independent_sampler``, for a parameter that the point lacks."""
        return self._alone.sample_independent(study, trial, param_name, param_distribution)
