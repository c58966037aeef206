"""Which sampler ``sampler: auto`` stands for; chosen by the measurements of docs/search.md."""

from __future__ import annotations

from dataclasses import dataclass

from hpo.config.schema_study import AUTO
from hpo.config.spec import StudySpec


@dataclass(frozen=True)
class ChosenSampler:
    """A study's sampler.

    Attributes:
        name: Its name; never ``auto``.
        why: Why ``auto`` is this one; None where the study file names it.
    """

    name: str
    why: str | None = None

    def __str__(self) -> str:
        return self.name if self.why is None else f"{self.name} ({AUTO}: {self.why})"


def chosen_sampler(spec: StudySpec) -> ChosenSampler:
    """The sampler of a study file.

    ``auto`` is decided by the goals and the search space, which a study keeps, never by its budget or its trials:
    a study that resumes has the sampler that it began with.
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
