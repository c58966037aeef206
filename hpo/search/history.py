"""Decides how many of a study's trials a worker holds in memory for its sampler and pruner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from optuna import pruners, samplers

from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.search.auto_sampler import chosen_sampler
from hpo.search.by_name import known_class
from hpo.search.curve_sampler import CurveGPSampler
from hpo.search.pruners import PRUNERS
from hpo.search.samplers import SAMPLERS
from hpo.search.schedulers.by_name import make_scheduler

#: Maximum number of finished and paused trials that a worker holds beside the best; a smaller study is held whole.
MOST: Final = 4_000
#: Samplers that learn as much from an even sample of the trials as from all. The others store their state (a
#: population, a grid's order) in single trials, which they must find again.
_LEARN: Final = (
    samplers.TPESampler,
    samplers.RandomSampler,
    samplers.QMCSampler,
    samplers.GPSampler,
    CurveGPSampler,
)
#: Pruners that need no more than a sample: they compare with the best trial, which is in the sample, or with
#: values that are read apart from the trials.
_COMPARE: Final = (
    pruners.NopPruner,
    pruners.MedianPruner,
    pruners.PercentilePruner,
    pruners.ThresholdPruner,
    pruners.WilcoxonPruner,
    pruners.SuccessiveHalvingPruner,
    pruners.HyperbandPruner,
)


def most_shown(spec: StudySpec, space: SearchSpace) -> int | None:
    """How many finished and paused trials a worker holds beside the best; None where it must hold all of them.

    It must hold all with a scheduler that reads trials' curves, with several objectives, constraints or reused
    duplicates, where each point of a space without a real range is drawn once, and with a sampler or pruner that
    looks for single trials.
    """
    study = spec.study
    whole = (
        make_scheduler(spec).reads_trials
        or study.objectives is not None
        or bool(study.constraints)
        or study.duplicates == "reuse"
        or (study.duplicates == "resample" and not (spec.defines_by_run or space.is_continuous))
        or known_class(chosen_sampler(spec).name, SAMPLERS) not in _LEARN
        or not _suffices(study.pruner.name, study.pruner.kwargs)
    )
    return None if whole else MOST


def _suffices(pruner: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a sample of the trials is enough for a pruner, and for the pruner that it wraps."""
    kind = known_class(pruner, PRUNERS)
    if kind is not pruners.PatientPruner:
        return kind in _COMPARE
    wrapped = arguments.get("wrapped_pruner")
    if isinstance(wrapped, Mapping):
        return _suffices(str(wrapped.get("name")), wrapped)
    return wrapped is None or _suffices(str(wrapped), {})
