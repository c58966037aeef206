"""Rewrites the errors of options and arguments with invalid values: with the value and a fix."""

from __future__ import annotations

import re
from typing import Any, Final

import typer
from typer.core import TyperArgument, TyperCommand

from hpo.config.paths import show, suggest_name

#: The problem and the fix by pydantic's type of error; pydantic reads the values.
_SAID: Final = {
    "int_parsing": ("must be a whole number", "write a whole number"),
    "int_from_float": ("must be a whole number", "write a whole number"),
    "float_parsing": ("must be a number", "write a number"),
    "greater_than_equal": ("must be at least {ge}", "write {ge} or more"),
    "greater_than": ("must be more than {gt}", "write more than {gt}"),
    "less_than_equal": ("must be at most {le}", "write {le} or less"),
}
_NEGATIVE: Final = re.compile(r"-\d+")
_CHOICES: Final = re.compile(r"is not one of (.+)")


class Command(TyperCommand):
    """A command whose errors about invalid values name the value and a fix."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; typer's errors get the value and a fix."""
        self._refuse_negative(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _explained(error)
            raise

    def _refuse_negative(self, ctx: Any, args: list[str]) -> None:
        """Refuse a negative number for an argument that is a number: it would be read as an option."""
        numbers = [each for each in self.params if isinstance(each, TyperArgument) and each.min is not None]
        if numbers and (typed := next(filter(_NEGATIVE.fullmatch, args), None)):
            message = f"must be at least {numbers[0].min}\n  value: {typed}\n  fix: write {numbers[0].min} or more"
            raise typer.BadParameter(message, ctx, numbers[0])


def _explained(error: typer.BadParameter) -> str:
    """The error's message, with the value and a fix if pydantic names the problem."""
    items: list[Any] = getattr(error.__cause__, "errors", list)()
    if not items:
        return error.message
    kind, value, context = items[0]["type"], items[0]["input"], items[0].get("ctx", {})
    if match := _CHOICES.search(items[0]["msg"]):
        choices = re.findall(r"'([^']*)'", match[1])
        problem, fix = "is not one of its values", suggest_name(value, choices, what="choose from")
    elif kind in _SAID:
        problem, fix = (text.format(**context) for text in _SAID[kind])
    else:
        return error.message
    return f"{problem}\n  value: {show(value)}\n  fix: {fix}"
