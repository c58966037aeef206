"""Finds the names in a function's code, and in the user's code that it may call, without running it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from hpo.config.code import is_own_file

#: Prefix of the methods by which an Optuna objective draws its parameters.
_DRAWS: Final = "suggest_"
#: This project's packages, which are not user code even where they run from their sources.
_OURS: Final = (Path(__file__).parents[1], Path(__file__).parents[2] / "trainer")


def draws_parameters(function: Any) -> bool:
    """Whether a function draws its parameters itself, as Optuna's objectives do: it mentions a ``suggest_…``."""
    return any(name.startswith(_DRAWS) for name in names_in(function))


def names_in(function: Any) -> frozenset[str]:
    """The names and constant strings in a function's code, and in the functions and classes that it refers to.

    Names are the attributes and global names that the code reads. Decorators and closures are followed, installed
    packages are not; code that is reached by a computed name is not found.
    """
    found: set[str] = set()
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        waiting += _inside(each)
        if isinstance(each, FunctionType) and (each is function or not _is_installed(each.__code__)):
            names = set(_names(each.__code__))
            found |= names
            waiting += _reached(each, names)
    return frozenset(found)


def _inside(value: Any) -> list[Any]:
    """The functions or classes that a callable wraps."""
    if isinstance(value, functools.partial):
        return [value.func]
    if isinstance(value, MethodType | staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if inspect.isclass(value):
        return [each for each in vars(value).values() if _is_code(each)]
    if inspect.isfunction(type(value).__call__):
        return [type(value)]  # an object that is called like a function
    wrapped = getattr(value, "__wrapped__", None) if isinstance(value, FunctionType) else None
    return [] if wrapped is None else [wrapped]


def _reached(function: FunctionType, names: set[str]) -> Iterator[Any]:
    """The objects that a function's names refer to: of its module, modules imported there, closure, defaults."""
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell has no value yet
            continue
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield value
        if isinstance(value, ModuleType) and _is_own(value):
            yield from (vars(value)[each] for each in names & vars(value).keys())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names(constant)


def _is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | staticmethod | classmethod | property) or inspect.isclass(value)


def _is_own(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and _is_own_file(Path(file))


def _is_installed(code: CodeType) -> bool:
    return not _is_own_file(Path(code.co_filename))


def _is_own_file(file: Path) -> bool:
    return is_own_file(file) and not any(file.is_relative_to(folder) for folder in _OURS)
