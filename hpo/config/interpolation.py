"""Checks interpolations of a config without resolving them, and resolves the simple ones.

OmegaConf resolves an interpolation again at every use. A chain in which each one uses the one before several
times grows exponentially, so that a file of one page would fill the memory.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from hpo.config.marks import Marks
from hpo.config.paths import Keys, PathError, copy_plain, leaves, lookup, nearest, show, split_path
from hpo.config.yaml_loader import MAX_DEPTH, MAX_VALUES
from hpo.errors import InputError

#: At most this many characters of resolved text.
_MAX_TEXT: Final = 1_000_000
#: At most this many interpolations inside each other's braces.
_MAX_NESTED: Final = 5
_INNERMOST: Final = re.compile(r"\$\{([^${}:]*)\}")
_ABSENT: Final = object()
#: A text that is a single interpolation of names: ``${section.key}``.
_WHOLE: Final = re.compile(r"\$\{([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)\}", re.ASCII)
#: The first name in an interpolation: a section of the config.
_REFERENCE: Final = re.compile(r"\$\{\s*([^${}.:\[\s]*)")
#: OmegaConf's error texts for a path that leads nowhere, and for a variable that `oc.env` does not find.
_NO_KEY: Final = re.compile(r"^Interpolation key '(.+)' not found")
_UNSET: Final = re.compile(r"Environment variable '([^']+)' not found")
#: The start of an interpolation, with the backslashes before it.
_BEGINNING: Final = re.compile(r"(\\*)\$\{")
#: Interpolations that may lead anywhere: a resolver, a relative or a nested path.
_ANYWHERE: Final = re.compile(r"\$\{(?:\s*[.\[$]|[^{}]*[:$])")


@dataclass(frozen=True)
class _Size:
    """The size of a resolved value: its values, its characters, and its longest chain of interpolations."""

    values: int = 1
    text: int = 0
    height: int = 0

    def __add__(self, other: "_Size") -> "_Size":
        height = max(self.height, other.height)
        return _Size(self.values + other.values, self.text + other.text, height)


@dataclass
class _Measure:
    raw: Mapping[str, Any]
    marks: Marks
    known: dict[Keys, _Size] = field(default_factory=dict)

    def size(self, node: Any, keys: Keys) -> _Size:
        if keys not in self.known:
            self.known[keys] = _Size()  # ends a circle, which OmegaConf refuses
            self.known[keys] = size = self._measured(node, keys)
            self._refuse(size, node, keys)
        return self.known[keys]

    def _measured(self, node: Any, keys: Keys) -> _Size:
        if isinstance(node, str):
            return self._text(node, keys)
        children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
        total = _Size()
        for key, child in children:
            total += self.size(child, (*keys, key))
        return total

    def _text(self, text: str, keys: Keys) -> _Size:
        total = _Size(text=len(text))
        if _nested(text) > _MAX_NESTED:
            fix = "write the inner values out"
            raise self.marks.error(
                f"has more than {_MAX_NESTED} `${{` inside one another", keys, value=text, fix=fix
            )
        for path in _INNERMOST.findall(text):
            target = _target(path.strip(), keys)
            value = lookup(self.raw, target, _ABSENT) if target else _ABSENT
            if value is not _ABSENT:
                size = self.size(value, target)
                total += _Size(size.values, size.text, size.height + 1)
        return total

    def _refuse(self, size: _Size, node: Any, keys: Keys) -> None:
        fix = "write the values out, or keep them in a module"
        if size.height > MAX_DEPTH:
            problem = f"is a chain of more than {MAX_DEPTH} interpolations"
        elif size.values > MAX_VALUES:
            problem = f"holds more than {MAX_VALUES:,} values once its interpolations are resolved"
        elif size.text > _MAX_TEXT:
            problem = f"holds more than {_MAX_TEXT:,} characters once its interpolations are resolved"
        else:
            return
        raise self.marks.error(problem, keys, value=node if isinstance(node, str) else "", fix=fix)


def check_interpolations(raw: Mapping[str, Any], marks: Marks) -> None:
    """Refuse a config whose interpolations would become too large or too deep.

    Raises:
        InputError: At the first value that would.
    """
    _Measure(raw, marks).size(raw, ())


def unresolved(raw: Mapping[str, Any], error: OmegaConfBaseException, marks: Marks) -> InputError:
    """The error for an interpolation that OmegaConf could not resolve.

    Args:
        raw: The config.
        error: OmegaConf's error.
        marks: Where the config's values are written.
    """
    problem, keys = show(str(error).partition("\n")[0]), _keys_of(raw, error)
    fix = "write `${section.key}` with a path that this file has"
    written = str(lookup(raw, keys, ""))
    if "Recursive" in problem:
        problem, fix = "interpolations refer to each other in a circle", "write one of these values out"
    elif isinstance(error, GrammarParseError) and written.count("${") > written.count("}"):
        problem, fix = "a `}` is missing", "close each `${` with a `}`"
    elif problem == "Unsupported interpolation type env":
        fix = f"write `${{oc.env:NAME}}` for an environment variable; of a value, {fix}"
    elif absent := _NO_KEY.search(problem):
        above, _, name = absent[1].rpartition(".")
        beside = raw.get(above)
        if isinstance(beside, Mapping) and (guess := nearest(name, beside)):
            fix = f"did you mean `${{{above}.{guess}}}`? {fix}"
    elif unset := _UNSET.search(problem):
        name = unset[1]
        # OmegaConf names the value that it resolved, which may refer to the one that reads the variable.
        reads = re.compile(rf"oc\.env:\s*{re.escape(name)}\s*\}}")  # without a default
        users = [keys for keys, value in leaves(raw) if isinstance(value, str) and reads.search(value)]
        keys = users[0] if users else keys
        problem, fix = (
            f"the environment variable {name} is not set",
            f"set it, or write `${{oc.env:{name},default}}`",
        )
    return marks.error(problem, keys, value=lookup(raw, keys, ""), fix=fix)


def _keys_of(raw: Mapping[str, Any], error: OmegaConfBaseException) -> Keys:
    try:
        keys = split_path(str(error.full_key or ""))
    except PathError:
        return ()
    return keys if lookup(raw, keys) is not None else keys[:1]


def plainly_resolved(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Resolve a config whose interpolations all are ``${section.key}`` of a plain value.

    The result is the same as OmegaConf's, which takes far longer; every trial resolves its config.

    Returns:
        The resolved config; None if there is any other interpolation, or a value is missing.
    """
    found: list[tuple[Keys, Any]] = []
    for keys, value in leaves(raw):
        if not isinstance(value, str) or not _is_special(value):
            continue
        path = _WHOLE.fullmatch(value)
        target = lookup(raw, tuple(path[1].split(".")), _ABSENT) if path else _ABSENT
        if not isinstance(target, int | float | str | None) or (isinstance(target, str) and _is_special(target)):
            return None
        found.append((keys, target))
    sections = {keys[0] for keys, _ in found}
    resolved = {name: copy_plain(section) if name in sections else section for name, section in raw.items()}
    for keys, value in found:
        parent = lookup(resolved, keys[:-1])
        parent[keys[-1]] = value
    return resolved


def escaped(node: Any) -> Any:
    """Resolved values, escaped for a config: a text with ``${`` resolves to itself."""
    if isinstance(node, Mapping):
        return {key: escaped(value) for key, value in node.items()}
    if isinstance(node, list):
        return [escaped(item) for item in node]
    return _BEGINNING.sub(r"\1\1\\${", node) if isinstance(node, str) else node


def _is_special(text: str) -> bool:
    """Whether OmegaConf may replace or refuse a text."""
    return "${" in text or "???" in text


def _target(path: str, keys: Keys) -> Keys:
    """The keys that an interpolation written at `keys` leads to; empty if the path can't be read."""
    up = len(path) - len(path.lstrip("."))
    try:
        return (*keys[: len(keys) - up], *split_path(path[up:])) if up else split_path(path)
    except PathError:
        return ()


def _nested(text: str) -> int:
    """How deep interpolations are nested."""
    deepest = depth = 0
    for part in re.findall(r"\$\{|\}", text):
        depth = max(0, depth - 1) if part == "}" else depth + 1
        deepest = max(deepest, depth)
    return deepest


def sections_involved(raw: Mapping[str, Any]) -> set[str]:
    """The sections with interpolations and those that they refer to; all sections if the references are not known.

    Only these need OmegaConf, which is slow for each value.
    """
    texts = {name: "\n".join(_texts(section)) for name, section in raw.items()}
    found = {name for name, text in texts.items() if text}
    if any(_ANYWHERE.search(texts[name]) for name in found):
        return set(raw)
    named = {reference for name in found for reference in _REFERENCE.findall(texts[name])}
    return found | (named & set(raw))


def _texts(section: Any) -> Iterator[str]:
    """The texts of a section that OmegaConf may replace or refuse."""
    for _, value in leaves(section):
        if isinstance(value, str) and _is_special(value):
            yield value
