"""How much of a study's history its sampler and pruner are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.search.auto_sampler import chosen_sampler
from hpo.search.schedulers.by_name import make_scheduler

#: Finished and paused trials that a worker holds at most, beside the best; a study of fewer is shown whole.
MOST: Final = 4_000
#: They learn from an even sample what they learn from all. The others keep what they have to find again (a
#: population, a grid's order, rungs) in single trials.
_SAMPLERS: Final = frozenset({"tpe", "random", "qmc", "gp", "curve_gp"})
#: Or they compare with the best trial, which is in the sample, or with what is read without the trials.
_PRUNERS: Final = frozenset(
    {"none", "median", "percentile", "threshold", "wilcoxon", "successive_halving", "hyperband"}
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
        or chosen_sampler(spec).name not in _SAMPLERS
        or not _suffices(study.pruner.name, study.pruner.kwargs)
    )
    return None if whole else MOST


def _suffices(pruner: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a sample is enough to a pruner of a study file, and to the one that it wraps."""
    if pruner != "patient":
        return pruner in _PRUNERS
    wrapped = arguments.get("wrapped_pruner")
    if isinstance(wrapped, Mapping):
        return _suffices(str(wrapped.get("name")), wrapped)
    return wrapped is None or wrapped in _PRUNERS
