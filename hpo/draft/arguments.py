"""Suggests values and search ranges for the arguments of a model or a training function.

An argument's name and default decide what it is: a width, a depth, a dropout rate. An argument with an unknown
name is left alone in a model; in a training function, a positive number is searched around its default.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

Entry = dict[str, Any]
#: The property of the data that an argument follows: the size of an input or output, the tokens, the length.
Role = Literal["channels", "inputs", "outputs", "tokens", "length"]

#: The value of an argument that a person must fill in.
FILL_IN: Final = "???"

_INPUTS: Final = r"(in|input|n_in|num_in)_(features|dim|dims|size|width|units)|(n|num)_(features|inputs)"
_OUTPUTS: Final = r"(out|output|n_out|num_out)_(features|dim|dims|size|channels|units)"
_CLASSES: Final = r"(n|num)_(classes|labels|outputs|targets|categories)|classes|labels"
_ROLES: Final[tuple[tuple[Role, str], ...]] = (
    ("channels", r"(in|input|n_in|num_in)_(channels|chans|planes)|in_ch|channels_in"),
    ("inputs", rf"{_INPUTS}|d_in|inputs?|n_in|features"),
    ("outputs", rf"{_OUTPUTS}|{_CLASSES}|d_out|outputs?|n_out"),
    ("tokens", r"vocab(ulary)?(_size)?|(n|num)_(tokens|embeddings|words)|ntokens?|tokens"),
    ("length", r"(seq|sequence|max|context|block)_(len|length|size)|max_seq(_len|_length)?|length"),
)
_LEFT_ALONE: Final = re.compile(
    r"seed|random_state|device|dtype|verbose|debug|eps|epsilon|stride|padding|dilation|groups|pretrained|weights|"
    r"(n|num)_workers|workers|data|path|root|name|.*_(path|dir|file)|folder|save|log|.*samples|steps|max_steps|"
    r"iterations|iters|patience|.*_every|.*_interval"
)
_WIDTHS: Final = frozenset(
    {"hidden", "width", "widths", "units", "dim", "dims", "embed", "embedding", "channels", "features", "size"}
    | {"neurons", "filters", "ff", "ffn", "feedforward", "model", "planes", "mlp", "latent", "inner", "emb"}
)
_DEPTHS: Final = frozenset({"layers", "depth", "blocks", "nlayers", "nlayer", "stages", "hiddens"})
_EPOCHS: Final = frozenset({"epochs", "n_epochs", "num_epochs", "max_epochs", "nepochs"})
_NAMES_OF_ACTIVATIONS: Final = ("relu", "gelu", "silu", "tanh", "elu")
_HEADS: Final = (1, 2, 4, 8, 16)
_LARGE: Final = 4
#: The values by kind for arguments without a default.
_USUAL: Final = {
    "width": 64,
    "depth": 2,
    "drop": 0.1,
    "kernel": 3,
    "heads": 4,
    "lr": 1e-3,
    "batch": 32,
    "decay": 1e-4,
}


@dataclass(frozen=True)
class Argument:
    """One argument of a target.

    Attributes:
        name: Its name.
        value: Its value in the study file; `FILL_IN` if a person must fill it in; None to keep the default.
        default: Its own default; None without one that a study file can hold.
        required: Whether it has no default.
        entry: Its search-space entry; None if it is not searched.
        role: The property of the data that it follows.
        note: Why it has the value, as a comment in the file.
    """

    name: str
    value: Any = None
    default: Any = None
    required: bool = False
    entry: Entry | None = None
    role: Role | None = None
    note: str = ""

    @property
    def is_epochs(self) -> bool:
        """Whether this is the number of epochs of a training function."""
        return self.name in _EPOCHS


@dataclass
class Arguments:
    """All arguments of a target, by name."""

    by_name: dict[str, Argument] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Argument]:
        return iter(self.by_name.values())

    def give(self, name: str, **changes: Any) -> None:
        """Change attributes of one argument."""
        self.by_name[name] = replace(self.by_name[name], **changes)

    def values(self, **others: Any) -> dict[str, Any]:
        """The arguments of a call: the values of the study file, replaced by `others`."""
        return {item.name: item.value for item in self if item.value is not None} | others

    @property
    def missing(self) -> list[str]:
        """The names of the arguments that a person must fill in."""
        return [item.name for item in self if item.value == FILL_IN]


def arguments_of(target: Callable[..., Any], *, trains: bool, given: tuple[str, ...] = ()) -> Arguments:
    """The arguments of a target with a suggestion for each.

    Args:
        target: A class or function.
        trains: The target is a training function, whose plain arguments are all written to the study file.
        given: Parameters that hpo or other code passes.
    """
    try:
        parameters = inspect.signature(target).parameters.values()
    except (ValueError, TypeError):  # a target in C
        return Arguments()
    hints = _hints(target)
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [item for item in parameters if item.kind not in starred and item.name not in given]
    found = Arguments({item.name: _argument(item, hints.get(item.name), trains=trains) for item in named})
    if not trains:
        _fit_heads(found)
    return found


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError, AttributeError):  # names that only type checkers import
        return {}


def _argument(parameter: inspect.Parameter, hint: Any, *, trains: bool) -> Argument:
    name, required = parameter.name, parameter.default is inspect.Parameter.empty
    default = parameter.default if _is_plain(parameter.default) else None
    role = None if trains else _role(name)
    base = Argument(name, default=default, required=required, role=role)
    if role is not None:
        return replace(base, value=FILL_IN if required else None)
    if trains and base.is_epochs:
        return replace(base, value=default if default is not None else 20)
    value = _usual(name) if required else default
    entry = (
        None if value is None or _LEFT_ALONE.fullmatch(name.lower()) else _entry(name, value, hint, trains=trains)
    )
    if required and value is None:
        return replace(base, value=FILL_IN, note=_what_it_is(hint))
    return replace(base, value=value if trains or required or entry else None, entry=entry)


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):  # not a text that would be read as an interpolation or a missing value
        return "${" not in value and value != FILL_IN
    return isinstance(value, bool | int)


def _role(name: str) -> Role | None:
    return next((role for role, pattern in _ROLES if re.fullmatch(pattern, name.lower())), None)


def _what_it_is(hint: Any) -> str:
    kind = getattr(hint, "__name__", "")
    return f", of type {kind}" if kind else ""


def _usual(name: str) -> Any:
    return _USUAL.get(_kind(name, None) or "")


def _kind(name: str, value: Any) -> str | None:
    """The kind of an argument, by the words of its name, and by its value if it has one."""
    words = set(re.split(r"[_\d]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()))
    real = isinstance(value, int | float) and not isinstance(value, bool)
    whole = value is None or (real and isinstance(value, int) and value > 0)
    number = value is None or real
    tests = (
        ("drop", number and (any(word.startswith("drop") for word in words) or words == {"p"})),
        ("kernel", whole and bool(words & {"kernel", "ksize"})),
        ("heads", whole and bool(words & {"heads", "nhead", "nheads", "head"})),
        ("depth", whole and bool(words & _DEPTHS)),
        ("batch", whole and "batch" in words),
        ("lr", number and (words == {"lr"} or {"learning", "rate"} <= words or words == {"eta"})),
        ("decay", number and ({"weight", "decay"} <= words or words <= {"wd", "l2", "reg"})),
        ("momentum", number and "momentum" in words),
        ("smoothing", number and "smoothing" in words),
        ("activation", value is not None and bool(words & {"activation", "act", "nonlinearity"})),
        ("width", whole and bool(words & _WIDTHS)),
    )
    return next((kind for kind, fits in tests if fits), None)


def _entry(name: str, value: Any, hint: Any, *, trains: bool) -> Entry | None:
    if get_origin(hint) is Literal:
        return _choices(*get_args(hint))
    if isinstance(value, bool):
        return _choices(False, True)
    kind = _kind(name, value)
    if isinstance(value, str):
        return _activations(value) if kind == "activation" else None
    made = _ENTRIES[kind](value) if kind in _ENTRIES else None
    if made is None and trains and kind is None and isinstance(value, int | float) and value > 0:
        return _whole(value, max(1, value // 2), 2 * value) if isinstance(value, int) else _around(value, 1)
    return made


def _choices(*values: Any) -> Entry:
    return {"type": "categorical", "choices": list(values)}


def _whole(value: int, low: int, high: int) -> Entry:
    entry: Entry = {"type": "int", "low": low, "high": high}
    return {**entry, "log": True} if high >= 2 * _LARGE * low and value >= _LARGE else entry


def _around(value: float, decades: int) -> Entry:
    """A logarithmic range from ``decades`` below the value's decade to as many above it."""
    low, high = 10.0 ** (math.floor(math.log10(value)) - decades), 10.0 ** (math.ceil(math.log10(value)) + decades)
    return {"type": "float", "low": float(f"{low:.0e}"), "high": float(f"{high:.0e}"), "log": True}


def _span(low: float, high: float) -> Entry:
    return {"type": "float", "low": low, "high": high}


def _depth(value: int) -> Entry:
    return _whole(1, max(1, value // 2) if value > _LARGE else 1, 2 * value if value > _LARGE else value + 2)


def _kernel(value: int) -> Entry:
    return _choices(*sorted({3, 5, 7, value}))


def _batch(value: int) -> Entry:
    return _choices(*sorted({max(1, value // 2), value, 2 * value}))


def _decay(value: float) -> Entry:
    return _around(value, 2) if value > 0 else {"type": "float", "low": 1e-6, "high": 1e-2, "log": True}


def _activations(value: str) -> Entry | None:
    names = [name.upper() if value.isupper() else name for name in _NAMES_OF_ACTIVATIONS]
    return _choices(value, *(name for name in names if name != value)) if value in names else None


_ENTRIES: Final[dict[str | None, Callable[[Any], Entry | None]]] = {
    "drop": lambda value: _span(0.0, 0.5) if 0 <= value <= 0.5 else None,
    "kernel": _kernel,
    "depth": _depth,
    "batch": _batch,
    "lr": lambda value: _around(value, 1) if value > 0 else None,
    "decay": _decay,
    "momentum": lambda value: _span(0.0, 0.99) if 0 <= value < 1 else None,
    "smoothing": lambda value: _span(0.0, 0.2) if 0 <= value < 1 else None,
    "heads": lambda value: _choices(*sorted({*_HEADS[:_LARGE], value})),
    "width": lambda value: _whole(value, max(1, value // _LARGE), _LARGE * value),
}  # fmt: skip


def _fit_heads(found: Arguments) -> None:
    """With attention heads, search only widths and numbers of heads such that each number divides each width."""
    heads = next((item for item in found if item.entry and _kind(item.name, item.value) == "heads"), None)
    if heads is None:
        return
    widths = [item for item in found if item.entry and _kind(item.name, item.value) == "width"]
    for item in widths:
        found.give(item.name, entry=_choices(*sorted({max(1, item.value // 2), item.value, 2 * item.value})))
    sizes = [size for item in widths for size in found.by_name[item.name].entry["choices"]]  # type: ignore[index]
    fitting = [count for count in {*_HEADS, heads.value} if all(size % count == 0 for size in sizes)]
    found.give(heads.name, entry=_choices(*sorted(fitting)) if len(fitting) > 1 else None)
