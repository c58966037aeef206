"""Turns pydantic's errors about a study file into InputErrors in plain words."""

import contextlib
import re
from typing import Any

from pydantic import BaseModel, ValidationError

from hpo.config.marks import COMMAND_LINE, Marks
from hpo.config.other_words import fix_here, precision_here
from hpo.config.paths import Keys, join_path, lookup, nearest, show, suggest_name
from hpo.config.schema import StudyFile, known_keys, model_of
from hpo.config.schema_space import CategoricalParam, FloatParam, IntParam
from hpo.config.schema_study import StudySection
from hpo.config.schema_types import TARGET, is_import_path
from hpo.config.yaml_source import COMMA, parse_value, with_point
from hpo.errors import InputError

_PARAMS: dict[Any, type[BaseModel]] = {"float": FloatParam, "int": IntParam, "categorical": CategoricalParam}
#: Sections that people may write under another name.
_CALLED = {"scheduler": "lr_scheduler"}
_ENTRY_DEPTH = 2  # search_space, then the entry's own path; pydantic puts the entry's type after these

_WORDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "is empty",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "finite_number": "must be finite",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
}

#: Keys of `study` that also accept a name alone.
_NAMED = ("sampler", "pruner", "scheduler")
#: A text that was meant as a key and its value.
_TOGETHER = re.compile(r"(\w+)(:|\s+)(\S+)")

#: The types that a quoted value may have without its quotes, by pydantic's error.
_READ_AS: dict[str, tuple[type, ...]] = {"int_type": (int,), "float_type": (int, float), "bool_type": (bool,)}


def explained(error: ValidationError, data: dict[str, Any], marks: Marks) -> list[InputError]:
    """An error for each problem; a misspelt key is not reported as missing, too."""
    items = error.errors(include_url=False)
    misspelt = {keys for item in items if item["type"] == "extra_forbidden" for keys in _meant(item)}
    told = [item for item in items if not (item["type"] == "missing" and place_of(item["loc"])[0] in misspelt)]
    return [_explain(item, data, marks) for item in told]


def _meant(item: Any) -> list[Keys]:
    """The schema's key that an unknown key is close to, if any."""
    keys, owner = place_of(item["loc"])
    guess = nearest(keys[-1], list(owner.model_fields) if owner else [])
    return [] if guess is None else [(*keys[:-1], guess)]


def _explain(item: Any, data: dict[str, Any], marks: Marks) -> InputError:
    keys, owner = place_of(item["loc"])
    kind, context = item["type"], item.get("ctx", {})
    if kind == "hpo":
        keys = (*keys, *context["keys"])
        return marks.error(context["problem"], keys, value=_written(data, keys), fix=context["fix"])
    what = "section" if len(keys) == 1 else "key"
    if kind == "missing":
        return marks.error(f"required {what} is missing", keys, fix=f"add {_example(owner, keys)}")
    if kind == "extra_forbidden":
        problem, fix = _unknown(keys, owner, item["input"], what, marks)
        return marks.error(problem, keys, value=item["input"], fix=fix)
    words = _WORDS.get(kind, item["msg"]).format(**{"expected": "", **context}).replace("'", "`")
    if owner is StudySection and keys[-1] in _NAMED and words == _WORDS["model_type"]:
        words = "must be a name, or a mapping"
    off = item["input"] is False and keys in (("study", "pruner"), ("study", "scheduler"))
    fix = f"write `{keys[-1]}: none`" if off else f"write {_example(owner, keys)}"
    if kind == "literal_error":
        fix = _chosen(keys, item["input"], re.findall(r"'([^']*)'", context["expected"]))
    if kind == "int_type" and isinstance(item["input"], float) and item["input"].is_integer():
        fix = f"write `{keys[-1]}: {int(item['input'])}`"
    if isinstance(item["input"], str):
        fix = _around(item["input"], kind, keys, fix) or fix
    if is_quoted(item["input"], kind):
        return marks.error(words, keys, value=f'"{item["input"]}"', fix="leave the quotes out")
    if kind == "float_type" and isinstance(item["input"], str) and COMMA.fullmatch(item["input"]):
        words, fix = f"{words}, and holds a comma", with_point(keys[-1], item["input"])
    return marks.error(words, keys, value=item["input"], fix=fix)


def _chosen(keys: Keys, written: Any, choices: list[str]) -> str:
    """The fix for a value that is not a choice; it may be another tool's word, or the start of a choice."""
    meant = precision_here(written) if keys == ("trainer", "precision") else written
    begun = [choice for choice in choices if choice.startswith(str(meant).casefold())]
    return suggest_name(begun[0] if len(begun) == 1 else meant, choices, what="choose from")


def _around(text: str, kind: str, keys: Keys, example: str) -> str:
    """The fix for a text in place of a mapping that has it as a value; empty if there is none."""
    if kind == "dict_type" and keys == ("metrics",):
        return listed_as_keys("metrics", [text.rpartition(".")[2]])
    if kind == "dict_type" and (keys[0] == "metrics" or (is_import_path(text) and TARGET in example)):
        return f"write `{keys[-1]}: {{_target_: {text}}}`"
    if keys == ("trainer", "weights"):
        return f"write `weights: {{path: {text}}}`"
    return as_mapping(str(keys[0]), text) if len(keys) == 1 else ""


def as_mapping(section: str, text: str) -> str:
    """The fix for a section that is a text because a key lacks its colon, or the space after it; else empty."""
    model = model_of(StudyFile.model_fields[section])
    match = _TOGETHER.match(text)
    if model is None or match is None or match[1] not in model.model_fields:
        return ""
    missing = "a space behind the colon" if match[2] == ":" else "a colon behind the key"
    return f"write {missing}: `{match[1]}: {match[3]}`"


def listed_as_keys(section: str, entries: list[Any]) -> str:
    """The fix for a section that is a list whose entries should be keys of the section; else empty."""
    if entries and all(isinstance(entry, dict) for entry in entries):
        return f"leave the dashes out: each entry is a key of `{section}`"
    value = {"callbacks": "true", "metrics": "{_target_: …}"}.get(section)
    if value is None or not entries or not all(isinstance(entry, str) for entry in entries):
        return ""
    return f"write `{section}: {{{', '.join(f'{entry}: {value}' for entry in entries)}}}`"


def is_quoted(value: Any, kind: str) -> bool:
    """Whether a text without its quotes would be the number, or the true or false, that is wanted."""
    if not isinstance(value, str) or kind not in _READ_AS:
        return False
    if kind == "bool_type" and value.casefold() not in ("true", "false"):
        return False  # such as "yes", which is text for other readers of YAML
    with contextlib.suppress(InputError):
        return type(parse_value(value)) in _READ_AS[kind]
    return False


def _unknown(keys: Keys, owner: type[BaseModel] | None, value: Any, what: str, marks: Marks) -> tuple[str, str]:
    """The problem with a key that the schema does not have there, and its fix."""
    name, known = str(keys[-1]), list(owner.model_fields) if owner else []
    if len(keys) == 1 and name in _CALLED:
        problem = f"unknown section: the learning rate's schedule is called `{_CALLED[name]}`"
        return problem, f"write `{_CALLED[name]}:` in place of `{name}:`"
    if fix := fix_here(keys):
        return f"unknown {what}", fix
    elsewhere = {} if keys[0] == "search_space" else _by_name()
    if name in elsewhere and not ((near := nearest(name, known)) and name in near):
        sections = " or ".join(f"`{join_path(place[:-1])}`" for place in elsewhere[name] if place[:-1])
        problem = f"belongs in {sections}" if sections else f"is a section of its own, beside `{keys[0]}`"
        written = _override if marks.locate(keys)[0] == COMMAND_LINE else _line
        return problem, "write " + " or ".join(f"`{written(place, value)}`" for place in elsewhere[name])
    fix = suggest_name(name, known, what=f"the {what}s here are")
    if nearest(name, known) is None and (guess := nearest(name, elsewhere)):
        fix = f"did you mean `{join_path(elsewhere[guess][0])}`? {fix}"
    return f"unknown {what}", fix


def _by_name() -> dict[str, list[Keys]]:
    """The places of the schema's keys, by the last part of their paths."""
    found: dict[str, list[Keys]] = {}
    for keys in known_keys():
        found.setdefault(str(keys[-1]), []).append(keys)
    return found


def _override(keys: Keys, value: Any) -> str:
    return f"{join_path(keys)}={show(value)}"


def _line(keys: Keys, value: Any) -> str:
    """A value with its keys on one line, as in a file; a mapping or list is shown as an ellipsis."""
    node = "…" if isinstance(value, dict | list) else show(value)
    for key in reversed(keys[1:]):
        node = f"{{{key}: {node}}}"
    return f"{keys[0]}: {node}"


def place_of(loc: tuple[str | int, ...]) -> tuple[Keys, type[BaseModel] | None]:
    """The keys that a pydantic error is about, and the model that has the last of them as a field."""
    if loc and loc[0] == "search_space" and len(loc) > _ENTRY_DEPTH and loc[_ENTRY_DEPTH] in _PARAMS:
        keys = (*loc[:_ENTRY_DEPTH], *loc[_ENTRY_DEPTH + 1 :])
        return keys, _PARAMS[loc[_ENTRY_DEPTH]]
    owner: type[BaseModel] = StudyFile
    for key in loc[:-1]:
        field = owner.model_fields.get(str(key))
        inner = None if field is None else model_of(field)
        if inner is None:
            return loc, None
        owner = inner
    return loc, owner


def _written(data: dict[str, Any], keys: Keys) -> str:
    value = lookup(data, keys, "")
    return "" if value is None else show(value)


def _example(owner: type[BaseModel] | None, keys: Keys) -> str:
    field = owner.model_fields.get(str(keys[-1])) if owner else None
    if field is None or not field.examples:
        return f"`{keys[0]}: …`" if len(keys) == 1 else f"a value that fits `{join_path(keys)}`"
    example = field.examples[0]
    if isinstance(example, dict):
        return f"`{keys[-1]}: {_flow(example)}`"
    return f"for example `{keys[-1]}: {show(example)}`"


def _flow(example: Any) -> str:
    if isinstance(example, dict):
        return "{" + ", ".join(f"{key}: {_flow(value)}" for key, value in example.items()) + "}"
    return show(example)
