"""Optuna's halving pruners, changed to read only the trials' values at rungs instead of whole trials."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast, runtime_checkable

import optuna
from optuna import pruners
from optuna.trial import FrozenTrial, TrialState

from hpo.storage.cache import StudyCache
from hpo.storage.optuna_private import id_of_study, storage_of
from hpo.storage.rung_values import AtRungs, longest_complete

#: Lower bounds of Hyperband's arguments; with some smaller ones Optuna fails only in the middle of a study.
_LEAST: Final = {"max_resource": 1, "min_resource": 1, "reduction_factor": 2, "bootstrap_count": 0}


@runtime_checkable
class LooksAhead(Protocol):
    """A pruner that can read in advance what it will compare a trial with."""

    def look_ahead(self, study: optuna.Study) -> None:
        """Read now what a trial's process would otherwise have to read."""


class RungsPruner(pruners.SuccessiveHalvingPruner):
    """Optuna's `SuccessiveHalvingPruner`; in a study of hpo it reads rung values instead of trials."""

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """See `optuna.pruners.BasePruner`."""
        return super().prune(at_rungs(study, longest=self._min_resource is None), trial)

    def look_ahead(self, study: optuna.Study) -> None:
        """See `LooksAhead`."""
        at_rungs(study).get_trials(deepcopy=False)


class BracketsFirstHyperbandPruner(pruners.HyperbandPruner):
    """Optuna's `HyperbandPruner` with its brackets made up front; in a study of hpo it reads rung values only.

    Optuna shows a sampler the trials of one bracket, but all trials as long as there are no brackets. So with
    brackets made later, the first trial that a process draws would differ from the same trial in another process.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(self, max_resource: str | int, **arguments: Any) -> None:
        for name, value in {"max_resource": max_resource, **arguments}.items():
            if isinstance(value, int) and value < _LEAST[name]:
                raise ValueError(f"{name} is {value}: give at least {_LEAST[name]}")
        super().__init__(max_resource=max_resource, **arguments)
        self._brackets: dict[tuple[str, int], int] = {}
        if isinstance(max_resource, int):
            self._try_initialization(cast("optuna.Study", None))  # the study is for "auto" only

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """See `optuna.pruners.BasePruner`."""
        if not self._pruners or not isinstance(storage_of(study), StudyCache):
            return super().prune(study, trial)
        bracket = self._bracket(study, trial.number)
        shown = at_rungs(study, lambda number: self._bracket(study, number) == bracket)
        return self._pruners[bracket].prune(shown, trial)

    def look_ahead(self, study: optuna.Study) -> None:
        """See `LooksAhead`."""
        at_rungs(study).get_trials(deepcopy=False)

    def _bracket(self, study: optuna.Study, number: int) -> int:
        key = study.study_name, number
        if key not in self._brackets:
            self._brackets[key] = self._get_bracket_id(study, cast("FrozenTrial", AtRungs(number)))
        return self._brackets[key]


def at_rungs(
    study: optuna.Study, among: Callable[[int], bool] | None = None, *, longest: bool = False
) -> optuna.Study:
    """A study that shows its trials as `AtRungs`; a study that hpo does not cache is returned unchanged.

    Args:
        study: The study.
        among: Whether the trial with a number is shown; None: all are.
        longest: Also show a stand-in as long as the longest complete trial, from which the first rung follows.
    """
    cache = storage_of(study)
    return cast("optuna.Study", _Shown(study, cache, among, longest)) if isinstance(cache, StudyCache) else study


@dataclass(frozen=True)
class _Shown:
    study: optuna.Study
    cache: StudyCache
    among: Callable[[int], bool] | None
    longest: bool

    def get_trials(self, deepcopy: bool = True) -> list[AtRungs]:  # noqa: ARG002 - they are never changed
        study_id, among = id_of_study(self.study), self.among
        shown = [each for each in self.cache.at_rungs(study_id) if among is None or among(each.number)]
        if self.longest and (last := longest_complete(self.cache.behind, study_id)) is not None:
            shown.append(AtRungs(-1, state=TrialState.COMPLETE, last_step=last))
        return shown

    def __getattr__(self, name: str) -> Any:
        return getattr(self.study, name)
