"""Builds the scheduler that a study file names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, cast

from hpo.config.paths import suggest_name
from hpo.config.spec import StudySpec
from hpo.search.by_name import check_arguments, construct, known_class, meant
from hpo.search.pruners import PRUNERS
from hpo.search.schedulers.asha import Asha
from hpo.search.schedulers.freeze_thaw.scheduler import FreezeThaw
from hpo.search.schedulers.hyperband import Hyperband
from hpo.search.schedulers.pbt.parameters import perturbed_parameters
from hpo.search.schedulers.pbt.scheduler import Pbt
from hpo.search.schedulers.pruner import PrunerScheduler
from hpo.search.schedulers.scheduler import Scheduler

SCHEDULERS: Final[Mapping[str, type[Scheduler]]] = MappingProxyType(
    {"freeze_thaw": FreezeThaw, "asha": Asha, "hyperband": Hyperband, "pbt": Pbt}
)


def make_scheduler(spec: StudySpec) -> Scheduler:
    """The scheduler of ``study.scheduler``; without one, a scheduler that asks the study's pruner.

    Raises:
        InputError: The name or an argument does not fit, or a scheduler is named as the pruner.
    """
    section, path = spec.study.scheduler, "study.scheduler"
    if section is None:
        _refuse_as_pruner(spec)
        return PrunerScheduler()
    kind = SCHEDULERS.get(section.name)
    if kind is None:
        if known_class(section.name, PRUNERS) is not None:
            fix = f"give it as the pruner, such as `pruner: {section.name}`, without a scheduler"
            raise spec.error("is a pruner, not a scheduler", path=f"{path}.name", value=section.name, fix=fix)
        fix = suggest_name(meant(section.name, SCHEDULERS), tuple(SCHEDULERS))
        raise spec.error("no scheduler has this name", path=f"{path}.name", value=section.name, fix=fix)
    check_arguments(spec, path, kind, section.kwargs)
    arguments = section.kwargs
    if kind is Pbt:
        arguments |= {"perturb": perturbed_parameters(spec, arguments.get("perturb"))}
    return cast("Scheduler", construct(spec, path, kind, arguments, section.model_dump()))


def _refuse_as_pruner(spec: StudySpec) -> None:
    name = spec.study.pruner.name
    if name in SCHEDULERS and name not in PRUNERS:
        fix = f"give it as the scheduler, such as `scheduler: {name}`, without a pruner"
        raise spec.error("is a scheduler, not a pruner", path="study.pruner.name", value=name, fix=fix)
