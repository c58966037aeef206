"""Asks for confirmation before something is deleted."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hpo.errors import InputError

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]


def must_be_sure(command: str, effect: str, *, yes: bool) -> None:
    """Refuse a command that deletes something without `--yes`, if no person can be asked.

    Args:
        command: The command's name.
        effect: Its effect, such as ``deletes the study tiny``.
        yes: Whether ``--yes`` was given.

    Raises:
        InputError: It was not given, and standard input is not a terminal.
    """
    if not yes and not sys.stdin.isatty():
        raise InputError(effect, path=command, fix="say so with `--yes`")


def ask(effect: str) -> None:
    """Ask at the terminal whether to continue; the question goes to standard error.

    Args:
        effect: What the command would do.

    Raises:
        Exit: The answer is not yes; exit code 1.
    """
    print(f"{effect}\nContinue? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        print("nothing was changed", file=sys.stderr)
        raise typer.Exit(1)
