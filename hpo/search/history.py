"""How much of a study's history its sampler and pruner are shown."""

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

#: Finished and paused trials that a worker holds at most, beside the best; a study of fewer is shown whole.
MOST: Final = 4_000
#: They learn from an even sample what they learn from all. The others keep what they have to find again (a
#: population, a grid's order, rungs) in single trials.
_LEARN: Final = (
    samplers.TPESampler,
    samplers.RandomSampler,
    samplers.QMCSampler,
    samplers.GPSampler,
    CurveGPSampler,
)
#: Or they compare with the best trial, which is in the sample, or with what is read without the trials.
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
    """How many finished and paused trials a worker holds beside the best; None where the study needs all of them.

    It does with a scheduler that reads trials' curves, several objectives, constraints or reused duplicates, where
    points of a space without a real range are drawn once, and with a sampler or a pruner that looks for single
    trials.
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
    """Whether a sample is enough to a pruner of a study file, and to the one that it wraps."""
    kind = known_class(pruner, PRUNERS)
    if kind is not pruners.PatientPruner:
        return kind in _COMPARE
    wrapped = arguments.get("wrapped_pruner")
    if isinstance(wrapped, Mapping):
        return _suffices(str(wrapped.get("name")), wrapped)
    return wrapped is None or _suffices(str(wrapped), {})
