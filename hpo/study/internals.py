"""Separates the metrics that a person asked for from those that hpo's own callbacks record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from optuna.trial import FrozenTrial

from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.storage.optuna_private import fixed_params

#: Metrics that the Trainer records in every trial without being asked: the learning rate, and those of the
#: callbacks that run by default. A test compares this list with the callbacks, which import torch and so can't be
#: imported where a study is only read.
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

    Optimised and bounded metrics are asked for, and so are all that the function of `objective` reports.
    """
    return parted(metrics, wanted_metrics(spec))


def wanted_metrics(spec: StudySpec) -> frozenset[str]:
    """The metrics of `UNASKED` that are asked for in a study."""
    if spec.config.objective is not None:
        return UNASKED
    return UNASKED & {*spec.study.goals, *spec.study.constraints}


def unasked_metrics(config: Mapping[str, Any]) -> frozenset[str]:
    """The metrics of `UNASKED` that are not asked for in a study with this stored config."""
    if config.get("objective") is not None:
        return frozenset()
    study = config.get("study") or {}
    goals = study.get("objectives") or [study.get("metric")]
    return UNASKED - {*goals, *(study.get("constraints") or ())}


def parted(
    metrics: Mapping[str, float | None], wanted: frozenset[str]
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """As `parted_metrics`, for given `wanted_metrics`."""
    unasked = UNASKED - wanted
    asked = {name: value for name, value in metrics.items() if name not in unasked}
    return asked, {name: value for name, value in metrics.items() if name in unasked}


def queued_with(space: SearchSpace, trial: FrozenTrial) -> dict[str, Any]:
    """The parameters that a trial was queued with.

    Values that the space does not allow are left out; another tool may have queued them.
    """
    known = {path: value for path, value in fixed_params(trial).items() if path in space.params}
    return {path: value for path, value in known.items() if space.problem(path, value) is None}
