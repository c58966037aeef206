"""Python's parser, for one thread at a time."""

from __future__ import annotations

import ast
import threading
from typing import Any, Final, Literal, overload

#: CPython before 3.11.8 and 3.12.1 counts how deep all threads together are in a tree, and may say ``SystemError:
#: AST constructor recursion depth mismatch`` to one whose count another has moved (CPython's issue 106905).
_ALONE: Final = threading.RLock()


@overload
def syntax_tree(source: str | bytes) -> ast.Module: ...
@overload
def syntax_tree(source: str | bytes, mode: Literal["eval"]) -> ast.Expression: ...
def syntax_tree(source: str | bytes, mode: Literal["exec", "eval"] = "exec") -> Any:
    """`ast.parse` of a source.

    Args:
        source: Python's source.
        mode: ``exec`` for a module, ``eval`` for one expression.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: As `ast.parse` does.
    """
    with _ALONE:
        return ast.parse(source, mode=mode)
