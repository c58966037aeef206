"""What mkdocs does beside its own work: parts of the reference are made from the code when the site is built.

A page names such a part in a line of its own, ``{{ commands }}``; the parts are the keys of ``PARTS``. Links to
files of the repository outside of ``docs/`` become plain text, since a site has no such files.
"""

from __future__ import annotations

import html
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Where mkdocs is called without the package installed, and for its own import of this file.
sys.path.insert(0, str(ROOT))

import hpo  # noqa: E402
import trainer  # noqa: E402
from hpo.checks.json_schema import study_schema  # noqa: E402
from hpo.config.schema import StudyFile, model_of  # noqa: E402
from hpo.config.schema_types import MAY_CHANGE  # noqa: E402
from hpo.search.pruners import PRUNERS  # noqa: E402
from hpo.search.samplers import SAMPLERS  # noqa: E402
from hpo.trial.callbacks import CALLBACKS  # noqa: E402

_PLACE = re.compile(r"^\{\{ ([a-z ]+) \}\}$", re.MULTILINE)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)\)")
#: Kinds of numbers, as the command line shows them.
_VALUES = {"<int range>": "N", "<float range>": "X", "<int>": "N", "<float>": "X"}
#: Arguments whose values no YAML file can hold.
_NOT_YAML = re.compile("Callable|Crossover|Mutation|FrozenTrial|ndarray")
_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    """Fill in the parts that are made from the code, and unlink files that are not part of the site."""
    folder = Path(page.file.src_uri).parent

    def unlinked(match: re.Match[str]) -> str:
        target = (Path(config.docs_dir) / folder / match[2]).resolve()
        if target.is_relative_to(config.docs_dir):
            return match[0]
        if not target.exists():
            raise ValueError(f"{page.file.src_uri}: no such file: {match[2]}")
        return match[1]

    return _PLACE.sub(lambda match: PARTS[match[1]](), _OUTSIDE.sub(unlinked, markdown))


# ---- the command line


def commands() -> str:
    """Every command with its help, arguments and options, as typer has them."""
    from typer.main import get_command

    from hpo.cli.app import app

    group: Any = get_command(app)
    return "\n".join(_command(name, command) for name, command in group.commands.items())


def _command(name: str, command: Any) -> str:
    told, _, example = inspect.cleandoc(command.help or "").partition("Example:")
    taken = [each.metavar or each.name.upper() for each in command.params if each.param_type_name == "argument"]
    usage = " ".join(["hpo", name, *taken, "[OPTIONS]"])
    lines = [f"## hpo {name}", "", "```text", usage, "```", "", _escaped(told.strip()), ""]
    if example:
        lines += ["Example:", "", "```text", *(line.strip() for line in example.strip().splitlines()), "```", ""]
    context = command.make_context(name, [], resilient_parsing=True)
    rows = [row for parameter in command.params for row in _parameter(parameter, context)]
    return "\n".join([*lines, _table(("argument or option", "what it is", "default"), rows), ""])


def _parameter(parameter: Any, context: Any) -> Iterator[tuple[str, str, str]]:
    if parameter.hidden:
        return
    is_flag = getattr(parameter, "is_flag", False)
    value = parameter.metavar or _VALUES.get(parameter.display_type(context), parameter.display_type(context))
    option = ", ".join([*parameter.opts, *parameter.secondary_opts]) + ("" if is_flag else f" {value}")
    shown = value if parameter.param_type_name == "argument" else option
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    given = "" if is_flag or default is None else str(getattr(default, "value", default))
    variable = f" Variable: `{parameter.envvar}`." if parameter.envvar else ""
    yield f"<code>{html.escape(shown)}</code>", _escaped(parameter.help or "") + variable, given


# ---- the study file


def study_file() -> str:
    """Every section of a study file with its keys, from the JSON Schema that editors use."""
    schema = study_schema()
    definitions = schema["$defs"]
    parts = []
    for name, node in schema["properties"].items():
        needed = " (required)" if name in schema.get("required", ()) else ""
        parts += [f"## {name}{needed}", ""]
        kind = node.get("$ref", "").rpartition("/")[2]
        if kind in definitions:
            known = definitions[kind]
            parts += [_escaped(known.get("description", "")), "", _keys(known, changeable(name)), ""]
            continue
        parts += [_free(name, node), ""]
        if name == "search_space":
            parts += [_entries(definitions), ""]
    return "\n".join(parts)


def _free(name: str, node: Mapping[str, Any]) -> str:
    told = [_escaped(node["description"])] if node.get("description") else []
    if name == "callbacks":
        told.append("A name of the [list](callbacks.md) with its arguments, or a name of yours with a `_target_`.")
    told += ["```yaml", *(f"{name}: {json.dumps(example)}" for example in node.get("examples", ())), "```"]
    return "\n\n".join(told[:-3]) + "\n\n" + "\n".join(told[-3:])


def changeable(section: str) -> set[str]:
    """The keys of a section that may change once a study has started."""
    model = model_of(StudyFile.model_fields[section])
    return {name for name, field in model.model_fields.items() if MAY_CHANGE in field.metadata} if model else set()


def _keys(definition: Mapping[str, Any], may_change: Collection[str] = ()) -> str:
    needed = definition.get("required", ())
    rows = []
    for key, node in definition["properties"].items():
        default = "required" if key in needed else _shown(node.get("default"))
        example = ", ".join(f"`{json.dumps(each)}`" for each in node.get("examples", ()))
        told = node.get("description", "") + (" May change in a started study." if key in may_change else "")
        rows.append((f"`{key}`", _kind(node), default, _escaped(told), example))
    return _table(("key", "type", "default", "what it is", "example"), rows)


def _entries(definitions: Mapping[str, Any]) -> str:
    parts = []
    for name in ("FloatParam", "IntParam", "CategoricalParam"):
        definition = definitions[name]
        kind = definition["properties"]["type"]["const"]
        parts += [f"### type: {kind}", "", _escaped(definition.get("description", "")), "", _keys(definition), ""]
    return "\n".join(parts)


def _kind(node: Mapping[str, Any]) -> str:
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return ", ".join(f"`{each}`" for each in node["enum"])
    if "anyOf" in node:
        if any("/" in each.get("pattern", "") for way in node["anyOf"] for each in way.get("anyOf", ())):
            return "name, or mapping with a `name`"  # samplers and pruners, which have a page
        kinds = [_kind(each) for each in node["anyOf"] if "$ref" not in each and each != {"type": "null"}]
        return " or ".join(dict.fromkeys(filter(None, kinds)))
    kind = node.get("type", "")
    names = {"object": "mapping", "integer": "whole number", "string": "text", "boolean": "true or false"}
    if isinstance(kind, list):
        return " or ".join(names.get(each, each) for each in kind if each != "null")
    return "list" if kind == "array" else names.get(kind, kind)


def _shown(default: Any) -> str:
    if isinstance(default, dict):
        return f"`{default['name']}`" if "name" in default else ""
    return "" if default is None else f"`{json.dumps(default)}`"


# ---- samplers, pruners, callbacks


def samplers() -> str:
    """Samplers by name, with the arguments that a study file may give them."""
    taken = {"grid": ("search_space",), "brute_force": ("avoid_premature_stop",)}
    return _classes(SAMPLERS, lambda name: ("seed", *taken.get(name, ())))


def pruners() -> str:
    """Pruners by name, with their arguments."""
    return _classes(PRUNERS, lambda name: ())  # noqa: ARG005


def _classes(known: Mapping[str, type], taken: Callable[[str], tuple[str, ...]]) -> str:
    rows = []
    for name, kind in known.items():
        parameters = inspect.signature(kind).parameters.values()
        free = [
            each
            for each in parameters
            if each.kind not in _STARRED
            and each.name not in taken(name)
            and not _NOT_YAML.search(str(each.annotation))
        ]
        arguments = ", ".join(f"`{each.name}`" for each in free) or "none"
        rows.append((f"`{name}`", f"`{kind.__name__}`", _summary(kind), arguments))
    return _table(("name", "class", "what it does", "arguments beside the name"), rows)


def callbacks() -> str:
    """Callbacks by name, with the arguments that a study file may give them."""
    described = study_schema()["properties"]["callbacks"]["properties"]
    parts = []
    for name, row in CALLBACKS.items():
        signature = inspect.signature(row.offered)
        arguments = described[name]["anyOf"][0]["properties"]
        rows = [
            (f"`{each}`", _default(signature.parameters[each]), _escaped(node.get("description", "")))
            for each, node in arguments.items()
        ]
        always = " Always on." if row.required else " On unless it is `false`." if row.default else ""
        told = f"`{row.kind.__name__}`: {_escaped(described[name]['description'])}{always}"
        listed = _table(("argument", "default", "what it is"), rows) if rows else "No arguments."
        parts += [f"### {name}", "", told, "", listed, ""]
    return "\n".join(parts)


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return "required"
    return "" if parameter.default is None else f"`{parameter.default!r}`"


def _summary(kind: type) -> str:
    first = (inspect.getdoc(kind) or "").partition("\n\n")[0]
    text = re.sub(r"`([^`<]+) <[^`>]+>`__", r"\1", " ".join(first.split()))
    return _escaped(re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text))


# ---- Python


def names(package: Any) -> str:
    """What a package offers, functions first, for mkdocstrings to describe."""
    offered = sorted(package.__all__, key=lambda name: isinstance(getattr(package, name), type))
    return "\n\n".join(f"::: {getattr(package, name).__module__}.{name}" for name in offered)


# ---- events


def events() -> str:
    """The events of `hpo run --json`, from the docstring of the module that writes them."""
    from hpo.console import events as module

    text = inspect.cleandoc(module.__doc__ or "")
    before, rows, after = re.split(r"^=+ +=+$\n?", text, flags=re.MULTILINE)
    listed: list[list[str]] = []
    for line in rows.splitlines():
        name, told = line[:19].strip(), line[19:].strip()
        if name:
            listed.append([name, told])
        else:
            listed[-1][1] += f" {told}"
    table = _table(("event", "entries"), [(name, told) for name, told in listed])
    return f"{before.partition(chr(10))[2].strip()}\n\n{table}\n\n{after.strip()}".replace("``", "`")


# ---- Markdown


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "&#124;") for cell in line) + " |" for line in lines)


def _escaped(text: str) -> str:
    """Text of a docstring as Markdown: its ``code`` in single backticks, and no tags between."""
    pieces = text.replace("``", "`").split("`")
    pieces[::2] = [piece.replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces)


PARTS: Mapping[str, Callable[[], str]] = {
    "commands": commands,
    "study file": study_file,
    "samplers": samplers,
    "pruners": pruners,
    "callbacks": callbacks,
    "events": events,
    "names of hpo": lambda: names(hpo),
    "names of trainer": lambda: names(trainer),
}
