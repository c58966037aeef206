"""What an Optuna script says of its study: read in its source, for most of it stands under ``__main__``."""

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
    """What the source around an objective says.

    Attributes:
        directions: Of each value that it returns; empty: it does not say.
        n_trials: How many trials it asks for; None: it does not say.
        timeout: Seconds that it searches; None: it does not say.
    """

    directions: tuple[str, ...] = ()
    n_trials: int | None = None
    timeout: float | None = None


def script_of(function: Callable[..., Any]) -> Script:
    """What the file of an objective says; nothing where it can't be read, or says different things."""
    try:
        code = inspect.unwrap(function) if inspect.isroutine(function) else type(function)
        tree = ast.parse(source_of(Path(inspect.getfile(code))))
    except (OSError, TypeError, SyntaxError, ValueError):  # it comes from no file of Python's
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
    """What a `create_study` is given; Optuna minimizes where that is nothing."""
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
    """``"maximize"`` and ``StudyDirection.MAXIMIZE`` alike; empty where it is computed."""
    said = node.value if isinstance(node, ast.Constant) else getattr(node, "attr", "")
    return said.lower() if isinstance(said, str) and said.lower() in _DIRECTIONS else ""


def _number(call: ast.Call, name: str, position: int) -> float | None:
    """A positive argument of `optimize`, also one such as ``2 * 3600``; None where it is computed otherwise."""
    given = {item.arg: item.value for item in call.keywords}
    said = _product(given.get(name, call.args[position] if len(call.args) > position else None))
    return said if said is not None and said > 0 else None


def _product(node: ast.expr | None) -> float | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _product(node.left), _product(node.right)
        return None if left is None or right is None else left * right
    said = node.value if isinstance(node, ast.Constant) else None
    return said if isinstance(said, int | float) and not isinstance(said, bool) else None
