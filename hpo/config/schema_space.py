"""The entries of `search_space`, as frozen pydantic models that check themselves."""

import math
from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hpo.config.paths import same, show, suggest_name

Scalar = str | int | float | bool | None

#: Databases keep a parameter as a floating-point number, which is exact for whole numbers up to here.
_EXACT = 2**53
_SCALARS = {"type": ["string", "number", "boolean", "null"]}


def _error(problem: str, fix: str, key: str = "") -> PydanticCustomError:
    return PydanticCustomError("hpo", "{problem}", {"problem": problem, "fix": fix, "key": key})


def _scalar(value: Any, key: str = "") -> Scalar:
    if not isinstance(value, str | int | float | bool | None):
        raise _error("must be plain values", "use text, numbers, true, false or null", key)
    if isinstance(value, float) and not math.isfinite(value):
        raise _error("must be finite", "leave inf and nan out", key)
    return value


def _choices(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise _error("must be a list", "write for example `choices: [32, 64]`")
    if not value:
        raise _error("is empty", "give at least one choice")
    for at, choice in enumerate(value):
        _scalar(choice)
        if any(choice == earlier for earlier in value[:at]):
            twin = next(earlier for earlier in value[:at] if choice == earlier)
            alike = "twice" if same(choice, twin) else f"twice: {show(twin)} and {show(choice)} count as equal"
            raise _error(f"holds {show(choice)} {alike}", "keep each choice once")
    return tuple(value)


def _when(value: Any) -> Any:
    if not isinstance(value, dict):
        fix = "write for example `when: {optimizer._target_: torch.optim.SGD}`"
        raise _error("must be a mapping of a path to its values", fix)
    conditions = {}
    for path, wanted in value.items():
        values = wanted if isinstance(wanted, list | tuple) else [wanted]
        if not values:
            raise _error("is empty", "give at least one value", path)
        conditions[path] = tuple(_scalar(item, path) for item in values)
    return conditions


Conditions = Annotated[
    dict[str, tuple[Any, ...]],
    BeforeValidator(_when),
    WithJsonSchema({"type": "object"}),
]
Choices = Annotated[
    tuple[Any, ...],
    BeforeValidator(_choices),
    WithJsonSchema({"type": "array", "items": _SCALARS, "minItems": 1}),
]


class _Param(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    when: Conditions = Field(default={}, description="Searched only while these hold.")


class _Range(_Param):
    def _check_range(self, low: float, high: float, step: float | None, *, log: bool) -> None:
        if low > high:
            raise _error(f"low {show(low)} is more than high {show(high)}", "swap the two", "low")
        if log and low <= 0:
            raise _error("a logarithmic range starts above zero", "raise low, or drop `log: true`", "low")
        if log and step is not None:
            raise _error("log and step exclude each other", "drop one of the two", "step")
        if not math.isfinite(high - low):
            raise _error(f"{show(low)} to {show(high)} is wider than a floating-point number", "narrow it", "high")
        if step is not None and (high - low) / step > _EXACT:
            raise _error(
                f"more than {_EXACT} steps of {show(step)} lie in the range", "write a larger step", "step"
            )
        if step is not None and (Decimal(str(high)) - Decimal(str(low))) % Decimal(str(step)):
            count = (Decimal(str(high)) - Decimal(str(low))) // Decimal(str(step))
            reached = type(high)(Decimal(str(low)) + count * Decimal(str(step)))
            problem = f"steps of {show(step)} from {show(low)} do not reach {show(high)}"
            raise _error(problem, f"write `high: {show(reached)}`, or another step", "high")


class FloatParam(_Range):
    """A real number between `low` and `high`, both included."""

    type: Literal["float"]
    low: float = Field(examples=[1e-5])
    high: float = Field(examples=[0.1])
    log: bool = Field(default=False, examples=[True])
    step: float | None = Field(default=None, gt=0, examples=[0.1])

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_range(self.low, self.high, self.step, log=self.log)
        return self


class IntParam(_Range):
    """A whole number between `low` and `high`, both included."""

    type: Literal["int"]
    low: int = Field(ge=-_EXACT, le=_EXACT, examples=[8])
    high: int = Field(ge=-_EXACT, le=_EXACT, examples=[256])
    log: bool = Field(default=False, examples=[True])
    step: int = Field(default=1, ge=1, examples=[8])

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_range(self.low, self.high, None if self.step == 1 else self.step, log=self.log)
        return self


class CategoricalParam(_Param):
    """One of some plain values."""

    type: Literal["categorical"]
    choices: Choices = Field(examples=[[32, 64, 128]])


def values_or_ends(entry: "FloatParam | IntParam | CategoricalParam") -> tuple[Any, ...]:
    """All values of a categorical entry, or both ends of a range."""
    return entry.choices if isinstance(entry, CategoricalParam) else (entry.low, entry.high)


def _known_type(value: Any) -> Any:
    kinds = ("float", "int", "categorical")
    if isinstance(value, dict) and value.get("type") not in kinds:
        problem = "is not a type of search-space entry" if "type" in value else "required key is missing"
        raise _error(problem, suggest_name(value.get("type"), kinds, what="the types are"), "type")
    return value


ParamSpec = Annotated[
    Annotated[FloatParam | IntParam | CategoricalParam, Field(discriminator="type")],
    BeforeValidator(_known_type),
]

__all__ = ["CategoricalParam", "FloatParam", "IntParam", "ParamSpec", "Scalar", "values_or_ends"]
