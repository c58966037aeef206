"""Optuna's parts by name: the arguments in a study file checked against the signature, then built."""

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

#: How names of such classes end, misspelt ones too.
_KIND: Final = re.compile(r"(Sampl|Prun|Sched)\w*$", re.IGNORECASE)


def known_class(name: str, registry: Mapping[str, type]) -> type | None:
    """The class that a short name, or Optuna's own class name, stands for; None where there is none."""
    return next(
        (known for short, known in registry.items() if name.lower() == short or name == known.__name__), None
    )


def meant(name: str, registry: Mapping[str, type]) -> str:
    """The short name that an import path, or a misspelt class name, is for; the name itself if there is none."""
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
    """The class that a node's ``name`` stands for: its short name, Optuna's own class name, or one of OptunaHub.

    ``also`` are names that stand for others, for who mistypes one.

    Raises:
        InputError: There is no such name; the nearest one is given.
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
    """What stands beside the name, for the class."""
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
    """Refuse arguments that ``kind`` does not take, or that the study sets itself (``taken``).

    ``beside`` are keys that may stand among the arguments all the same: a name may be meant for one of them.

    Raises:
        InputError: At the first such argument, or one of a wrong type, or where a required one is missing.
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
    """Where a person reads what the arguments of that name mean, to be said as a fix."""
    if name.startswith(PREFIX):
        return "see the package's page on OptunaHub"
    optunas = "; those of Optuna's classes are explained in Optuna's documentation"
    return _REFERENCE if path == "study.scheduler" else f"{_REFERENCE}{optunas}"


def construct(
    spec: StudySpec, path: str, kind: type, arguments: Mapping[str, Any], written: Mapping[str, Any]
) -> Any:
    """Build it; what the constructor finds wrong becomes an InputError at ``path``, with what was ``written``."""
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
