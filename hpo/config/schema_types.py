"""The base class of a study file's sections, and values with notations of their own: durations, sizes."""

import math
import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, WithJsonSchema
from pydantic_core import PydanticCustomError

from hpo.config.paths import suggest_name

#: The key of a node that names a class or a function.
TARGET: Final = "_target_"
#: The largest number of trials and the like, which databases store in 32 bits.
MAX_NUMBER: Final = 2**31 - 1
#: The most processes on one machine.
MAX_PROCESSES: Final = 1024
#: The most agents of one study.
MAX_AGENTS: Final = 10_000
#: The largest seed that NumPy accepts.
MAX_SEED: Final = 2**32 - 1
MAX_EPOCHS: Final = 1_000_000
MAX_STEPS: Final = 10**12
#: In seconds: some thirty years, which every clock can represent.
_MAX_SECONDS: Final = 10**9
#: In bytes: an exbibyte.
_MAX_SIZE: Final = 2**60
#: A smaller number without a unit was probably meant as gibibytes.
_LEAST_PLAIN: Final = 2**10

_DURATION = re.compile(r"(?:(\d{1,12})d)?(?:(\d{1,12})h)?(?:(\d{1,12})m)?(?:(\d{1,12})s?)?")
#: Arguments of torch.compile: the type of each, its type in words, and an example.
_COMPILE_ARGUMENTS: dict[str, tuple[type, str, str]] = {
    "fullgraph": (bool, "true or false", "true"),
    "dynamic": (bool, "true or false", "true"),
    "backend": (str, "text", "inductor"),
    "mode": (str, "text", "max-autotune"),
    "options": (dict, "a mapping", "{max_autotune: true}"),
}
_UNITS = (86400, 3600, 60, 1)
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([KMGTkmgt]?)([iI]?)[Bb]?")
_RANGE = re.compile(r"(\d{1,6})(?:\s*\.\.\s*(\d{1,6}))?")
_PREFIXES = ("", "K", "M", "G", "T")


def fail(problem: str, fix: str = "", *keys: str) -> PydanticCustomError:
    """An error with its own words; `keys` lead from the validated value to what it is about."""
    return PydanticCustomError(
        "hpo", "{problem}", {"problem": problem, "fix": fix, "keys": tuple(filter(None, keys))}
    )


def in_seconds(value: Any) -> float:
    """A duration as people write it, in seconds."""
    fix = 'write seconds, or a duration such as "90s", "30m", "2h" or "1h30m"'
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise fail("must be a duration", fix)
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        # A number without a unit is in seconds, but after other units it is ambiguous.
        if match is None or not match[0] or (any(match.groups()[:3]) and match[0][-1].isdigit()):
            raise fail("is not a duration", fix)
        value = sum(int(count) * unit for count, unit in zip(match.groups("0"), _UNITS, strict=True))
    if not (math.isfinite(value) and value > 0):
        raise fail("must be more than zero seconds", fix)
    if value > _MAX_SECONDS:
        raise fail(f"must be at most {_MAX_SECONDS} seconds", fix)
    return float(value)


def _duration(value: Any) -> float | None:
    return None if value is None else in_seconds(value)


def in_bytes(value: Any, key: str = "") -> int:
    """A size as people write it, in bytes; `key` is its key below the validated value, for errors."""
    fix, has_unit = 'write bytes, or a size such as "500MB", "8GiB" or "1.5TB"', False
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise fail("must be a size", fix, key)
    number = value
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise fail("is not a size", fix, key)
        number, prefix, binary = match[1], match[2].upper(), bool(match[3])
        has_unit = bool(prefix) or match[0][-1] in "Bb"
        value = round(float(number) * (1024 if binary else 1000) ** _PREFIXES.index(prefix))
    if value <= 0:
        raise fail("must be more than 0 bytes", fix, key)
    if value < _LEAST_PLAIN and not has_unit:
        raise fail(f"is {value} bytes", f'write a unit: "{number}GiB", or "{number}B" if bytes are meant', key)
    if value > _MAX_SIZE:
        raise fail("must be at most 1 EiB", fix, key)
    return int(value)


def _devices(value: Any) -> Any:
    if value is None or value == "auto":
        return None
    items = value.split(",") if isinstance(value, str) else value
    fix = 'write for example "cuda:0,cuda:1" or [cpu]'
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise fail("must be names of devices", fix)
    names = tuple(item.strip() for item in items)
    if not names or not all(names):
        raise fail("names no device", fix)
    return names


def _agents(value: Any) -> Any:
    """The number of agents, or ``MIN..MAX``, as two bounds."""
    if value is None or (isinstance(value, list | tuple) and len(value) == 2):
        bounds = value
    elif isinstance(value, str) and (match := _RANGE.fullmatch(value.strip())):
        bounds = (int(match[1]), int(match[2] or match[1]))
    else:
        bounds = (value, value)
    fix = "write a number of agents, such as 4, or the fewest and the most, such as 2..8"
    if bounds is None:
        return None
    if any(isinstance(each, bool) or not isinstance(each, int) for each in bounds):
        raise fail("is not a number of agents", fix)
    if not 0 <= bounds[0] <= bounds[1] <= MAX_AGENTS or bounds[1] == 0:
        raise fail(f"must be MIN..MAX with 0 ≤ MIN ≤ MAX and MAX from 1 to {MAX_AGENTS}", fix)
    return tuple(bounds)


def _interval(value: Any) -> Any:
    steps = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_STEPS
    if value is not None and not steps and not (isinstance(value, float) and 0 < value < 1):
        fix = "write a whole number of steps, such as 500, or a fraction of a pass below 1, such as 0.25"
        raise fail("is neither steps nor a fraction", fix)
    return value


def _limit(value: Any) -> Any:
    batches = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_NUMBER
    if value is not None and not batches and not (isinstance(value, float) and 0 < value < 1):
        fix = "write a whole number of batches, such as 100, or a fraction of them below 1, such as 0.25"
        raise fail("is neither batches nor a fraction", fix)
    return value


def is_import_path(value: Any) -> bool:
    """Whether a value reads as the import path of a class or function."""
    return isinstance(value, str) and _IMPORT_PATH.fullmatch(value) is not None


def with_target(node: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping; refuse it if it names no class or function."""
    fix = "write the import path of a class or function, such as `torch.nn.Linear` or `model.MLP`"
    if TARGET not in node:
        raise fail("required key is missing", fix, TARGET)
    if not is_import_path(node[TARGET]):
        dotted = re.sub(r"(\.py)?:", ".", str(node[TARGET])).removesuffix("()")
        raise fail("is not an import path", f"write `{dotted}`" if is_import_path(dotted) else fix, TARGET)
    return node


def _compile_options(value: Any) -> Any:
    if not isinstance(value, bool | dict):
        raise fail("must be true, false or a mapping of arguments", "write `compile: true`")
    for name, given in value.items() if isinstance(value, dict) else ():
        if name not in _COMPILE_ARGUMENTS:
            raise fail("torch.compile takes no such argument", suggest_name(name, _COMPILE_ARGUMENTS), str(name))
        kind, words, example = _COMPILE_ARGUMENTS[name]
        if given is not None and not isinstance(given, kind):
            raise fail(f"must be {words}", f"write for example `{name}: {example}`", name)
    return value


def target_schema(**keys: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a mapping that names a class or function, with further keys that it may have."""
    return {"type": "object", "properties": {TARGET: {"type": "string"}, **keys}, "required": [TARGET]}


TargetNode = Annotated[dict[str, Any], AfterValidator(with_target), WithJsonSchema(target_schema())]
Duration = Annotated[
    float | None,
    BeforeValidator(_duration),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "null"}]}),
]
Size = Annotated[
    int | None,
    BeforeValidator(lambda value: None if value is None else in_bytes(value)),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}),
]
Devices = Annotated[
    tuple[str, ...] | None,
    BeforeValidator(_devices),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
    ),
]
Agents = Annotated[
    tuple[int, int] | None,
    BeforeValidator(_agents),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}, {"type": "null"}]}),
]
Seconds = Annotated[float, BeforeValidator(_duration), WithJsonSchema({"type": ["number", "string"]})]
Interval = Annotated[
    Any,
    BeforeValidator(_interval),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}),
]
Limit = Annotated[
    Any,
    BeforeValidator(_limit),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}),
]
CompileOptions = Annotated[
    Any,
    BeforeValidator(_compile_options),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "object"}]}),
]


class _MayChange:
    """The type of `MAY_CHANGE`."""


#: Marks a field of the schema, in its ``Annotated``, that is not part of the study's identity: its value may
#: change once the study has started. All other fields must stay the same.
MAY_CHANGE: Final = _MayChange()


class Section(BaseModel):
    """Base of every section: frozen, strict about types, and without room for unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # an argument of the user's code may be infinite
    )
