"""Checks a study file's arguments against the annotations of the class or function that takes them.

Python does not check annotations: a text in place of a number fails somewhere inside the class, with an error
that names neither the argument nor its line in the file.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from hpo.config.spec import StudySpec

_WORDS: Final = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    types.NoneType: "null",
}


class WrongType(NamedTuple):
    """An argument whose value has the wrong type.

    Attributes:
        name: The argument's name.
        wanted: The types that it takes, in words.
    """

    name: str
    wanted: str


def wrong_types(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Iterator[WrongType]:
    """The arguments that don't fit the annotations of a class or function.

    A list counts as a tuple and a text as a path; true, NaN and a text of digits are not numbers. Arguments
    without an annotation, or with one that a value of a file can't be checked against, are skipped.

    Args:
        function: The class or function.
        arguments: Values by name, as in the study file.
    """
    for name, value in arguments.items():
        kind = _annotations(function).get(name, Any)
        adapter = _adapter(kind)
        if adapter is not None and not _fits(value, adapter):
            yield WrongType(name, _said(kind))


def _fits(value: Any, adapter: TypeAdapter[Any]) -> bool:
    if isinstance(value, float) and math.isnan(value):  # valid for no argument
        return False
    try:
        text = json.dumps(value)
    except TypeError:  # an object, which was built for this argument
        return True
    try:
        adapter.validate_json(text, strict=True)
    except ValidationError:
        return False
    return True


def refuse_wrong_types(
    spec: StudySpec, path: str, function: Callable[..., Any], arguments: Mapping[str, Any]
) -> None:
    """Refuse arguments that don't fit the annotations of their class or function; see `wrong_types`.

    Args:
        spec: The study file.
        path: The dotted path of the arguments.
        function: The class or function.
        arguments: See `wrong_types`.

    Raises:
        InputError: At the first such argument.
    """
    for name, wanted in wrong_types(function, arguments):
        value = arguments[name]
        shown = repr(value) if isinstance(value, str) else value  # so that '0.9' differs from 0.9
        raise spec.error(f"must be {wanted}", path=f"{path}.{name}", value=shown, fix=f"write {wanted}")


@functools.cache
def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of a signature's arguments, without those whose names are imported only for type checkers."""
    made = function.__init__ if inspect.isclass(function) else function
    names = getattr(made, "__globals__", {})
    found = {}
    for name, kind in getattr(made, "__annotations__", {}).items():
        try:
            found[name] = typing.get_type_hints(types.SimpleNamespace(__annotations__={name: kind}), names)[name]
        except (NameError, TypeError):
            continue
    return found


def _adapter(kind: Any) -> TypeAdapter[Any] | None:
    """A validator of values of this type; None if a value of a file can't be checked against it."""
    if any(each is Any or _is_callable(each) for each in _parts(kind)):
        return None
    try:
        return TypeAdapter(kind)
    except PydanticSchemaGenerationError:
        return None


def _parts(kind: Any) -> Iterator[Any]:
    yield kind
    if get_origin(kind) is not Literal:
        for each in get_args(kind):
            yield from _parts(each)


def _is_callable(kind: Any) -> bool:
    return kind is Callable or get_origin(kind) is Callable


def _said(kind: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_said, inner)))
    if kind in _WORDS:
        return _WORDS[kind]
    name = origin or kind
    if isinstance(name, type) and issubclass(name, Mapping):
        return "a mapping"
    if inner:
        of = " and ".join(dict.fromkeys(_said(each) for each in inner if each is not Ellipsis))
        return f"a list, each entry {of}"
    return f"a {getattr(name, '__name__', name)}"
