"""Checks a function that trains by itself, the study's ``objective``, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

from hpo.checks.findings import Finding, finding
from hpo.config.schema_space import CategoricalParam
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.config.targets import PARTIAL, TARGET, TargetResolver
from hpo.errors import InputError
from hpo.search.schedulers.by_name import make_scheduler
from hpo.trial.named_in import draws_parameters, names_in
from hpo.trial.training_code import SESSION, takes_session

_SWITCH: Final = f"objective.{TARGET}"
#: The end of the names of hpo's callbacks for other frameworks.
_CALLBACK: Final = "Callback"


def check_parameters(spec: StudySpec) -> None:
    """Refuse a function that draws its parameters itself beside a search space, or one that does not without it.

    This runs before the check of the arguments, whose errors are often a consequence.

    Raises:
        InputError: One of these is so, or the function is not plain, or it draws parameters but takes no trial.
    """
    assert spec.config.objective is not None
    name = str(spec.config.objective[TARGET])
    try:
        function = TargetResolver(spec.folder).resolve(name)
    except InputError:  # `check_spec` reports it with its line
        return
    _check_target(spec, name, function)
    draws = draws_parameters(function)
    if spec.search_space and draws:
        raise spec.error(
            f"can't stand beside `{name}`, which draws its parameters itself, by `{SESSION}.suggest_…`",
            path="search_space",
            fix="leave it out; or let the function take its parameters as arguments",
        )
    if spec.search_space:
        return
    if not draws:
        entry = f"objective.{_argument(function)}: {{type: float, low: 1e-5, high: 0.1, log: true}}"
        fix = f"add for example `search_space: {{{entry}}}`, or call `{SESSION}.suggest_float(…)` in the function"
        raise spec.error("there is nothing to search", path="search_space", fix=fix)
    if inspect.isfunction(function) and not takes_session(function):
        fix = f"rename the argument that gets the trial to `{SESSION}`"
        raise spec.error(f"draws its parameters, and takes no `{SESSION}`", path=_SWITCH, value=name, fix=fix)


def check_objective(spec: StudySpec, *, search: bool) -> list[Finding]:
    """Refuse an objective that can't train a trial, or can't save a checkpoint though a scheduler pauses trials.

    Args:
        spec: The study; its ``objective`` fits its arguments, see `hpo.checks.check.check_spec`.
        search: Also look at what the search space may set.

    Returns:
        Warnings: a pruner or a scheduler without effect.

    Raises:
        InputError: The objective is not a plain function, takes no arguments, or can't be paused.
    """
    node = spec.config.objective
    assert node is not None
    if PARTIAL in node:
        fix = "remove it: the function is called in each trial"
        raise spec.error("the objective is called, not bound", path=f"objective.{PARTIAL}", fix=fix)
    entry = SearchSpace.from_spec(spec).params.get(_SWITCH) if search else None
    others = entry.choices if isinstance(entry, CategoricalParam) else ()
    resolver = TargetResolver(spec.folder)
    found = []
    for target in dict.fromkeys((node[TARGET], *others)):
        function = resolver.resolve(str(target))
        _check_target(spec, str(target), function)
        if search:
            _check_pauses(spec, str(target), function)
            found += list(_without_effect(spec, str(target), function))
    return found


def _argument(function: Callable[..., Any]) -> str:
    """An argument that could be searched, as an example in a fix."""
    try:
        names = [name for name in inspect.signature(function).parameters if name != SESSION]
    except (ValueError, TypeError):  # a function of C without a signature
        names = []
    return names[0] if names else "lr"


def _without_effect(spec: StudySpec, name: str, function: Callable[..., Any]) -> Iterator[Finding]:
    """Warn about a pruner if the function reports nothing, and about a pausing scheduler if it saves nothing."""
    names = names_in(function)
    if takes_session(function) and any(each.endswith(_CALLBACK) for each in names):
        return  # hpo's callback for a framework reports and saves
    pruner = spec.study.pruner
    written = spec.is_written("study.pruner") and pruner.prunes
    if written and not (takes_session(function) and "report" in names):
        problem = f"has no effect: `{name}` reports no epochs, so none of its trials is pruned"
        fix = f"call `{SESSION}.report(…)` after each epoch, or leave the pruner out"
        yield finding(spec, problem, path="study.pruner", value=pruner.name, fix=fix)
    section = spec.study.scheduler
    if section is not None and "save_checkpoint" not in names:
        problem = f"pauses trials, and `{name}` calls no `{SESSION}.save_checkpoint(…)` to resume them from"
        fix = "save one after each report, and load it at the beginning; or write a pruner"
        yield finding(spec, problem, path="study.scheduler", value=section.name, fix=fix)


def _check_target(spec: StudySpec, name: str, function: Callable[..., Any]) -> None:
    kind = None
    if inspect.isclass(function):
        kind = "a class"
    elif inspect.iscoroutinefunction(function):
        kind = "a coroutine function"
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        kind = "a generator function"
    fix = f"name a function that trains, with its parameters as arguments, and `{SESSION}` to report epochs"
    if inspect.isclass(function) and inspect.isfunction(function.__call__):
        fix = f"write `objective = {function.__name__}(…)` in its module, and name that `objective`"
    if kind is not None:
        raise spec.error(f"is {kind}: a call of it trains nothing", path=_SWITCH, value=name, fix=fix)
    try:
        takes = inspect.signature(function).parameters
    except (ValueError, TypeError):  # `check_spec` warns
        return
    if not takes:
        raise spec.error(f"takes no argument, and no `{SESSION}` either", path=_SWITCH, value=name, fix=fix)


def _check_pauses(spec: StudySpec, name: str, function: Callable[..., Any]) -> None:
    section = spec.study.scheduler
    if section is None or takes_session(function):
        return
    make_scheduler(spec)  # an unknown name is reported first
    raise spec.error(
        f"pauses trials, and `{name}` can't resume: it has no parameter `{SESSION}` to save checkpoints with",
        path="study.scheduler",
        value=section.name,
        fix=f"let it take `{SESSION}`, call `{SESSION}.save_checkpoint(…)` after each report and "
        f"`{SESSION}.load_checkpoint()` at its beginning; or write a `pruner` in place of the scheduler",
    )
