"""Pruners by name: Optuna's, and `PredictedLossPruner`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from optuna import pruners

from hpo.config.spec import StudySpec
from hpo.search.by_name import arguments_of, check_arguments, construct, find_class
from hpo.search.halving_pruners import BracketsFirstHyperbandPruner, RungsPruner
from hpo.search.predicted_loss.pruner import PredictedLossPruner

PRUNERS: Final[Mapping[str, type[pruners.BasePruner]]] = MappingProxyType(
    {
        "none": pruners.NopPruner,
        "median": pruners.MedianPruner,
        "percentile": pruners.PercentilePruner,
        "successive_halving": pruners.SuccessiveHalvingPruner,
        "hyperband": pruners.HyperbandPruner,
        "threshold": pruners.ThresholdPruner,
        "patient": pruners.PatientPruner,
        "wilcoxon": pruners.WilcoxonPruner,
        "predicted_loss": PredictedLossPruner,
    }
)


#: The median pruner's default warm-up is one epoch per 10 epochs of the longest trial.
_EPOCHS_A_WARM_UP_STEP: Final = 10


def make_pruner(spec: StudySpec) -> pruners.BasePruner:
    """The pruner of ``study.pruner``.

    Where these arguments are left out, hyperband's ``max_resource`` is the epochs of the longest trial (Optuna's
    default would prune nothing before a trial is complete), `PredictedLossPruner` has the study's seed, and
    ``median`` never prunes in the first tenth of the longest trial's epochs (docs/search.md). ``patient`` takes
    another pruner as ``wrapped_pruner``.

    Raises:
        InputError: The name or an argument does not fit.
    """
    section = spec.study.pruner
    return _make(spec, "study.pruner", {"name": section.name, **section.kwargs})


def _make(spec: StudySpec, path: str, node: Mapping[str, Any]) -> pruners.BasePruner:
    kind = find_class(spec, path, node, PRUNERS, pruners.BasePruner)
    arguments = arguments_of(node)
    if kind is pruners.NopPruner:
        arguments = {}  # what is left of a pruner that `study.pruner.name=none` has switched off
    check_arguments(spec, path, kind, arguments)
    if kind is pruners.HyperbandPruner:
        if "max_resource" not in arguments and spec.longest_trial is None:
            fix = "say how many epochs, that is validations, the longest trial has"
            raise spec.error("needs `max_resource` where the data decides the length", path=path, fix=fix)
        arguments.setdefault("max_resource", spec.longest_trial)
        kind = BracketsFirstHyperbandPruner
    if kind is pruners.SuccessiveHalvingPruner:
        kind = RungsPruner
    if kind is PredictedLossPruner:
        arguments.setdefault("seed", spec.study.sampler.seed)
    if kind is pruners.MedianPruner:
        arguments.setdefault("n_warmup_steps", (spec.longest_trial or 0) // _EPOCHS_A_WARM_UP_STEP)
    if kind is pruners.PatientPruner and arguments["wrapped_pruner"] is not None:
        wrapped = arguments["wrapped_pruner"]
        inner = {"name": wrapped} if isinstance(wrapped, str) else wrapped
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            fix = "write for example `wrapped_pruner: {name: median}`"
            raise spec.error("must be a pruner", path=f"{path}.wrapped_pruner", value=wrapped, fix=fix)
        arguments["wrapped_pruner"] = _make(spec, f"{path}.wrapped_pruner", inner)
    pruner: pruners.BasePruner = construct(spec, path, kind, arguments, node)
    return pruner
