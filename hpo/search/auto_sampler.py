"""Chooses the sampler for ``sampler: auto``, by the measurements in docs/search.md."""

from __future__ import annotations

from dataclasses import dataclass

from hpo.config.schema_study import AUTO
from hpo.config.spec import StudySpec


@dataclass(frozen=True)
class ChosenSampler:
    """The sampler that a study uses.

    Attributes:
        name: Its name; never ``auto``.
        why: Why ``auto`` chose it; None where the study file names it.
    """

    name: str
    why: str | None = None

    def __str__(self) -> str:
        return self.name if self.why is None else f"{self.name} ({AUTO}: {self.why})"


def chosen_sampler(spec: StudySpec) -> ChosenSampler:
    """The sampler that a study file names, or that ``auto`` chooses.

    ``auto`` depends on the goals and the search space only, which never change in a study, and not on its budget
    or its trials. So a study that resumes keeps the sampler that it began with.
    """
    if spec.study.sampler.name != AUTO:
        return ChosenSampler(spec.study.sampler.name)
    if spec.study.objectives is not None:
        return ChosenSampler("tpe", "several objectives")
    if spec.defines_by_run:
        return ChosenSampler("tpe", "the function draws its parameters itself")
    if any(param.when for param in spec.search_space.values()):
        return ChosenSampler("tpe", "parameters under conditions")
    return ChosenSampler("curve_gp", "one objective, no parameter under a condition")
