"""Builds the JSON Schema of study.yaml for editors, from pydantic's schema and what pydantic can't know.

Pydantic sees a study file after its interpolations are resolved; an editor sees the text. So the schema also
accepts an interpolation, such as ``${trainer.max_epochs}``, in place of a number, a switch or one of a few words.
The names of samplers, pruners, schedulers and callbacks, and the callbacks' arguments, come from their code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, Final

from hpo.config.schema import OF_THE_TRAINER, REQUIRED, StudyFile
from hpo.config.schema_study import AUTO, NO_SCHEDULER, SamplerSection
from hpo.config.targets import TARGET
from hpo.search.hub import PREFIX
from hpo.search.pruners import PRUNERS
from hpo.search.samplers import SAMPLERS
from hpo.search.schedulers.by_name import SCHEDULERS
from hpo.trial.callbacks import CALLBACKS

_INTERPOLATION: Final = "Interpolation"
_REFERENCE: Final = {"$ref": f"#/$defs/{_INTERPOLATION}"}
#: Types that don't accept a text.
_NARROW: Final = frozenset({"integer", "number", "boolean"})
#: Keys of a schema that describe a value without restricting it.
_ABOUT: Final = ("title", "description", "default", "examples")
#: Sections that may be empty: all of their keys have defaults.
_OR_NOTHING: Final = ("RunSection", "ResourcesSection", "LoaderSection", "TrainerSection")
_ARGUMENT: Final = re.compile(r"^(\w+):\s*(.*)$")


def study_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a study file as a person writes it."""
    schema = _inside(StudyFile.model_json_schema())
    definitions: dict[str, Any] = {name: _inside(node) for name, node in schema["$defs"].items()}
    schema["$defs"] = definitions
    study, sections = definitions["StudySection"]["properties"], schema["properties"]
    study["sampler"] = _named(study["sampler"], SAMPLERS, AUTO)
    study["pruner"] = _named(study["pruner"], PRUNERS)
    study["scheduler"] = _scheduler(study["scheduler"])
    sections["callbacks"] = _callbacks(sections["callbacks"])
    for name in _OR_NOTHING:
        definitions[name]["type"] = ["object", "null"]
    for name in ("metrics", "callbacks", "search_space"):
        sections[name]["type"] = ["object", "null"]
    for node in (sections["where"], study["n_trials"]):  # null: as many trials as `epochs` allows
        node["anyOf"] = [*node["anyOf"], {"type": "null"}]
    definitions[_INTERPOLATION] = {
        "type": "string",
        "pattern": r"\$\{[^}]+\}",
        "description": "The value of another key, such as ${trainer.max_epochs}.",
    }
    schema["anyOf"] = [
        {"required": ["objective"], "not": {"anyOf": [{"required": [name]} for name in OF_THE_TRAINER]}},
        {"required": [*REQUIRED, "loss"]},
        {"required": [*REQUIRED, "step"]},
    ]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Study file of hpo"}
    return head | {key: value for key, value in schema.items() if key != "title"}


def _open(node: dict[str, Any]) -> dict[str, Any]:
    """The schema, which also accepts an interpolation in place of a narrow scalar; descriptions stay outside."""
    if "const" in node:  # the `type` that distinguishes entries of the search space
        return node
    node = _inside(node)
    if not _is_narrow(node):
        return node
    described = {key: value for key, value in node.items() if key in _ABOUT}
    values = {key: value for key, value in node.items() if key not in _ABOUT}
    variants = values["anyOf"] if set(values) == {"anyOf"} else [values]
    return {**described, "anyOf": [*variants, _REFERENCE]}


def _inside(node: dict[str, Any]) -> dict[str, Any]:
    """The schema of a mapping or list, with `_open` applied to its parts."""
    changed: dict[str, Any] = {}
    if "properties" in node:
        changed["properties"] = {name: _open(value) for name, value in node["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            changed[key] = _open(node[key])
    if "anyOf" in node:
        changed["anyOf"] = [_inside(each) for each in node["anyOf"]]
    return {**node, **changed}


def _is_narrow(node: Mapping[str, Any]) -> bool:
    kinds = node.get("type", [])
    narrow = "enum" in node or bool(_NARROW & set([kinds] if isinstance(kinds, str) else kinds))
    return narrow or any(_is_narrow(variant) for variant in node.get("anyOf", ()))


def _named(node: Mapping[str, Any], known: Mapping[str, type], *more: str) -> dict[str, Any]:
    """The schema of a sampler or pruner: its name, which editors complete, or a mapping with its arguments."""
    names = [*more, *known, *(kind.__name__ for kind in known.values())]
    others = f"^{PREFIX}|^({'|'.join(map(_any_case, known))})$"
    name = {
        "anyOf": [{"enum": names}, {"type": "string", "pattern": others}, _REFERENCE],
        "description": "A short name, or the name of Optuna's class; or `optunahub:` and a package.",
    }
    beside = SamplerSection.model_json_schema()["properties"] if known is SAMPLERS else {}
    return _name_or_mapping(node, {**beside, "name": name})


def _any_case(name: str) -> str:
    """A pattern for a name in lower case, upper case or both."""
    return "".join(f"[{each}{each.upper()}]" if each.isalpha() else each for each in name)


def _scheduler(node: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a scheduler, which has no default name."""
    name = {"anyOf": [{"enum": [*SCHEDULERS, NO_SCHEDULER]}, _REFERENCE], "description": "Its name."}
    return _name_or_mapping(node, {"name": name}, "name")


def _name_or_mapping(node: Mapping[str, Any], properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    opened = {key: value if key == "name" else _open(value) for key, value in properties.items()}
    mapping = {"type": "object", "properties": opened, "required": [*required]}
    described = {key: value for key, value in node.items() if key in _ABOUT}
    return {**described, "anyOf": [properties["name"], {"type": "null"}, mapping]}


def _callbacks(node: Mapping[str, Any]) -> dict[str, Any]:
    """The built-in callbacks by name, each with its arguments; any other name needs a ``_target_``."""
    own = {"type": "object", "properties": {TARGET: {"type": "string"}}, "required": [TARGET]}
    properties = {}
    for name, row in CALLBACKS.items():
        arguments = _arguments(row.kind, inspect.signature(row.offered))
        properties[name] = {
            "description": _summary(row.kind),
            "anyOf": [
                {"type": "object", "properties": arguments, "additionalProperties": False},
                {"type": ["boolean", "null"]},
                own,
                _REFERENCE,
            ],
        }
    described = {key: value for key, value in node.items() if key in _ABOUT}
    return {**described, "type": "object", "properties": properties, "additionalProperties": own}


def _arguments(kind: type, signature: inspect.Signature) -> dict[str, Any]:
    texts = _argument_texts(kind)
    found = {}
    for name, parameter in signature.parameters.items():
        argument: dict[str, Any] = {"description": texts[name]} if name in texts else {}
        default = parameter.default
        if default is not parameter.empty and isinstance(default, bool | int | float | str | None):
            argument["default"] = default
        if type(default) is bool:  # not for numbers: an integer default does not exclude fractions
            argument |= {"anyOf": [{"type": "boolean"}, _REFERENCE]}
        found[name] = argument
    return found


def _summary(kind: type) -> str:
    return (inspect.getdoc(kind) or kind.__name__).partition("\n")[0].replace("``", "`")


def _argument_texts(kind: type) -> dict[str, str]:
    """The texts of a docstring's ``Args`` section, by argument."""
    _, _, rest = (inspect.getdoc(kind) or "").partition("\nArgs:\n")
    texts: dict[str, str] = {}
    name = ""
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        match = _ARGUMENT.match(line[4:])
        if match is not None and not line.startswith(" " * 5):
            name, texts[match[1]] = match[1], match[2]
        elif name and line.strip():
            texts[name] += " " + line.strip()
    return {name: text.replace("``", "`") for name, text in texts.items()}
