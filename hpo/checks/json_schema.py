"""The JSON Schema of study.yaml, for editors: what pydantic knows of it, and what pydantic can't know.

Pydantic sees a study file after its interpolations are resolved; an editor sees the text. So wherever a number, a
switch or one of a few words is wanted, ``${trainer.max_epochs}`` is right as well. Names of samplers, pruners,
schedulers and callbacks, with the callbacks' arguments, come from the code that offers them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, Final

from hpo.config.schema import OF_THE_TRAINER, REQUIRED
from hpo.config.schema_study import AUTO
from hpo.config.spec import json_schema
from hpo.config.targets import TARGET
from hpo.search.hub import PREFIX
from hpo.search.pruners import PRUNERS
from hpo.search.samplers import SAMPLERS
from hpo.search.schedulers.by_name import SCHEDULERS
from hpo.trial.callbacks import CALLBACKS

_INTERPOLATION: Final = "Interpolation"
_REFERENCE: Final = {"$ref": f"#/$defs/{_INTERPOLATION}"}
#: Types whose values are no text, or only some texts.
_NARROW: Final = frozenset({"integer", "number", "boolean"})
#: Keys of a schema that say something about a value, rather than which values there are.
_ABOUT: Final = ("title", "description", "default", "examples")
_ARGUMENT: Final = re.compile(r"^(\w+):\s*(.*)$")


def study_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a study file as a person writes it."""
    schema = json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    study = definitions["StudySection"]["properties"]
    study["sampler"] = _named(study["sampler"], SAMPLERS, AUTO)
    study["pruner"] = _named(study["pruner"], PRUNERS)
    study["scheduler"] = _scheduler(study["scheduler"])
    schema["properties"]["callbacks"] = _callbacks(schema["properties"]["callbacks"])
    for node in (schema, *definitions.values()):
        for name, value in node.get("properties", {}).items():
            node["properties"][name] = _open(value)
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
    """The schema, with an interpolation wherever a narrow scalar is wanted; descriptions stay outside."""
    if "const" in node:  # the `type` by which an entry of the search space is described from others
        return node
    if "items" in node:
        return {**node, "items": _open(node["items"])}
    if not _is_narrow(node):
        return node
    described = {key: value for key, value in node.items() if key in _ABOUT}
    values = {key: value for key, value in node.items() if key not in _ABOUT}
    variants = values["anyOf"] if set(values) == {"anyOf"} else [values]
    return {**described, "anyOf": [*variants, _REFERENCE]}


def _is_narrow(node: Mapping[str, Any]) -> bool:
    kinds = node.get("type", [])
    narrow = "enum" in node or bool(_NARROW & set([kinds] if isinstance(kinds, str) else kinds))
    return narrow or any(_is_narrow(variant) for variant in node.get("anyOf", ()))


def _named(node: Mapping[str, Any], known: Mapping[str, type], *more: str) -> dict[str, Any]:
    """A sampler or a pruner: its name alone, or a mapping with its arguments; the names are offered."""
    names = [*more, *known, *(kind.__name__ for kind in known.values())]
    name = {
        "anyOf": [{"enum": names}, {"type": "string", "pattern": f"^{PREFIX}"}, _REFERENCE],
        "description": "A short name, or the name of Optuna's class; or `optunahub:` and a package.",
    }
    return _name_or_mapping(node, name)


def _scheduler(node: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a scheduler."""
    name = {"anyOf": [{"enum": [*SCHEDULERS]}, _REFERENCE], "description": "Its name."}
    return _name_or_mapping(node, name)


def _name_or_mapping(node: Mapping[str, Any], name: Mapping[str, Any]) -> dict[str, Any]:
    mapping = {"type": "object", "properties": {"name": name}}
    described = {key: value for key, value in node.items() if key in _ABOUT}
    return {**described, "anyOf": [name, {"type": "null"}, mapping]}


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
        if type(default) is bool:  # a number's default may be whole where any number is right
            argument |= {"anyOf": [{"type": "boolean"}, _REFERENCE]}
        found[name] = argument
    return found


def _summary(kind: type) -> str:
    return (inspect.getdoc(kind) or kind.__name__).partition("\n")[0].replace("``", "`")


def _argument_texts(kind: type) -> dict[str, str]:
    """What the docstring's section ``Args`` says of each argument."""
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
