"""Samplers seeded by the study's seed and the trial's number, so that parallel workers draw different points."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from optuna import Study, samplers
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from hpo.storage.optuna_private import id_of_trial
from trainer.data.seeding import derive_seed

_SAMPLER_STREAM: Final = 0x5A
_AGAIN_STREAM: Final = 0xA6


class PerTrialSampler(samplers.BaseSampler):
    """Makes a new sampler for each trial, with a seed for that trial.

    Optuna's samplers keep what they learn in the storage, so a new one knows as much as an old one. Only its
    random stream is new: it depends on the study's seed and the trial's number, and on nothing that happened
    earlier in this process.

    Args:
        make: Makes the sampler from a seed in [0, 2**32).
        seed: The study's seed.
        shown: Returns what the sampler is shown in place of a study, such as
            `hpo.search.as_predicted.as_predicted`; called once for each trial that is drawn.
    """

    def __init__(
        self, make: Callable[[int], samplers.BaseSampler], seed: int, shown: Callable[[Study], Study]
    ) -> None:
        self._make = make
        self._seed = seed
        self._inner = make(seed)
        self._again = 0
        self._show = shown
        self._shown: tuple[int, Study] | None = None

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Give the trial its sampler."""
        self._again, self._shown = 0, None
        self._renew(study, trial)

    def draw_again(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Make another sampler for the trial; returns what it draws jointly, limited to ``search_space``."""
        self._again += 1
        self._renew(study, trial)
        # Some samplers, such as TPE with groups, rely on this call before `sample_relative`.
        shown = self._as_shown(study, trial)
        joint = self._inner.infer_relative_search_space(shown, trial)
        drawn = self._inner.sample_relative(shown, trial, joint)
        # Optuna refuses parameters that it did not ask for, and a trial that has just ended may have added some.
        return {name: value for name, value in drawn.items() if name in search_space}

    def _renew(self, study: Study, trial: FrozenTrial) -> None:
        self._inner = self._make(self._seed_of(trial))
        # The view that it is shown is made only when it draws: a trial that resumes or has its point needs none.
        self._inner.before_trial(study, trial)

    def _as_shown(self, study: Study, trial: FrozenTrial) -> Study:
        if self._shown is None or self._shown[0] != id_of_trial(trial):
            self._shown = (id_of_trial(trial), self._show(study))
        return self._shown[1]

    def _seed_of(self, trial: FrozenTrial, *parts: int) -> int:
        again = (_AGAIN_STREAM, self._again) if self._again else ()
        return derive_seed(self._seed, _SAMPLER_STREAM, trial.number, *parts, *again) % 2**32

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """As the trial's sampler does."""
        return self._inner.infer_relative_search_space(self._as_shown(study, trial), trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """As the trial's sampler does."""
        return self._inner.sample_relative(self._as_shown(study, trial), trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """What a new sampler draws, with a seed for this parameter.

        So the value does not depend on which parameters were drawn before: a trial that was lost after some of
        them gets the same values for the others.
        """
        sampler = self._make(self._seed_of(trial, zlib.crc32(param_name.encode())))
        return sampler.sample_independent(self._as_shown(study, trial), trial, param_name, param_distribution)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """As the trial's sampler does."""
        self._inner.after_trial(study, trial, state, values)


class NumberedQMCSampler(samplers.QMCSampler):
    """Optuna's `QMCSampler` with the trial's number as its place in the sequence.

    Optuna counts places in the storage with a read and then a write, so workers that draw at the same time would
    take the same place.
    """

    _place = 0

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The point at the trial's place."""
        self._place = trial.number
        return super().sample_relative(study, trial, search_space)

    def _find_sample_id(self, study: Study, search_space: dict[str, BaseDistribution]) -> int:  # noqa: ARG002
        return self._place
