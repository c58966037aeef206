"""Conditions on all points of a search space: the expressions of `where`, and bounds that depend on parameters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from hpo.config.expressions import ExpressionError, Interval, Parsed, arithmetic, at_most, equal, parsed, spelled
from hpo.config.paths import PathError, join_path, lookup, show, split_path, suggest_name
from hpo.config.schema_space import (
    CategoricalParam,
    FloatParam,
    IntParam,
    ParamSpec,
    as_stored,
    numbers_of,
    values_or_ends,
)
from hpo.errors import InputError

#: An interpolation in JSON text, where the backslash that escapes one is doubled.
_INTERPOLATION: Final = re.compile(r"(?<!\\)(?:\\{4})*\$\{\s*([^}]+?)\s*\}")

Refuse = Callable[..., InputError]


@dataclass(frozen=True)
class Condition:
    """One condition on a point.

    Attributes:
        text: The condition as people read it.
        place: The dotted path where it is written.
        bounded: The entry whose ``low`` or ``high`` it is; None for an expression of ``where``.
        end: ``"low"`` or ``"high"``, with ``bounded``.
        expression: The parsed expression.
    """

    text: str
    place: str
    expression: str
    bounded: str | None = None
    end: str = ""

    @property
    def names(self) -> set[str]:
        """The parameters that the condition is about."""
        return {*parsed(self.expression).names, *([] if self.bounded is None else [self.bounded])}

    def holds(self, params: Mapping[str, Any]) -> bool:
        """Whether the condition holds for a point; it does if the point lacks one of its parameters.

        A condition that can't be computed, such as a division by zero, does not hold.
        """
        try:
            return self.computed(params)
        except (ArithmeticError, TypeError):
            return False

    def computed(self, params: Mapping[str, Any]) -> bool:
        """The same as `holds`, but errors of the computation are raised.

        Raises:
            ArithmeticError: Such as a division by zero.
            TypeError: The values can't be compared or computed with.
        """
        found = parsed(self.expression)
        if any(name not in params for name in found.names) or (
            self.bounded is not None and self.bounded not in params
        ):
            return True
        value = found.value(params)
        if self.bounded is None:
            return bool(value)
        mine = params[self.bounded]
        return at_most(value, mine) if self.end == "low" else at_most(mine, value)


def conditions_of(
    where: tuple[str, ...], entries: Mapping[str, ParamSpec], config: Mapping[str, Any], refuse: Refuse
) -> tuple[Condition, ...]:
    """The conditions of a study file, checked.

    Args:
        where: The expressions of ``where``.
        entries: The search space as it is written.
        config: The base config.
        refuse: Makes an error at a dotted path, such as `StudySpec.error`.

    Raises:
        InputError: One is not an expression over searched parameters.
    """
    found = []
    for at, text in enumerate(where):
        place = join_path(("where", at))
        names = _names(text, place, entries, config, refuse)
        if not names:
            raise refuse("names no parameter", path=place, value=text, fix=_searched("", entries))
        if parsed(text).interval is not None:
            fix = f"write a comparison, such as `{text} <= 8`"
            raise refuse("is a value, and nothing that holds or not", path=place, value=text, fix=fix)
        found.append(Condition(text, place, text))
    for path, end, text in _bounds(entries):
        sign = "≥" if end == "low" else "≤"
        place = join_path(("search_space", path, end))
        found.append(Condition(f"{path} {sign} {text}", place, text, path, end))
    return tuple(found)


def _names(
    text: str,
    place: str,
    entries: Mapping[str, ParamSpec],
    config: Mapping[str, Any],
    refuse: Refuse,
    read: Callable[[str], Parsed] = parsed,
) -> list[str]:
    """The parameters of an expression; refuses one that is not searched."""
    try:
        names = read(text).names
    except ExpressionError as error:
        raise refuse(f"column {error.column}: {error}", path=place, value=text, fix=error.fix) from error
    for name, column in sorted(names.items(), key=lambda each: each[1]):
        if name not in entries:
            base = _base(name, config)
            fix = _searched(name, entries)
            if isinstance(base, str | int | float):
                written = f'`"${{{name}}}"`, in quotes,' if isinstance(base, str) else f"`${{{name}}}`"
                fix = f"write {written} for its value in the config, {show(base)}; or add it to search_space"
            raise refuse(f"column {column}: `{name}` is not searched", path=place, value=text, fix=fix)
    return list(names)


def _base(name: str, config: Mapping[str, Any]) -> Any:
    """The config's value at a path; None without one, or if the text is not a path."""
    try:
        return lookup(config, split_path(name))
    except PathError:
        return None


def _searched(name: str, entries: Mapping[str, ParamSpec]) -> str:
    return suggest_name(name, [spelled(each) for each in entries], what="searched are")


def _bounds(entries: Mapping[str, ParamSpec]) -> Iterator[tuple[str, str, str]]:
    for path, entry in entries.items():
        if not isinstance(entry, CategoricalParam):
            for end in ("low", "high"):
                if isinstance(text := getattr(entry, end), str):
                    yield path, end, text


def refuse_interpolated(raw: Mapping[str, Any], entries: Mapping[str, ParamSpec], refuse: Refuse) -> None:
    """Refuse `${path}` of a parameter in a condition: it would be the parameter's value in the base config.

    Among a parameter's own choices, that value is meant.

    Raises:
        InputError: `where` or an entry has one.
    """
    space = raw.get("search_space") or {}
    places: dict[tuple[str, ...], Any] = {
        ("search_space", path, key): lookup(space, (path, key))
        for path in entries
        for key in ("low", "high", "step", "choices", "when")
    }
    for keys, node in {**places, ("where",): raw.get("where")}.items():
        for name in _INTERPOLATION.findall(json.dumps(node, default=str)):
            if name in entries and keys[1:] != (name, "choices"):
                problem = f"`${{{name}}}` is the base config's value, not the trial's"
                fix = f"write `{spelled(name)}`, without `${{}}`"
                if keys[-1] not in ("low", "high", "where"):
                    fix = f"write a value, or leave `{name}` out of search_space"
                raise refuse(problem, path=join_path(keys), value=node, fix=fix)


def widest(entries: Mapping[str, ParamSpec], config: Mapping[str, Any], refuse: Refuse) -> dict[str, ParamSpec]:
    """The entries as they are stored: a bound that depends on parameters becomes the widest that it can be.

    Raises:
        InputError: A bound names a parameter that is not searched or not a number, or leaves no range; or bounds
            depend on each other in a circle.
    """
    done: dict[str, ParamSpec] = {}

    def visit(path: str, chain: tuple[str, ...]) -> ParamSpec:
        if path in done:
            return done[path]
        if path in chain:
            circle = " → ".join((*chain[chain.index(path) :], path))
            fix = "write numbers here, and what holds between the two in `where`"
            place = join_path(("search_space", chain[-1]))
            raise refuse(f"bounds depend on each other: {circle}", path=place, fix=fix)
        changed = {}
        for end in ("low", "high"):
            if isinstance(text := getattr(entries[path], end, None), str):
                place = join_path(("search_space", path, end))
                names = _names(text, place, entries, config, refuse, read=arithmetic)
                known = {name: _interval(name, visit(name, (*chain, path)), place, text, refuse) for name in names}
                changed[end] = _end(entries[path], end, text, known, place, refuse)
        done[path] = _checked(as_stored(entries[path]), changed, path, refuse)
        return done[path]

    for path in entries:
        visit(path, ())
    return {path: done[path] for path in entries}


def _interval(name: str, entry: ParamSpec, place: str, text: str, refuse: Refuse) -> Interval:
    numbers = numbers_of(entry)
    if len(numbers) < len(values_or_ends(entry)):
        fix = "name a parameter whose values are numbers"
        raise refuse(f"`{name}` has choices that are no numbers", path=place, value=text, fix=fix)
    return min(numbers), max(numbers)


def _end(
    entry: ParamSpec, end: str, text: str, known: Mapping[str, Interval], place: str, refuse: Refuse
) -> float:
    try:
        interval = arithmetic(text).interval
        assert interval is not None
        low, high = interval(known)
    except ExpressionError as error:
        raise refuse(f"column {error.column}: {error}", path=place, value=text, fix=error.fix) from error
    except OverflowError:
        low, high = -math.inf, math.inf
    found = low if end == "low" else high
    if not math.isfinite(found):
        raise refuse("has no end: its numbers are too large", path=place, value=text, fix="write smaller ones")
    return _whole(found, end) if isinstance(entry, IntParam) else float(found)


def _whole(found: float | Decimal, end: str) -> int:
    """The least whole number from a low end on, or the largest up to a high end; rounding errors don't count."""
    nearest = round(found)
    if equal(float(found), nearest):
        return nearest
    return math.ceil(found) if end == "low" else math.floor(found)


def _checked(entry: ParamSpec, changed: Mapping[str, float], path: str, refuse: Refuse) -> ParamSpec:
    """The entry with these ends, checked here because the schema has only seen expressions."""
    if not changed:
        return entry
    assert isinstance(entry, FloatParam | IntParam)
    here = join_path(("search_space", path))
    values = {"low": entry.low, "high": entry.high, **changed}
    stepped = entry.step is not None and not (isinstance(entry, IntParam) and entry.step == 1)
    if stepped and "low" in changed:
        fix = "write a number for `low`, or leave `step` out"
        raise refuse("steps count from `low`, which depends on another parameter", path=here, fix=fix)
    if stepped:
        low, step = Decimal(str(values["low"])), Decimal(str(entry.step))
        steps = _whole((Decimal(str(values["high"])) - low) / step, "high")
        values["high"] = type(entry.low)(low + steps * step)
    if values["low"] > values["high"]:
        problem = f"is empty for every trial: it ends at {show(values['low'])} and {show(values['high'])} at most"
        raise refuse(problem, path=here, fix="write bounds that leave a value between them")
    if entry.log and values["low"] <= 0:
        fix = "let what `low` is made of begin above zero, or drop `log: true`"
        raise refuse("a logarithmic range starts above zero", path=here, value=values["low"], fix=fix)
    return entry.model_copy(update=values)
