"""What hpo records of a trial beside what was asked for: predictions, and what the Trainer's callbacks watch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from optuna.trial import FrozenTrial

from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.storage.optuna_private import fixed_params

#: Metrics that every trial of the Trainer has unasked: the learning rate, and those of the callbacks that run by
#: default. A test compares them with the callbacks, which can't be imported where a study is only read.
UNASKED: Final = frozenset(
    {
        "lr",
        "max_grad_norm",
        "overfit_gap_ratio",
        "predicted_final_loss",
        "predicted_final_loss_std",
        "predicted_final_neg_log10",
    }
)


def parted_metrics(
    spec: StudySpec, metrics: Mapping[str, float | None]
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """The metrics that a person asked for, and the others.

    A metric that is optimised or bounded is asked for, and so is all that a function of `objective` reports.
    """
    return parted(metrics, wanted_metrics(spec))


def wanted_metrics(spec: StudySpec) -> frozenset[str]:
    """The metrics of `UNASKED` that are asked for in a study."""
    if spec.config.objective is not None:
        return UNASKED
    return UNASKED & {*spec.study.goals, *spec.study.constraints}


def unasked_metrics(config: Mapping[str, Any]) -> frozenset[str]:
    """The metrics that were not asked for, of a study that is known by its stored config alone."""
    if config.get("objective") is not None:
        return frozenset()
    study = config.get("study") or {}
    goals = study.get("objectives") or [study.get("metric")]
    return UNASKED - {*goals, *(study.get("constraints") or ())}


def parted(
    metrics: Mapping[str, float | None], wanted: frozenset[str]
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """The same with `wanted_metrics` at hand."""
    unasked = UNASKED - wanted
    asked = {name: value for name, value in metrics.items() if name not in unasked}
    return asked, {name: value for name, value in metrics.items() if name in unasked}


def queued_with(space: SearchSpace, trial: FrozenTrial) -> dict[str, Any]:
    """The parameters that a trial was queued with, and has before it starts.

    Those that the space does not allow are left out: another tool may have queued it.
    """
    known = {path: value for path, value in fixed_params(trial).items() if path in space.params}
    return {path: value for path, value in known.items() if space.problem(path, value) is None}
