"""What the command line says of an option or argument whose value does not fit."""

from __future__ import annotations

import re
from typing import Any, Final

import typer
from typer.core import TyperArgument, TyperCommand

from hpo.config.paths import show, suggest_name

#: By the kinds of pydantic, which reads the values: what is wrong, and the fix.
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
    """A command that says of a value that does not fit what the value is, and what to write."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; typer's errors get the value and a fix."""
        self._refuse_negative(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _explained(error)
            raise

    def _refuse_negative(self, ctx: Any, args: list[str]) -> None:
        """Refuse a negative number where an argument is a number: it would be taken for an option."""
        numbers = [each for each in self.params if isinstance(each, TyperArgument) and each.min is not None]
        if numbers and (typed := next(filter(_NEGATIVE.fullmatch, args), None)):
            message = f"must be at least {numbers[0].min}\n  value: {typed}\n  fix: write {numbers[0].min} or more"
            raise typer.BadParameter(message, ctx, numbers[0])


def _explained(error: typer.BadParameter) -> str:
    """The message with the value and the fix, where pydantic says what is wrong."""
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
