"""Builds the study of a function for `hpo.run`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hpo.api.study import Study
from hpo.api.values import CALLED_BY_A_FUNCTION, Call, Categorical, Float, Int, main_module
from hpo.config.code import is_own_file
from hpo.config.paths import show
from hpo.config.study_modules import public_name
from hpo.errors import InputError

#: The start of the search paths of a function's arguments.
_SECTION: Final = "objective."


def study_of_function(
    function: Call | Callable[..., Any], *, search_space: Mapping[str, Any] | None = None, **study: Any
) -> Study:
    """The study of a function that trains by itself, or draws its parameters itself.

    Args:
        function: The function, or an `hpo.Call` of it.
        search_space: Argument → range; None if the function draws its parameters itself.
        **study: Keys of the ``study`` section; ``name`` is made of the module's and the function's by default.

    Raises:
        InputError: The object is not a function.
    """
    target = function.target if isinstance(function, Call) else function
    while isinstance(target, functools.partial):
        target = target.func
    if not (inspect.isfunction(target) or inspect.isbuiltin(target)):
        fix = "give a study file, an `hpo.Study`, or a function that trains"
        if callable(target) and not inspect.isclass(target):  # an object has no name to import it by
            fix = CALLED_BY_A_FUNCTION
        raise InputError(
            f"is an object of {type(target).__name__}", path="study", value=show(repr(target)), fix=fix
        )
    name = study.pop("name", None) or _name(target)
    if isinstance(search_space, Mapping):  # anything else is refused later
        search_space = {_path(each): _entry(entry) for each, entry in search_space.items()}
    return Study(name, objective=function, search_space=search_space, folder=_folder(target), **study)


def _name(target: Callable[..., Any]) -> str:
    """The default name of a function's study, such as ``train-run``."""
    module = _module_name(target).rpartition(".")[2]
    return f"{module}-{target.__name__}".replace("<", "").replace(">", "")


def _module_name(target: Callable[..., Any]) -> str:
    """The dotted name by which a worker imports the function's module."""
    if target.__module__ != "__main__":
        return public_name(target.__module__)
    return main_module() or "notebook"


def _folder(target: Callable[..., Any]) -> Path:
    """The folder from which the function's module is imported; without a file of its own, the current folder."""
    file = getattr(sys.modules.get(target.__module__), "__file__", None)
    if file is None or not is_own_file(Path(file)):
        return Path()
    path = Path(file).absolute()
    return path.parents[_module_name(target).count(".") + (path.stem == "__init__")]


def _path(argument: str) -> str:
    return argument if str(argument).startswith(_SECTION) else f"{_SECTION}{argument}"


def _entry(entry: Any) -> Any:
    """An entry of the search space, with the arguments in its conditions as search paths."""
    if isinstance(entry, Float | Int | Categorical) and isinstance(entry.when, Mapping):
        return replace(entry, when={_path(name): wanted for name, wanted in entry.when.items()})
    return entry
