"""The entries of `search_space`, as frozen pydantic models that check themselves.

A choice may be a list or a mapping. In the database and in outputs a parameter's value is plain, so such a choice
is represented by its label there: its text as JSON, which YAML reads, too.
"""

import json
import math
import re
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hpo.config.other_words import translated
from hpo.config.paths import same, show, suggest_name
from hpo.config.schema_types import fail

Scalar = str | int | float | bool | None

#: Databases store a parameter as a floating-point number, which is exact for whole numbers up to this one.
_EXACT = 2**53
#: A dotted name: each expression over parameters has one.
_DOTTED = re.compile(r"[A-Za-z_]\w*(\[\w+\])*\.[A-Za-z_]")
_CHOICE = {"type": ["string", "number", "boolean", "null", "array", "object"]}


def label(choice: Any) -> Scalar:
    """A choice as a parameter's value: a list or mapping becomes JSON with sorted keys, others stay the same."""
    if isinstance(choice, list | tuple | dict):
        return json.dumps(choice, sort_keys=True, ensure_ascii=False)
    return cast("Scalar", choice)


def _plain(value: Any, key: str = "") -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item, key) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise fail("a mapping's keys must be text", "quote them", key)
        return {name: _plain(item, key) for name, item in value.items()}
    if not isinstance(value, str | int | float | bool | None):
        fix = "use text, numbers, true, false, null, and lists and mappings of these"
        raise fail("must be plain values", fix, key)
    if isinstance(value, float) and not math.isfinite(value):
        raise fail("must be finite", "leave inf and nan out", key)
    return value


def _choices(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise fail("must be a list", "write for example `choices: [32, 64]`")
    if not value:
        raise fail("is empty", "give at least one choice")
    choices = tuple(_plain(choice) for choice in value)
    for at, choice in enumerate(choices):
        twins = [each for each in choices[:at] if each == choice or label(each) == label(choice)]
        if twins:
            alike = (
                "twice" if same(choice, twins[0]) else f"twice: {show(twins[0])} and {show(choice)} count as equal"
            )
            raise fail(f"holds {show(choice)} {alike}", "keep each choice once")
    return choices


def _when(value: Any) -> Any:
    if not isinstance(value, dict):
        fix = "write for example `when: {optimizer._target_: torch.optim.SGD}`"
        raise fail("must be a mapping of a path to its values", fix)
    conditions = {}
    for path, wanted in value.items():
        values = wanted if isinstance(wanted, list | tuple) else [wanted]
        if not values:
            raise fail("is empty", "give at least one value", path)
        conditions[path] = tuple(_plain(item, path) for item in values)
    return conditions


Conditions = Annotated[
    dict[str, tuple[Any, ...]],
    BeforeValidator(_when),
    WithJsonSchema({"type": "object"}),
]
Choices = Annotated[
    tuple[Any, ...],
    BeforeValidator(_choices),
    WithJsonSchema({"type": "array", "items": _CHOICE, "minItems": 1}),
]


class _Param(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    when: Conditions = Field(
        default={}, description="Search it only in trials where these keys have these values."
    )


class _Range(_Param):
    def _check_range(self, low: Any, high: Any, step: float | None, *, log: bool) -> None:
        if log and step is not None:
            raise fail("log and step exclude each other", "drop one of the two", "step")
        if isinstance(low, str) or isinstance(high, str):  # checked in `hpo.config.conditions`
            return
        if low > high:
            raise fail(f"low {show(low)} is more than high {show(high)}", "swap the two", "low")
        if log and low <= 0:
            raise fail("a logarithmic range starts above zero", "raise low, or drop `log: true`", "low")
        if not math.isfinite(high - low):
            raise fail(f"{show(low)} to {show(high)} is wider than a floating-point number", "narrow it", "high")
        if step is not None and (high - low) / step > _EXACT:
            raise fail(f"more than {_EXACT} steps of {show(step)} lie in the range", "write a larger step", "step")
        if step is not None and (Decimal(str(high)) - Decimal(str(low))) % Decimal(str(step)):
            count = (Decimal(str(high)) - Decimal(str(low))) // Decimal(str(step))
            reached = type(high)(Decimal(str(low)) + count * Decimal(str(step)))
            problem = f"steps of {show(step)} from {show(low)} do not reach {show(high)}"
            raise fail(problem, f"write `high: {show(reached)}`, or another step", "high")


def _bound(value: Any, *, whole: bool) -> Any:
    """A number, or an expression that names a parameter."""
    if isinstance(value, str) and _DOTTED.search(value):
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise PydanticCustomError("int_type" if whole else "float_type", "must be a number")
    if not math.isfinite(value):
        raise PydanticCustomError("finite_number", "must be finite")
    if whole and abs(value) > _EXACT:
        kind, limit = ("less_than_equal", {"le": _EXACT}) if value > 0 else ("greater_than_equal", {"ge": -_EXACT})
        raise PydanticCustomError(kind, "is too far from zero", limit)
    return value if whole else float(value)


_EXPRESSION = {"type": "string", "pattern": r"[A-Za-z_]\w*[.\[]"}
Real = Annotated[
    Any,
    BeforeValidator(partial(_bound, whole=False)),
    WithJsonSchema({"anyOf": [{"type": "number"}, _EXPRESSION]}),
]
Whole = Annotated[
    Any,
    BeforeValidator(partial(_bound, whole=True)),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": -_EXACT, "maximum": _EXACT}, _EXPRESSION]}),
]


_TYPE: Final = "The type of the parameter."
_LOW: Final = "The smallest value."
_HIGH: Final = "The largest value."
_LOG: Final = "Whether it is drawn on a logarithmic scale; `low` must then be above 0, and `step` left out."
_STEP: Final = "Distance between two values, starting at `low`; `high` must be one of them."


class FloatParam(_Range):
    """A real number between `low` and `high`, both included; each a number or an expression over parameters."""

    type: Literal["float"] = Field(description=_TYPE)
    low: Real = Field(description=_LOW, examples=[1e-5])
    high: Real = Field(description=_HIGH, examples=[0.1])
    log: bool = Field(default=False, description=_LOG, examples=[True])
    step: float | None = Field(default=None, gt=0, description=_STEP, examples=[0.1])

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_range(self.low, self.high, self.step, log=self.log)
        return self


class IntParam(_Range):
    """A whole number between `low` and `high`, both included; each a number or an expression over parameters."""

    type: Literal["int"] = Field(description=_TYPE)
    low: Whole = Field(description=_LOW, examples=[8])
    high: Whole = Field(description=_HIGH, examples=[256])
    log: bool = Field(default=False, description=_LOG, examples=[True])
    step: int = Field(default=1, ge=1, description=_STEP, examples=[8])

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_range(self.low, self.high, None if self.step == 1 else self.step, log=self.log)
        return self


class CategoricalParam(_Param):
    """One of a list of values: text, numbers, true, false, null, lists or mappings."""

    type: Literal["categorical"] = Field(description=_TYPE)
    choices: Choices = Field(
        description="The values to choose from.", examples=[[32, 64, 128], [[8, 16], [16, 32]]]
    )

    def choice(self, value: Any) -> Any:
        """The choice with this label; a value that is no choice's label is returned as it is."""
        return next((each for each in self.choices if same(label(each), value)), value)


def as_stored(entry: "ParamSpec") -> "ParamSpec":
    """A copy of an entry with labels in place of its choices and of the values in `when`."""
    changed: dict[str, Any] = {"when": {path: tuple(map(label, values)) for path, values in entry.when.items()}}
    if isinstance(entry, CategoricalParam):
        changed["choices"] = tuple(map(label, entry.choices))
    return entry.model_copy(update=changed)


def values_or_ends(entry: "FloatParam | IntParam | CategoricalParam") -> tuple[Any, ...]:
    """All values of a categorical entry, or both ends of a range."""
    return entry.choices if isinstance(entry, CategoricalParam) else (entry.low, entry.high)


def numbers_of(entry: "FloatParam | IntParam | CategoricalParam") -> list[float]:
    """The numbers among `values_or_ends`; true and expressions are not numbers."""
    return [each for each in values_or_ends(entry) if isinstance(each, int | float) and not isinstance(each, bool)]


def _known_type(value: Any) -> Any:
    kinds = ("float", "int", "categorical")
    if isinstance(value, str | int | float | list | None):
        fix = "write for example `{type: float, low: 1e-5, high: 0.1}`, in Python `hpo.Float(1e-5, 0.1)`"
        raise fail("must be a mapping", fix)
    if isinstance(value, dict) and (entry := translated(value)):
        raise fail("is in another tool's words", f"write `{entry}`")
    if isinstance(value, dict) and "type" not in value:
        for key in (key for key, item in value.items() if isinstance(item, dict) and key != "when"):
            fix = f"a path is one key with dots: join `{key}` to the key above it, as in `optimizer.lr: {{…}}`"
            raise fail("required key is missing", fix, "type")
    if isinstance(value, dict) and value.get("type") not in kinds:
        problem = "is not a type of search-space entry" if "type" in value else "required key is missing"
        raise fail(problem, suggest_name(value.get("type"), kinds, what="the types are"), "type")
    return value


ParamSpec = Annotated[
    Annotated[FloatParam | IntParam | CategoricalParam, Field(discriminator="type")],
    BeforeValidator(_known_type),
]
