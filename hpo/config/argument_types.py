"""Whether what a study file gives a class is of the types that its signature names.

Python looks at no annotation: a text where a number belongs fails somewhere in the class, in words that name
neither the argument nor its place in the file.
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
    """An argument of another type than its class takes.

    Attributes:
        name: The argument.
        wanted: What it takes, in words.
    """

    name: str
    wanted: str


def wrong_types(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Iterator[WrongType]:
    """The arguments that don't fit the annotations of a class or function.

    A list stands for a tuple and a text for a path; true is no number, nor is NaN, nor a text that reads as one.
    What has no annotation, or one that no value of a file can be held against, is left out.

    Args:
        function: What takes them.
        arguments: Values as a study file holds them, by name.
    """
    for name, value in arguments.items():
        kind = _annotations(function).get(name, Any)
        adapter = _adapter(kind)
        if adapter is not None and not _fits(value, adapter):
            yield WrongType(name, _said(kind))


def _fits(value: Any, adapter: TypeAdapter[Any]) -> bool:
    if isinstance(value, float) and math.isnan(value):  # no argument works with it
        return False
    try:
        text = json.dumps(value)
    except TypeError:  # an object that was made for it
        return True
    try:
        adapter.validate_json(text, strict=True)
    except ValidationError:
        return False
    return True


def refuse_wrong_types(
    spec: StudySpec, path: str, function: Callable[..., Any], arguments: Mapping[str, Any]
) -> None:
    """Refuse arguments that don't fit the annotations of what takes them; see `wrong_types`.

    Args:
        spec: The study file.
        path: Where in it they stand.
        function: What takes them.
        arguments: As of `wrong_types`.

    Raises:
        InputError: At the first such argument.
    """
    for name, wanted in wrong_types(function, arguments):
        value = arguments[name]
        shown = repr(value) if isinstance(value, str) else value  # '0.9' is no 0.9
        raise spec.error(f"must be {wanted}", path=f"{path}.{name}", value=shown, fix=f"write {wanted}")


@functools.cache
def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of a signature's arguments, but for those whose names only a type checker imports."""
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
    """What holds a value of a file against a type; None where that can't be done."""
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
