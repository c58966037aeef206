"""Applies overrides of the command line, and decides which dotted paths can be set in a config."""

from collections.abc import Mapping
from typing import Any

from hpo.config.marks import COMMAND_LINE, Marks
from hpo.config.other_words import fix_here
from hpo.config.paths import (
    MAX_KEY,
    Keys,
    PathError,
    assign,
    join_path,
    list_index,
    lookup,
    nearest,
    show,
    split_path,
    suggest_name,
)
from hpo.config.schema import FREE_SECTIONS, StudyFile, known_keys
from hpo.config.schema_types import TARGET
from hpo.config.yaml_loader import MAX_DEPTH
from hpo.config.yaml_source import parse_given, storable
from hpo.errors import InputError

#: Hydra's signs before a key, which add or remove it.
_SIGNS = ("+", "~")
#: Sections for which pydantic has better error texts.
_SAYS_MORE = ("study", "run", "search_space", "where")


def path_problem(config: Mapping[str, Any], keys: Keys) -> tuple[str, str] | None:
    """Why a dotted path can't be set in a config, as (problem, fix), or None.

    An argument that the config does not have passes here: only its target's signature can decide about it.
    """
    node: Any = config
    for depth, key in enumerate(keys):
        if depth == 0 and key not in node and key in StudyFile.model_fields:
            return None
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and (index := list_index(node, key)) is not None:
            node = node[index]
        elif node is None or node is True or (isinstance(node, dict) and _is_open(node, keys[:depth])):
            return None
        else:
            return _dead_end(node, keys, depth)
    return None


def list_problem(config: Mapping[str, Any], keys: Keys) -> tuple[str, str] | None:
    """Why a position in a list that the config does not have can't be set, as (problem, fix), or None.

    Setting it would create a mapping there, which no target accepts as a list.
    """
    for depth, key in enumerate(keys):
        above = keys[:depth]
        named = depth < 2 or keys[0] in _SAYS_MORE or above == ("optimizer", "groups")  # keys may be named `0`
        if not named and str(key).isdecimal() and lookup(config, above) is None:
            problem = f"names nothing: the config holds nothing at `{join_path(above)}`"
            return problem, f"write the whole of `{join_path(above)}`, of which this is a part"
    return None


def _is_open(node: dict[str, Any], keys: Keys) -> bool:
    """Whether a mapping may get new keys."""
    if not keys:
        return False
    if keys[0] in _SAYS_MORE:
        return True
    named = keys[0] in {"metrics", "callbacks"} and len(keys) == 1
    callback = keys[0] == "callbacks" and len(keys) == 2
    return named or callback or TARGET in node or (len(keys) == 1 and keys[0] in FREE_SECTIONS)


def _dead_end(node: Any, keys: Keys, depth: int) -> tuple[str, str]:
    above = join_path(keys[:depth])
    if isinstance(node, dict):
        known = [join_path((*keys[:depth], key)) for key in node] if depth else list(StudyFile.model_fields)
        fix = suggest_name(join_path(keys[: depth + 1]), known, what="here are")
        elsewhere = [
            join_path(place) for place in known_keys() if place[-1] == keys[-1] and depth == len(keys) - 1
        ]
        if ours := fix_here(keys):
            fix = ours
        elif elsewhere and keys[0] not in FREE_SECTIONS and not _is_within(str(keys[-1]), node):
            fix = f"write `{'` or `'.join(elsewhere)}`"
        return "names nothing in the config", fix
    if isinstance(node, list):
        return f"names nothing: `{above}` is a list of {len(node)}", "write a position from 0, as in `[0]`"
    return f"names nothing: `{above}` holds a plain value", f"end the path at `{above}`"


def _is_within(name: str, node: dict[str, Any]) -> bool:
    """Whether the closest key of a mapping contains this name, so that it is meant rather than a key elsewhere."""
    near = nearest(name, list(node))
    return near is not None and name in near


def apply_override(raw: dict[str, Any], marks: Marks, text: str) -> tuple[dict[str, Any], Marks]:
    """Apply one ``key=value`` to a raw config, in place, and mark its keys as overridden.

    Raises:
        InputError: The text is not an override, or its path leads nowhere.
    """
    try:
        text = storable(text)
    except ValueError as error:
        fix = "give it as UTF-8 text"
        raise InputError(str(error), file=COMMAND_LINE, value=ascii(text), fix=fix) from error
    path, equals, value_text = text.partition("=")
    path = path.strip()
    if path.startswith(_SIGNS):
        problem = "begins with a sign, as in Hydra: here a key is set in one way, whether it is there or not"
        raise InputError(problem, file=COMMAND_LINE, path=path, fix=_without_sign(path, equals + value_text))
    if not equals:
        fix = "write it as `key=value`, for example `trainer.max_epochs=5`"
        raise InputError("is not an override", file=COMMAND_LINE, path=path, fix=fix)
    try:
        keys = split_path(path)
    except PathError as error:
        fix = "write for example `optimizer.lr=0.01` or `search_space[optimizer.lr].high=0.01`"
        raise InputError(str(error), file=COMMAND_LINE, value=show(text), fix=fix) from error
    if any(isinstance(key, str) and len(key) > MAX_KEY for key in keys) or len(keys) > MAX_DEPTH:
        problem = f"a path has at most {MAX_DEPTH} keys of at most {MAX_KEY} characters"
        raise InputError(problem, file=COMMAND_LINE, value=show(text), fix="write a shorter one")
    _check_override(raw, keys, text)
    try:
        value = parse_given(value_text)
        assign(raw, keys, value)
    except PathError as error:
        raise InputError(str(error), file=COMMAND_LINE, path=path, value=show(text)) from error
    except InputError as error:
        raise InputError(
            error.problem, file=COMMAND_LINE, path=path, value=show(value_text), fix=error.fix
        ) from error
    return raw, marks.override(keys, value)


def _without_sign(path: str, value: str) -> str:
    """What to write in place of ``+key=value``, ``++key=value``, ``~key`` or ``~key=value``."""
    key = path.lstrip("".join(_SIGNS))
    if path.startswith("+"):
        return f"leave the `{path.removesuffix(key)}` out: `{key}{value or '=…'}`"
    section, _, rest = key.partition(".")
    if not rest:
        return f"write `{key}=null`"
    if section == "callbacks" and "." not in rest:
        return f"write `{key}=false`"
    return f"remove `{key}` in the study file, or give it another value here"


def _check_override(raw: dict[str, Any], keys: Keys, text: str) -> None:
    found = path_problem(raw, keys) or list_problem(raw, keys)
    entries = raw.get("search_space")
    if keys[0] == "search_space" and len(keys) > 1 and isinstance(entries, dict) and keys[1] not in entries:
        rest = join_path(keys[1:])
        inside = next((name for name in entries if rest == name or rest.startswith(f"{name}.")), None)
        if inside is not None:
            fix = f"write search_space[{inside}]{rest.removeprefix(inside)}"
            found = ("an entry's path goes in brackets", fix)
        elif len(keys) > 2:
            found = ("names nothing: no such entry", suggest_name(keys[1], list(entries), what="the entries are"))
    if found:
        raise InputError(found[0], file=COMMAND_LINE, path=join_path(keys), value=show(text), fix=found[1])
