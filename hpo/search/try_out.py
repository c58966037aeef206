"""Checks that a study's sampler and pruner work with their arguments, by trying them in a study in memory."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

import optuna
from optuna import samplers
from optuna.pruners import BasePruner

from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.errors import HpoError
from hpo.search.by_name import arguments_of, known_class, page_of
from hpo.search.curve_sampler import CurveGPSampler
from hpo.search.samplers import SAMPLERS
from trainer.error_text import error_text

#: Arguments that say how many trials a sampler draws before it uses the results of earlier ones.
_BEGINS: Final = ("n_startup_trials", "population_size")
#: Maximum number of trials drawn in memory, even if the sampler would use results only later.
_MOST: Final = 100
#: Samplers whose draws take a second each, and whose constructors check all of their arguments.
_SLOW: Final = (samplers.GPSampler, CurveGPSampler)


def try_out(spec: StudySpec, space: SearchSpace, sampler: samplers.BaseSampler, pruner: BasePruner) -> None:
    """Refuse arguments that a sampler or a pruner can't work with.

    Optuna checks some arguments only when it uses them. So where a study file gives the sampler arguments, trials
    are drawn until the sampler uses the results of earlier ones.

    Args:
        spec: The study file.
        space: Its search space.
        sampler: Its sampler.
        pruner: Its pruner.

    Raises:
        InputError: The sampler or the pruner fails.
    """
    directions = list(spec.study.goals.values())
    study = optuna.create_study(directions=directions, sampler=sampler, pruner=pruner)
    with _refused(spec, "sampler"):
        trial = _drawn(spec, space, study)
    if spec.study.objectives is None:
        with _refused(spec, "pruner"):
            trial.report(0.0, 1)
            trial.should_prune()
    arguments = spec.study.sampler.kwargs
    first = _first_trials({"name": spec.study.sampler.name, **arguments}) if arguments else 0
    with _refused(spec, "sampler"):
        for number in range(first):
            study.tell(trial, [float(number)] * len(directions))
            trial = _drawn(spec, space, study)


def _drawn(spec: StudySpec, space: SearchSpace, study: optuna.Study) -> optuna.Trial:
    trial = study.ask()
    space.suggest(trial)
    if spec.defines_by_run:  # the space has no parameters, but the sampler checks its arguments only in a draw
        trial.suggest_float("", 0, 1)
    return trial


def _first_trials(node: Mapping[str, Any]) -> int:
    """How many trials a sampler draws before it uses all of its arguments; 0 for slow and unknown samplers."""
    kind = known_class(str(node["name"]), SAMPLERS)
    if kind is None or kind in _SLOW:
        return 0
    taken = inspect.signature(kind).parameters
    counts = [node.get(each, taken[each].default) for each in _BEGINS if each in taken]
    for value in arguments_of(node).values():  # a sampler inside of it
        inner = {"name": value} if isinstance(value, str) else value
        if isinstance(inner, Mapping) and "name" in inner:
            counts.append(_first_trials(inner))
    return min(max(counts, default=0), _MOST)


@contextlib.contextmanager
def _refused(spec: StudySpec, part: str) -> Iterator[None]:
    """Turn what a sampler or a pruner raises inside into an error about its section."""
    section = getattr(spec.study, part)
    try:
        yield
    except HpoError:
        raise
    except Exception as error:  # a library's own, and its assertions
        raise spec.error(
            f"can't be used with these arguments: {error_text(error)}",
            path=f"study.{part}",
            value=section.model_dump(exclude_unset=True),
            fix=page_of(f"study.{part}", section.name),
        ) from error
