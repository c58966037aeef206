"""Writes the parts of the reference that are made from the code: ``make reference``.

A page in ``docs/reference/`` marks such a part by two comments, ``<!-- made by `make reference`: commands -->``
and ``<!-- end -->``; what stands between them is replaced. The parts are the keys of ``PARTS``. The pages are
committed; tests/unit/test_docs.py fails where one is out of date.
"""

from __future__ import annotations

import functools
import html
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import griffe

import hpo
import trainer
from hpo.checks.json_schema import study_schema
from hpo.config.schema import REQUIRED, StudyFile, model_of
from hpo.config.schema_types import MAY_CHANGE
from hpo.search.pruners import PRUNERS
from hpo.search.samplers import SAMPLERS, TAKEN
from hpo.search.schedulers.by_name import SCHEDULERS
from hpo.trial.callbacks import CALLBACKS

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"
_PART = re.compile(
    r"^(<!-- made by `make reference`: ([a-z ]+) -->\n).*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL
)
#: Kinds of numbers, as the command line shows them.
_VALUES = {"<int range>": "N", "<float range>": "X", "<int>": "N", "<float>": "X", "<str>": "TEXT"}
#: Arguments whose values no YAML file can hold.
_NOT_YAML = re.compile("Callable|Crossover|Mutation|FrozenTrial|ndarray")
_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def pages() -> dict[Path, str]:
    """Each page of the reference that has a part made from the code, with its text as it should be."""
    texts = {path: path.read_text() for path in sorted(PAGES.glob("*.md"))}
    return {path: _PART.sub(_filled, text) for path, text in texts.items() if _PART.search(text)}


def _filled(match: re.Match[str]) -> str:
    return f"{match[1]}\n{PARTS[match[2]]().strip()}\n\n{match[3]}"


# ---- the command line


def commands() -> str:
    """Every command with its help, arguments and options, as typer has them."""
    from typer.main import get_command

    from hpo.cli.app import app

    group: Any = get_command(app)
    return "\n".join(_command(name, command) for name, command in group.commands.items())


def _command(name: str, command: Any) -> str:
    text, _, example = inspect.cleandoc(command.help or "").partition("Example:")
    taken = [each.metavar or each.name.upper() for each in command.params if each.param_type_name == "argument"]
    usage = " ".join(["hpo", name, *taken, "[OPTIONS]"])
    lines = [f"## hpo {name}", "", "```text", usage, "```", "", _escaped(text.strip()), ""]
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
        needed = " (required without objective)" if name in REQUIRED else needed
        parts += [f"## {name}{needed}", ""]
        kind = node.get("$ref", "").rpartition("/")[2]
        if kind in definitions:
            known = definitions[kind]
            parts += [_escaped(known.get("description", "")), "", _keys(known, definitions, changeable(name)), ""]
            continue
        parts += [_free(name, node), ""]
        if name == "search_space":
            parts += [_entries(definitions), ""]
    return "\n".join(parts)


def _free(name: str, node: Mapping[str, Any]) -> str:
    lines = [_escaped(node["description"])] if node.get("description") else []
    if name == "callbacks":
        lines.append(
            "A name of the [list](callbacks.md) with its arguments, or a name of yours with a `_target_`."
        )
    lines += ["```yaml", *(f"{name}: {json.dumps(example)}" for example in node.get("examples", ())), "```"]
    return "\n\n".join(lines[:-3]) + "\n\n" + "\n".join(lines[-3:])


def changeable(section: str) -> set[str]:
    """The keys of a section that may change once a study has started."""
    model = model_of(StudyFile.model_fields[section])
    return {name for name, field in model.model_fields.items() if MAY_CHANGE in field.metadata} if model else set()


def _keys(definition: Mapping[str, Any], definitions: Mapping[str, Any], may_change: Collection[str] = ()) -> str:
    needed = definition.get("required", ())
    rows = []
    for key, node in _nested(definition["properties"], definitions):
        default = "required" if key in needed else _shown(node.get("default"))
        example = ", ".join(f"`{json.dumps(each)}`" for each in node.get("examples", ()))
        text = node.get("description", "")
        if key.partition(".")[0] in may_change:
            text += " May change in a started study."
        rows.append((f"`{key}`", _kind(node), default, _escaped(text), example))
    return _table(("key", "type", "default", "what it is", "example"), rows)


def _nested(
    properties: Mapping[str, Any], definitions: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The keys of a section; in place of one that says nothing of itself, those of the section that it is."""
    for key, node in properties.items():
        inner = definitions.get(node.get("$ref", "").rpartition("/")[2], {})
        if "description" in node or "properties" not in inner:
            yield key, node
        else:
            yield from ((f"{key}.{name}", each) for name, each in inner["properties"].items())


def _entries(definitions: Mapping[str, Any]) -> str:
    parts = []
    for name in ("FloatParam", "IntParam", "CategoricalParam"):
        definition = definitions[name]
        kind = definition["properties"]["type"]["const"]
        parts += [
            f"### type: {kind}",
            "",
            _escaped(definition.get("description", "")),
            "",
            _keys(definition, {}),
            "",
        ]
    return "\n".join(parts)


def _kind(node: Mapping[str, Any]) -> str:
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return ", ".join(f"`{each}`" for each in node["enum"])
    if "anyOf" in node:
        if any("/" in each.get("pattern", "") for way in node["anyOf"] for each in way.get("anyOf", ())):
            return "name, or mapping with a `name`"  # samplers, pruners and schedulers, which have a page
        kinds = [_kind(each) for each in node["anyOf"] if "$ref" not in each and each != {"type": "null"}]
        return " or ".join(dict.fromkeys(filter(None, kinds)))
    kind = node.get("type", "object" if "$ref" in node else "")
    names = {"object": "mapping", "integer": "whole number", "string": "text", "boolean": "true or false"}
    if isinstance(kind, list):
        return " or ".join(names.get(each, each) for each in kind if each != "null")
    return "list" if kind == "array" else names.get(kind, kind)


def _shown(default: Any) -> str:
    if isinstance(default, dict):
        return f"`{default['name']}`" if "name" in default else ""
    return "" if default is None else f"`{json.dumps(default)}`"


# ---- samplers, pruners, schedulers, callbacks


def samplers() -> str:
    """Samplers by name, with the arguments that a study file may give them."""
    return _classes(SAMPLERS, lambda name: TAKEN.get(SAMPLERS[name], ("seed",)))


def pruners() -> str:
    """Pruners by name, with their arguments."""
    return _classes(PRUNERS, lambda name: ())  # noqa: ARG005


def schedulers() -> str:
    """Schedulers by name, with their arguments, defaults included."""
    parts = []
    for name, kind in SCHEDULERS.items():
        signature, about = inspect.signature(kind).parameters, _attributes(kind)
        rows = [(f"`{each}`", _default(signature[each]), about[each]) for each in signature]
        parts += [f"### {name}", "", _summary(kind), "", _table(("argument", "default", "what it is"), rows), ""]
    return "\n".join(parts)


def _attributes(kind: type) -> dict[str, str]:
    """What a class says of its attributes."""
    package, _, module = kind.__module__.partition(".")
    docstring = _sources(package)[f"{module}.{kind.__name__}"].docstring
    sections = docstring.parse("google", returns_multiple_items=False)
    (attributes,) = [section.value for section in sections if section.kind.value == "attributes"]
    return {each.name: " ".join(_escaped(each.description).split()) for each in attributes}


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
    nodes = study_schema()["properties"]["callbacks"]["properties"]
    parts = []
    for name, row in CALLBACKS.items():
        signature = inspect.signature(row.offered)
        arguments = nodes[name]["anyOf"][0]["properties"]
        rows = [
            (f"`{each}`", _default(signature.parameters[each]), _escaped(node.get("description", "")))
            for each, node in arguments.items()
        ]
        always = " Always on." if row.required else " On unless it is `false`." if row.default else ""
        summary = f"`{row.kind.__name__}`: {_escaped(nodes[name]['description'])}{always}"
        listed = _table(("argument", "default", "what it is"), rows) if rows else "No arguments."
        parts += [f"### {name}", "", summary, "", listed, ""]
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


def package_names(package: Any) -> str:
    """What a package offers, functions first."""
    offered = sorted(package.__all__, key=lambda name: isinstance(getattr(package, name), type))
    return "\n".join(described(f"{package.__name__}.{name}", getattr(package, name)) for name in offered)


def described(title: str, named: Any) -> str:
    """A function or class with its signature, its docstring and, of a class, its public methods."""
    package, _, module = named.__module__.partition(".")
    source = _sources(package)[f"{module}.{named.__name__}"]
    lines = [f"### {title}", "", *_signature(title.rpartition(".")[2], source), *_docstring(source)]
    bare = []
    for name, member in source.members.items() if source.is_class else ():
        if name.startswith("_") or not (member.is_function or "property" in member.labels):
            continue
        if member.docstring is None:
            bare.append(f"`{name}`")
        else:
            method = f"{source.name}.{name}"
            lines += [f"#### {method}", "", *(_signature(method, member) if member.is_function else ())]
            lines += _docstring(member)
    return "\n".join([*lines, *([f"Further: {', '.join(bare)}.", ""] if bare else ())])


@functools.cache
def _sources(package: str) -> Any:
    return griffe.load(package, search_paths=[ROOT])


def _signature(name: str, source: Any) -> list[str]:
    """The parameters with their types and defaults: in one line, or one a line."""
    parameters = [each for each in source.parameters if each.name != "self" and each.name[0] != "_"]
    if source.is_class and not parameters:
        return []
    texts = []
    for index, each in enumerate(parameters):
        kind = each.kind.value
        if kind == "keyword-only" and (index == 0 or parameters[index - 1].kind.value.startswith("positional")):
            texts.append("*")
        star = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        typed = f": {each.annotation}" if each.annotation is not None else ""
        default = f" = {each.default}" if each.default is not None and not star else ""
        texts.append(f"{star}{each.name}{typed}{default}")
    returned = f" -> {source.returns}" if source.is_function and source.returns is not None else ""
    line = f"{name}({', '.join(texts)}){returned}"
    if len(line) > 100:
        line = "\n".join([f"{name}(", *(f"    {text}," for text in texts), f"){returned}"])
    return ["```python", line, "```", ""]


def _docstring(source: Any) -> list[str]:
    lines: list[str] = []
    for section in source.docstring.parse("google", returns_multiple_items=False) if source.docstring else ():
        kind = section.kind.value
        if kind == "text":
            lines += [_markdown(section.value), ""]
        elif kind in ("parameters", "attributes", "raises"):
            lines += [{"parameters": "Arguments:", "attributes": "Attributes:", "raises": "Errors:"}[kind], ""]
            lines += [f"- {_entry(each)}" for each in section.value] + [""]
        elif kind in ("returns", "yields"):
            lines += [f"Returns: {_escaped(each.description)}" for each in section.value] + [""]
        else:
            raise ValueError(f"{source.path}: make_reference.py has no form for the section {kind!r}")
    return lines


def _markdown(text: str) -> str:
    """A docstring's text: ``code`` in single backticks, blocks of code in fences, indented ones (``::``) too."""
    text = re.sub(
        r"::\n\n((?: {4}.*\n?|\n)+)",
        lambda match: f":\n\n```text\n{inspect.cleandoc(match[1]).rstrip()}\n```\n",
        text,
    )
    pieces = re.split(r"^(```.*?^```)$", text, flags=re.MULTILINE | re.DOTALL)
    pieces[::2] = [_escaped(piece) for piece in pieces[::2]]
    return "".join(pieces).strip()


def _entry(each: Any) -> str:
    name = getattr(each, "name", None) or each.annotation
    return f"`{name}`: {' '.join(_escaped(each.description).split())}"


# ---- events


def events() -> str:
    """The events of `hpo run --json`, from the docstring of the module that writes them."""
    from hpo.console import events as module

    text = inspect.cleandoc(module.__doc__ or "")
    before, rows, after = re.split(r"^=+ +=+$\n?", text, flags=re.MULTILINE)
    listed: list[list[str]] = []
    for line in rows.splitlines():
        name, entries = line[:19].strip(), line[19:].strip()
        if name:
            listed.append([name, entries])
        else:
            listed[-1][1] += f" {entries}"
    table = _table(("event", "entries"), [(name, entries) for name, entries in listed])
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
    "schedulers": schedulers,
    "callbacks": callbacks,
    "events": events,
    "names of hpo": lambda: (
        package_names(hpo)
        + "\n"
        + described("hpo.search.predicted_loss.pruner.PredictedLossPruner", PRUNERS["predicted_loss"])
    ),
    "names of trainer": lambda: package_names(trainer),
}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
