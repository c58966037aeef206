"""Refuses what needs a search space in a study whose `objective` function draws its parameters itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hpo.config.spec import StudySpec
from hpo.search.by_name import known_class
from hpo.search.samplers import SAMPLERS, drawing_sampler

#: Samplers and schedulers that choose among the points of a space.
_SAMPLERS: Final = tuple(SAMPLERS[name] for name in ("curve_gp", "grid", "brute_force"))
_SCHEDULERS: Final = ("freeze_thaw", "pbt")
_INSTEAD: Final = "or declare `search_space`, and take its parameters as arguments in place of `trial.suggest_…`"


def refuse_what_needs_a_space(spec: StudySpec) -> None:
    """Refuse parts of the study file that need a declared search space, in a study without one.

    Raises:
        InputError: The study has such a part.
    """
    if not spec.defines_by_run:
        return
    for path, value, fix in _needing(spec):
        problem = "needs a search space, and the function of `objective` draws its parameters itself"
        raise spec.error(problem, path=path, value=value, fix=f"{fix}; {_INSTEAD}")


def _needing(spec: StudySpec) -> Iterator[tuple[str, object, str]]:
    """The places in the study file that need a space, with their values and what to write in their place."""
    study = spec.study
    path, name = drawing_sampler(spec)
    if known_class(name, SAMPLERS) in _SAMPLERS:
        is_base = path != "study.sampler"
        fix = "name another, such as tpe" if is_base else "leave it out, which takes tpe, or name another"
        yield f"{path}.name", name, fix
    if study.scheduler is not None and study.scheduler.name in _SCHEDULERS:
        yield "study.scheduler.name", study.scheduler.name, "write `asha` or `hyperband`, or a pruner"
    if study.baseline:
        yield "study.baseline", study.baseline, "leave it out: `hpo enqueue` puts a first trial in the queue"
    if study.duplicates == "reuse":
        yield "study.duplicates", study.duplicates, "leave it out"
