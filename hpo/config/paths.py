"""Dotted paths into plain data: ``optimizer.lr``, ``layers[0].width``, ``search_space[optimizer.lr].low``."""

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

Keys = tuple[str | int, ...]

#: At most this many characters of a key: a search path is a parameter's name, and database columns are limited.
MAX_KEY = 256

_ABSENT = "(absent)"
#: A key in brackets may be a path with brackets: ``search_space[optimizer.groups[layers.[01]].lr]``.
_SEGMENT = re.compile(r"\[((?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*|[^\]]*)\]|([^.\[\]]+)")
_SHOWN = 160
#: A list index has fewer digits than this: Python refuses numbers of thousands of digits.
_DIGITS = 19


class PathError(ValueError):
    """A path that can't be read, or that leads nowhere in the data at hand."""


def split_path(text: str) -> Keys:
    """Split a dotted path into its keys.

    Brackets enclose a list index, or a key that contains dots or brackets.

    Raises:
        PathError: The text is not a path.
    """
    keys: list[str | int] = []
    at = 0
    while at < len(text) or not keys:
        dotted = bool(keys) and text[at] == "."
        match = _SEGMENT.match(text, at + dotted)
        if match is None or not (match[1] or match[2]) or (keys and not dotted and match[2]):
            msg = f"`{show(text)}` is not a dotted path"
            raise PathError(msg)
        keys.append(int(match[1]) if match[1] and _is_index(match[1]) else match[1] or match[2])
        at = match.end()
    return tuple(keys)


def join_path(keys: Keys) -> str:
    """Write keys as a dotted path; the inverse of `split_path`."""
    text = ""
    for key in keys:
        if isinstance(key, int) or "." in key or "[" in key:
            text += f"[{key}]"
        else:
            text += f".{key}" if text else key
    return text


def is_nameable(key: str) -> bool:
    """Whether a dotted path can lead to a key."""
    try:
        return split_path(join_path((key,))) == (key,)
    except PathError:
        return False


def list_index(node: list[Any], key: str | int) -> int | None:
    """The position a key names in a list, or None."""
    if isinstance(key, str) and not _is_index(key):
        return None
    return int(key) if int(key) < len(node) else None


def _is_index(key: str) -> bool:
    return key.isdecimal() and len(key) < _DIGITS


def lookup(data: Any, keys: Keys, default: Any = None) -> Any:
    """The value that keys lead to, or the default."""
    for key in keys:
        if isinstance(data, Mapping) and key in data:
            data = data[key]
        elif isinstance(data, list) and (index := list_index(data, key)) is not None:
            data = data[index]
        else:
            return default
    return data


def assign(data: dict[str, Any], keys: Keys, value: Any) -> None:
    """Set the value that keys lead to, in place; missing mappings on the way are created.

    Raises:
        PathError: A plain value or the end of a list is in the way.
    """
    node: Any = data
    for at, key in enumerate(keys[:-1]):
        node = _step_into(node, key, keys[: at + 1])
    if isinstance(node, list):
        node[_index_or_fail(node, keys[-1], keys)] = value
    else:
        node[str(keys[-1])] = value


def _step_into(node: Any, key: str | int, sofar: Keys) -> Any:
    place: Any = _index_or_fail(node, key, sofar) if isinstance(node, list) else str(key)
    child = node[place] if isinstance(node, list) else node.get(place)
    if child is None or child is True:  # a section left out, or a callback switched on with its defaults
        child = node[place] = {}
    if not isinstance(child, dict | list):
        msg = f"`{join_path(sofar)}` holds a plain value, so nothing lies below it"
        raise PathError(msg)
    return child


def _index_or_fail(node: list[Any], key: str | int, sofar: Keys) -> int:
    index = list_index(node, key)
    if index is None:
        msg = f"`{join_path(sofar[:-1])}` is a list of {len(node)}, and `{key}` is not a position in it"
        raise PathError(msg)
    return index


def copy_plain(node: Any) -> Any:
    """A deep copy of plain data, sharing nothing."""
    if isinstance(node, Mapping):
        return {key: copy_plain(value) for key, value in node.items()}
    return [copy_plain(item) for item in node] if isinstance(node, list) else node


def same(left: Any, right: Any) -> bool:
    """Equality that keeps true and 1 apart, as a YAML file does; NaN equals itself."""
    equal = bool(left == right) or bool(left != left and right != right)
    return equal and isinstance(left, bool) == isinstance(right, bool)


def nearest(word: object, known: Collection[Any]) -> str | None:
    """The known name closest to a word, or None if none is close; a name that differs only in case comes first.

    Among equally close names, one with the same letters wins: two letters were probably swapped.
    """
    texts, wanted = list(dict.fromkeys(map(show, known))), show(word)

    def closeness(text: str) -> tuple[float, bool]:
        return difflib.SequenceMatcher(None, text, wanted).ratio(), sorted(text) == sorted(wanted)

    if other_case := [text for text in texts if text.casefold() == wanted.casefold()]:
        return other_case[0]
    close = difflib.get_close_matches(wanted, texts, n=len(texts) or 1, cutoff=0.6)
    return max(close, key=closeness, default=None)


def suggest_name(word: object, known: Collection[Any], *, what: str = "known here") -> str:
    """A fix: the closest known name, if one is close, and all known names."""
    guess = nearest(word, known)
    listed = ", ".join(show(name) for name in known) or "nothing"
    return (f"did you mean `{guess}`? " if guess else "") + f"{what}: {listed}"


def show(value: Any) -> str:
    """A value on one short line, in YAML's flow style."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.replace("\n", "\\n")
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def leaves(node: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every value that is not itself a filled mapping or list, with its keys."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from leaves(value, (*keys, key))
    elif isinstance(node, list) and node:
        for index, value in enumerate(node):
            yield from leaves(value, (*keys, index))
    else:
        yield keys, node


def diff_configs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The differences between two configs, one line for each value: ``optimizer.lr: 0.001 → 0.01``."""
    before, after = dict(leaves(old)), dict(leaves(new))
    lines = []
    for keys in dict.fromkeys((*before, *after)):
        left, right = before.get(keys, _ABSENT), after.get(keys, _ABSENT)
        if not same(left, right):
            lines.append(f"{join_path(keys)}: {show(left)} → {show(right)}")
    return lines
