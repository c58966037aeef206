"""Reads the settings of a study from the source of an Optuna script, as they are usually under ``__main__``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from hpo.config.study_modules import source_of

_T = TypeVar("_T")
_DIRECTIONS: Final = ("minimize", "maximize")


@dataclass(frozen=True)
class Script:
    """The settings of a study in the source around an objective.

    Attributes:
        directions: The direction of each value that the objective returns; empty if not given.
        n_trials: The number of trials; None if not given.
        timeout: The time limit in seconds; None if not given.
    """

    directions: tuple[str, ...] = ()
    n_trials: int | None = None
    timeout: float | None = None


def script_of(function: Callable[..., Any]) -> Script:
    """The settings in an objective's file; empty if it can't be read, or has several different ones."""
    try:
        code = inspect.unwrap(function) if inspect.isroutine(function) else type(function)
        tree = ast.parse(source_of(Path(inspect.getfile(code))))
    except (OSError, TypeError, SyntaxError, ValueError):  # it is not from a Python file
        return Script()
    directions = {_directions(call) for call in _calls(tree, "create_study")}
    trials = {_number(call, "n_trials", 1) for call in _calls(tree, "optimize")}
    timeouts = {_number(call, "timeout", 2) for call in _calls(tree, "optimize")}
    count = _only(trials)
    return Script(_only(directions) or (), count if isinstance(count, int) else None, _only(timeouts))


def _only(found: set[_T]) -> _T | None:
    return next(iter(found)) if len(found) == 1 else None


def _calls(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name == getattr(node.func, "attr", getattr(node.func, "id", None)):
            yield node


def _directions(call: ast.Call) -> tuple[str, ...]:
    """The directions of a `create_study` call; Optuna minimizes by default."""
    given = {item.arg: item.value for item in call.keywords}
    if None in given:  # **options
        return ()
    if "directions" in given:
        several = given["directions"]
        each = several.elts if isinstance(several, ast.List | ast.Tuple) else []
    else:
        each = [given.get("direction", ast.Constant("minimize"))]
    found = tuple(map(_direction, each))
    return () if "" in found else found


def _direction(node: ast.expr) -> str:
    """The direction of ``"maximize"`` or ``StudyDirection.MAXIMIZE``; empty if it is computed."""
    said = node.value if isinstance(node, ast.Constant) else getattr(node, "attr", "")
    return said.lower() if isinstance(said, str) and said.lower() in _DIRECTIONS else ""


def _number(call: ast.Call, name: str, position: int) -> float | None:
    """A positive argument of `optimize`, which may be ``2 * 3600``; None if it is computed in another way."""
    given = {item.arg: item.value for item in call.keywords}
    said = _product(given.get(name, call.args[position] if len(call.args) > position else None))
    return said if said is not None and said > 0 else None


def _product(node: ast.expr | None) -> float | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _product(node.left), _product(node.right)
        return None if left is None or right is None else left * right
    said = node.value if isinstance(node, ast.Constant) else None
    return said if isinstance(said, int | float) and not isinstance(said, bool) else None
