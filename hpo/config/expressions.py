"""Reads expressions over parameters, such as `model.hidden % model.heads == 0`; they are never run as code."""

from __future__ import annotations

import ast
import itertools
import keyword
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from hpo.config.paths import PathError, join_path, same, split_path
from hpo.config.schema_space import label

Value = Callable[[Mapping[str, Any]], Any]
#: From the least to the greatest value, both included.
Interval = tuple[float, float]

_LONGEST: Final = 1000
_WORDS: Final = {"true": True, "false": False, "null": None}
_PARTS: Final = "parameters, numbers, text, lists, + - * / // % **, < <= > >= == !=, in, and, or, not"
_RESERVED: Final = re.compile(rf"\.({'|'.join(keyword.kwlist)})\b")
_ARITHMETIC: Final = "parameters, numbers, + - * / // and parentheses"


class ExpressionError(ValueError):
    """The text is not an expression.

    Attributes:
        column: The position in the text, counted from 1.
        fix: What to do.
        name: The parameter that the error is about, if any.
    """

    def __init__(self, problem: str, column: int, fix: str, name: str = "") -> None:
        super().__init__(problem)
        self.column, self.fix, self.name = column, fix, name


@dataclass(frozen=True)
class Parsed:
    """An expression that has been read.

    Attributes:
        names: Its parameters, each with the column of its first place.
        value: Computes the value from parameters; all of `names` must be given.
        interval: Computes the range of its values from the ranges of its parameters; None if the expression is
            more than arithmetic.
    """

    names: Mapping[str, int]
    value: Value
    interval: Callable[[Mapping[str, Interval]], Interval] | None


@lru_cache(maxsize=512)
def parsed(text: str) -> Parsed:
    """Read an expression.

    Raises:
        ExpressionError: The text is not one.
    """
    if len(text) > _LONGEST:
        raise ExpressionError(f"has more than {_LONGEST} characters", 1, "write several shorter ones")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        names = dict(_names(tree))
        interval = (lambda known: _interval(tree, known)) if _is_arithmetic(tree) else None
        return Parsed(names, _value(tree), interval)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, ExpressionError):
            raise
        column = getattr(error, "offset", None) or 1
        fix = f"write a comparison of {_PARTS}"
        if reserved := _RESERVED.search(text):
            fix = f"write `['{reserved[1]}']` in place of `.{reserved[1]}`, which is a word of Python's"
        raise ExpressionError(f"is not an expression: {getattr(error, 'msg', error)}", column, fix) from error


def _refused(node: ast.AST, what: str) -> ExpressionError:
    column = getattr(node, "col_offset", 0) + 1
    return ExpressionError(f"{what} can't stand in an expression", column, f"use {_PARTS}")


def _path(node: ast.AST) -> str | None:
    """The dotted path that a syntax node spells; None for any other node."""
    if isinstance(node, ast.Name):
        return None if node.id in _WORDS else node.id
    if isinstance(node, ast.Attribute):
        above = _path(node.value)
        return None if above is None else f"{above}.{node.attr}"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant | ast.Name | ast.Attribute):
        above = _path(node.value)
        quoted = isinstance(node.slice, ast.Constant)
        key = node.slice.value if isinstance(node.slice, ast.Constant) else _path(node.slice)
        if above is None or not isinstance(key, str | int):
            return None
        return _below(above, key) if quoted else f"{above}[{key}]"  # without quotes, as in `search_space`
    return None


def _below(above: str, key: str | int) -> str:
    """The dotted path of a key in brackets; the key need not be a name in Python: `lambda`, `my-x`."""
    written = f"{above}[{key}]"
    try:
        return join_path(split_path(written))
    except PathError:  # then no parameter has this name either
        return written


def spelled(path: str) -> str:
    """A dotted path as an expression spells it: keys that are not names in Python are in brackets and quotes."""
    try:
        first, *keys = split_path(path)
    except PathError:
        return path
    return "".join((str(first), *(_spelled(key) for key in keys)))


def _spelled(key: str | int) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if key.isidentifier() and not keyword.iskeyword(key) else f"[{key!r}]"


def _names(node: ast.AST) -> Iterator[tuple[str, int]]:
    if (path := _path(node)) is not None:
        yield path, getattr(node, "col_offset", 0) + 1
        return
    for child in reversed(list(ast.iter_child_nodes(node))):  # a dict of these keeps the first place of each name
        yield from _names(child)


def _value(node: ast.AST) -> Value:
    """A function that computes the value of a syntax node."""
    if (path := _path(node)) is not None:
        return lambda params: params[path]
    if isinstance(node, ast.Name):
        word = _WORDS[node.id]
        return lambda _: word
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        constant = node.value
        return lambda _: constant
    if isinstance(node, ast.List | ast.Tuple):
        items = [_value(item) for item in node.elts]
        return lambda params: [item(params) for item in items]
    if isinstance(node, ast.BoolOp):
        parts, wanted = [_value(part) for part in node.values], isinstance(node.op, ast.Or)
        return lambda params: any(bool(part(params)) is wanted for part in parts) is wanted
    if isinstance(node, ast.UnaryOp | ast.BinOp):
        return _computed(node)
    if isinstance(node, ast.Compare):
        return _compared(node)
    raise _refused(node, _KINDS.get(type(node), "this"))


_KINDS: Final[Mapping[type[ast.AST], str]] = {
    ast.Call: "a call",
    ast.Attribute: "an attribute of a value",
    ast.Subscript: "a part of a value",
    ast.Lambda: "a function",
    ast.IfExp: "if … else",
    ast.JoinedStr: "a formatted text",
    ast.Dict: "a mapping",
}


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{'nothing' if value is None else repr(value)} is not a number")
    return value


def _power(base: float, exponent: float) -> float:
    try:
        return math.pow(base, exponent)
    except ValueError as error:  # a root of a negative number, a power of zero
        raise ArithmeticError(f"{base} ** {exponent} is not a real number") from error


def _whole(left: float, right: float) -> float | None:
    """The quotient if it is whole apart from rounding, like 0.3 / 0.1; None otherwise, or for two integers."""
    if isinstance(left, int) and isinstance(right, int):
        return None  # Python divides these exactly
    quotient = left / right
    nearest = float(round(quotient)) if math.isfinite(quotient) else math.nan
    return nearest if equal(quotient, nearest) else None


def _floored(left: float, right: float) -> float:
    whole = _whole(left, right)
    return left // right if whole is None else whole


def _remainder(left: float, right: float) -> float:
    return left % right if _whole(left, right) is None else 0.0


_OPERATORS: Final[Mapping[type[ast.AST], Callable[..., Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: _floored,
    ast.Mod: _remainder,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def _computed(node: ast.UnaryOp | ast.BinOp) -> Value:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        part = _value(node.operand)
        return lambda params: not part(params)
    function = _OPERATORS.get(type(node.op))
    if function is None:
        raise _refused(node, f"`{type(node.op).__name__}`")
    if isinstance(node, ast.UnaryOp):
        operand = _value(node.operand)
        return lambda params: function(_number(operand(params)))
    left, right = _value(node.left), _value(node.right)
    return lambda params: function(_number(left(params)), _number(right(params)))


def equal(left: Any, right: Any) -> bool:
    """Equality of a study file's values: true is not 1, a list equals its label, rounding errors don't count."""
    left, right = label(left), label(right)
    if isinstance(left, float) or isinstance(right, float):
        numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (left, right))
        return numbers and math.isclose(left, right, rel_tol=1e-12, abs_tol=1e-15)
    return same(left, right)


def at_most(left: Any, right: Any) -> bool:
    """Whether a number or text is less than or equal to another."""
    if isinstance(left, str) and isinstance(right, str):
        return left <= right
    return bool(_number(left) <= _number(right)) or equal(left, right)


_COMPARISONS: Final[Mapping[type[ast.AST], Callable[[Any, Any], bool]]] = {
    ast.Eq: equal,
    ast.NotEq: lambda left, right: not equal(left, right),
    ast.LtE: at_most,
    ast.GtE: lambda left, right: at_most(right, left),
    ast.Lt: lambda left, right: not at_most(right, left),
    ast.Gt: lambda left, right: not at_most(left, right),
    ast.In: lambda left, right: any(equal(left, each) for each in right),
    ast.NotIn: lambda left, right: not any(equal(left, each) for each in right),
    ast.Is: equal,
    ast.IsNot: lambda left, right: not equal(left, right),
}


def _compared(node: ast.Compare) -> Value:
    sides = [_value(side) for side in (node.left, *node.comparators)]
    for kind, side in zip(node.ops, node.comparators, strict=True):
        if isinstance(kind, ast.In | ast.NotIn) and not isinstance(side, ast.List | ast.Tuple):
            column = side.col_offset + 1
            raise ExpressionError("after `in` comes a list", column, "write for example `in [16, 32]`")
    tests = [_COMPARISONS[type(kind)] for kind in node.ops]

    def holds(params: Mapping[str, Any]) -> bool:
        values = [side(params) for side in sides]
        return all(test(*pair) for test, pair in zip(tests, itertools.pairwise(values), strict=True))

    return holds


# ---- the range of an expression's values


def _is_arithmetic(node: ast.AST) -> bool:
    if _path(node) is not None:
        return True
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub | ast.UAdd) and _is_arithmetic(node.operand)
    if isinstance(node, ast.BinOp):
        known = isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.FloorDiv)
        return known and _is_arithmetic(node.left) and _is_arithmetic(node.right)
    return False


def _interval(node: ast.AST, known: Mapping[str, Interval]) -> Interval:
    """Interval arithmetic on the ends of the operands; the result is too wide if a name occurs twice."""
    if (path := _path(node)) is not None:
        return known[path]
    if isinstance(node, ast.Constant):
        value: Any = node.value
        return value, value
    if isinstance(node, ast.UnaryOp):
        ends: Iterable[float] = (_OPERATORS[type(node.op)](end) for end in _interval(node.operand, known))
        return _around(ends)
    assert isinstance(node, ast.BinOp)
    left, right = _interval(node.left, known), _interval(node.right, known)
    if isinstance(node.op, ast.Div | ast.FloorDiv) and right[0] <= 0 <= right[1]:
        column = node.right.col_offset + 1
        raise ExpressionError("may be divided by zero", column, "let the divisor's range begin above 0")
    function = _OPERATORS[type(node.op)]
    return _around(function(one, other) for one in left for other in right)


def _around(values: Iterable[float]) -> Interval:
    found = list(values)
    return min(found), max(found)


def arithmetic(text: str) -> Parsed:
    """Read an arithmetic expression.

    Raises:
        ExpressionError: The text is not one.
    """
    fix = f"write it of {_ARITHMETIC}"
    try:
        found = parsed(text)
    except ExpressionError as error:  # the parts that its fix lists are for conditions
        raise ExpressionError(str(error), error.column, fix if _PARTS in error.fix else error.fix) from error
    if found.interval is None:
        raise ExpressionError("is not a number that a range can end at", 1, fix)
    return found
