"""From the text of `--on` or `run.on` to an engine: ``slurm:partition=gpu,time=4h``, ``ray://HOST:PORT``.

An engine's module has ``KEYS``, the keys allowed in its text, and ``make``, which returns the engine of an
`Address`. It imports the engine's own packages only inside functions, so that a text can be checked without them.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

from hpo.config.paths import suggest_name
from hpo.errors import InputError
from hpo.execution.engines.engine import Engine

#: Kinds of engines, and their modules in this package.
_MODULES: Final = {"local": "local", "ray": "ray_engine", "k8s": "kubernetes", "slurm": "slurm"}


@dataclass(frozen=True)
class Address:
    """Where agents are placed, as a person writes it.

    Attributes:
        text: The whole text, ``KIND[:PLACE][,key=value]…``.
        kind: The engine: ``local``, ``ray``, ``slurm`` or ``k8s``.
        place: The part before the first key, such as ``local`` in ``ray:local``; the whole URL in
            ``ray://HOST:PORT``; empty if there is none.
        options: The keys with their values. A value may contain commas.
    """

    text: str
    kind: str
    place: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_here(self) -> bool:
        """Whether all agents work on this machine."""
        return self.kind == "local" or (self.kind, self.place) == ("ray", "local")

    def error(self, problem: str, fix: str, *, key: str = "") -> InputError:
        """An InputError about this text, or about one of its keys."""
        return InputError(problem, path=f"--on {self.kind}: {key}" if key else "--on", value=self.text, fix=fix)


class _Module(Protocol):
    KEYS: Collection[str]

    def make(self, address: Address) -> Engine: ...


def address_of(text: str) -> Address:
    """Read the text of `--on`.

    Raises:
        InputError: It names no engine; or a key is unknown to the engine, has no value, or is given twice.
    """
    kind, _, rest = text.strip().partition(":")
    if kind not in _MODULES:
        fix = suggest_name(kind, _MODULES, what="engines")
        raise InputError(f"there is no engine named {kind!r}", path="--on", value=text, fix=fix)
    place, last, options = "", "", dict[str, str]()
    for item in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals and last:  # a value with commas
            options[last] += f",{key}"
        elif not equals:
            place = f"{place},{key}" if place else key
        elif key in options or not value:
            problem = f"`{key}` stands there twice" if key in options else f"`{key}` has no value"
            raise InputError(problem, path="--on", value=text, fix="give each key once, as `key=value`")
        else:
            options[key], last = value, key
    if place.startswith("//"):
        place = f"{kind}:{place}"
    address = Address(text, kind, place, options)
    _check_keys(address)
    return address


def engine_of(address: Address) -> Engine:
    """The engine of an address.

    Raises:
        InputError: A value does not fit, or what the engine needs is not installed.
    """
    return _module_of(address.kind).make(address)


def _check_keys(address: Address) -> None:
    keys = _module_of(address.kind).KEYS
    for key in address.options:
        if key not in keys:
            fix = suggest_name(key, keys, what="its keys")
            raise address.error(f"the engine `{address.kind}` has no key {key!r}", fix)


def _module_of(kind: str) -> _Module:
    return cast("_Module", importlib.import_module(f"hpo.execution.engines.{_MODULES[kind]}"))
