"""Finds samplers, pruners and schedulers by name, checks their arguments in a study file, and builds them."""

import inspect
import re
import warnings
from collections.abc import Mapping
from typing import Any, Final

from optuna.exceptions import ExperimentalWarning

from hpo.config.argument_types import refuse_wrong_types
from hpo.config.paths import join_path, nearest, split_path, suggest_name
from hpo.config.spec import StudySpec
from hpo.search.hub import PREFIX, REGISTRY, find_in_hub

#: The end of a class name that says its kind, also misspelt.
_KIND: Final = re.compile(r"(Sampl|Prun|Sched)\w*$", re.IGNORECASE)


def known_class(name: str, registry: Mapping[str, type]) -> type | None:
    """The class with this short name, or with this class name; None where there is none."""
    return next(
        (known for short, known in registry.items() if name.lower() == short or name == known.__name__), None
    )


def meant(name: str, registry: Mapping[str, type]) -> str:
    """The short name that an import path or a misspelt class name probably means; else the name itself."""
    stem = _KIND.sub("", name.rpartition(".")[2])
    names = {_KIND.sub("", kind.__name__): short for short, kind in registry.items()}
    names |= {short: short for short in registry}
    guess = nearest(stem, names)
    return name if guess is None else names[guess]


def find_class(
    spec: StudySpec,
    path: str,
    node: Mapping[str, Any],
    registry: Mapping[str, type],
    base: type,
    also: tuple[str, ...] = (),
) -> type:
    """The class that a node's ``name`` means: a short name, a class name of Optuna, or a package of OptunaHub.

    ``also`` are further valid names, such as ``auto``, that the error may suggest.

    Raises:
        InputError: No class has this name; the error suggests the nearest name.
    """
    name = str(node["name"])
    if name.startswith(PREFIX):
        return find_in_hub(spec, path, node, base)
    if (known := known_class(name, registry)) is not None:
        return known
    what = path.rpartition(".")[2]
    fix = suggest_name(meant(name, registry), (*also, *registry)) + f"; or `{PREFIX}…` for one of OptunaHub"
    raise spec.error(f"no {what} has this name", path=f"{path}.name", value=name, fix=fix)


def arguments_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for the class: every key beside the name."""
    beside = {"name", REGISTRY} if str(node["name"]).startswith(PREFIX) else {"name"}
    return {key: value for key, value in node.items() if key not in beside}


def check_arguments(
    spec: StudySpec,
    path: str,
    kind: type,
    arguments: Mapping[str, Any],
    taken: tuple[str, ...] = (),
    beside: tuple[str, ...] = (),
) -> None:
    """Refuse arguments that ``kind`` does not take, or that hpo sets itself (``taken``).

    ``beside`` are valid keys of the section that are not arguments; the error may suggest them for a misspelt one.

    Raises:
        InputError: An argument is unknown, taken or of a wrong type, or a required one is missing.
    """
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    signature = inspect.signature(kind).parameters
    parameters = {name: each for name, each in signature.items() if each.kind not in starred}
    any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.values())
    free = [name for name in parameters if name not in taken]
    for name, value in arguments.items():
        if name in taken or (name not in free and not any_name):
            raise spec.error(
                f"{kind.__name__} takes no such argument",
                path=join_path((*split_path(path), name)),
                value=value,
                fix=suggest_name(name, [*free, *beside], what="it takes"),
            )
    for name in free:
        if parameters[name].default is inspect.Parameter.empty and name not in arguments:
            raise spec.error(f"{kind.__name__} needs the argument {name}", path=path, fix=f"add `{name}: …` to it")
    refuse_wrong_types(spec, path, kind, arguments)


_REFERENCE: Final = "see its arguments in docs/reference/samplers.md"


def page_of(path: str, name: str) -> str:
    """The fix that says where the arguments of this sampler, pruner or scheduler are documented."""
    if name.startswith(PREFIX):
        return "see the package's page on OptunaHub"
    optunas = "; those of Optuna's classes are explained in Optuna's documentation"
    return _REFERENCE if path == "study.scheduler" else f"{_REFERENCE}{optunas}"


def construct(
    spec: StudySpec, path: str, kind: type, arguments: Mapping[str, Any], written: Mapping[str, Any]
) -> Any:
    """Build ``kind``; an error of its constructor becomes an InputError at ``path`` that shows ``written``."""
    try:
        with warnings.catch_warnings():
            # A study file that names an experimental part asks for it.
            warnings.simplefilter("ignore", ExperimentalWarning)
            return kind(**arguments)
    except (TypeError, ValueError, ArithmeticError, AssertionError, ImportError) as error:
        raise spec.error(
            f"{written['name']} refuses its arguments: {error}",
            path=path,
            value={name: value for name, value in written.items() if name != "name"},
            fix=page_of(path, str(written["name"])),
        ) from error
