"""Whether a study's sampler and pruner work with their arguments, seen in a study in memory."""

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

#: Arguments that say how many trials a sampler draws before it looks at others.
_BEGINS: Final = ("n_startup_trials", "population_size")
#: Trials in memory at most; a sampler that begins later is not asked that far.
_MOST: Final = 100
#: A draw of theirs takes a second, and their constructors see all that can be wrong with their arguments.
_SLOW: Final = (samplers.GPSampler, CurveGPSampler)


def try_out(spec: StudySpec, space: SearchSpace, sampler: samplers.BaseSampler, pruner: BasePruner) -> None:
    """Refuse arguments that a sampler or a pruner can't work with.

    Optuna looks at some of them no earlier than it uses them: where a study file gives a sampler arguments, it
    draws until it looks at other trials.

    Args:
        spec: The study file.
        space: Its search space.
        sampler: Its sampler.
        pruner: Its pruner.

    Raises:
        InputError: One of the two fails.
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
    if spec.defines_by_run:  # a sampler looks at its arguments when it draws
        trial.suggest_float("", 0, 1)
    return trial


def _first_trials(node: Mapping[str, Any]) -> int:
    """How many trials a sampler draws before all of its arguments count; 0 where it is slow, or not Optuna's."""
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
    """What a sampler or a pruner raises inside, as an error about its section."""
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
