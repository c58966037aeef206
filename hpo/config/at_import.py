"""Finds scripts that would run a search when they are imported, by their source and without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hpo.config.code import imported_source
from hpo.errors import InputError

_RUNS: Final = "optimize"
_INSIDE: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def refuse_search_at_import(folder: Path, target: str) -> None:
    """Refuse an objective whose script would run a search of its own whenever it is imported.

    Args:
        folder: The study's folder.
        target: The objective's import path.

    Raises:
        InputError: It calls ``study.optimize(…)`` outside of a function and of ``if __name__ == "__main__":``.
    """
    found = imported_source(folder, tuple(target.split(".")))
    if found is None:
        return
    file, tree = found
    for node in _run_at_import(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == _RUNS:
            raise _refused(file, node.lineno)


def _refused(file: Path, line: int) -> InputError:
    problem = "runs a search of its own when it is imported, and each worker imports it"
    fix = 'move it under `if __name__ == "__main__":`'
    return InputError(problem, file=file, line=line, value=f"….{_RUNS}(…)", fix=fix)


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _INSIDE):
            yield child
            yield from _run_at_import(child)
