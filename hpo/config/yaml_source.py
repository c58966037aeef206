"""Reads YAML into plain data, with the line of every key."""

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import yaml

from hpo.config.paths import MAX_KEY, Keys, is_nameable, join_path, show
from hpo.config.yaml_loader import MAX_DEPTH, MAX_VALUES, TOO_DEEP, TOO_MANY, Limit, Loader
from hpo.errors import InputError

_TAG = "tag:yaml.org,2002:"
#: In bytes; study files are written by hand, and PyYAML takes a second for some hundred thousand bytes.
MAX_BYTES = 512 * 1024
#: A number with a decimal comma.
COMMA: Final = re.compile(r"[-+]?[0-9]+,[0-9]+(e[-+]?[0-9]+)?", re.IGNORECASE)
#: A key and its value that YAML reads as one key, because the space after the colon is missing.
_JOINED: Final = re.compile(r"([\w.\[\]-]+):(\S.*)")
#: A line whose key lacks the space before a bracket; YAML fails at a later colon, or reads it as one text.
_BEFORE_BRACKET: Final = re.compile(r"\s*([\w.\[\]-]+):[{\[]")
_PLAIN_TAGS = frozenset(_TAG + name for name in ("null", "bool", "int", "float", "str"))


@dataclass(frozen=True)
class YamlSource:
    """The data of a YAML file, and where each part is written.

    Attributes:
        file: The file as the person named it.
        data: Plain mappings, lists and scalars; no part of it is shared.
        lines: Line number (from 1) of each key and list item.
    """

    file: str
    data: dict[str, Any]
    lines: dict[Keys, int]


def read_yaml(path: Path) -> YamlSource:
    """Read one YAML mapping from a file.

    Raises:
        InputError: The file can't be read, is too large or too deep, is not YAML, is empty, is not a mapping, or
            repeats a key.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            fix = "keep long lists and data in a module or a file of their own, and name it"
            raise InputError(f"is larger than {MAX_BYTES // 1024} KiB", file=path, line=1, fix=fix)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InputError("is not UTF-8 text", file=path, line=line, fix="save the file as UTF-8") from error
    except FileNotFoundError as error:
        fix = _instead_of(path, "check the path, or the folder you are in")
        raise InputError("no such file", file=path, fix=fix) from error
    except OSError as error:
        fix = _instead_of(path, "give the path of a readable YAML file")
        raise InputError(f"can't be read ({error.strerror or error})", file=path, fix=fix) from error
    except ValueError as error:  # about the path itself
        fix = "give the path of a YAML file"
        raise InputError(f"is not a file path ({error})", value=repr(str(path)), fix=fix) from error
    reader = _Reader(str(path))
    data = reader.read(text)
    if data is None:
        raise InputError("the file is empty", file=path, line=1, fix="start with a `study:` section")
    if not isinstance(data, dict):
        fix = "write sections such as `study:`, `model:` and `optimizer:` at the top level"
        raise InputError("the top level is not a mapping", file=path, line=1, fix=fix)
    return YamlSource(str(path), data, reader.lines)


def _instead_of(path: Path, otherwise: str) -> str:
    """The fix for a path that is not a file: a YAML file there with a similar name, or the only one."""
    folder, name = (path, "study.yaml") if path.is_dir() else (path.parent, path.name)
    try:
        names = sorted(each.name for each in folder.iterdir() if each.suffix in {".yaml", ".yml"})
    except OSError:  # the folder does not exist, or can't be read
        names = []
    meant = difflib.get_close_matches(name, names, n=1) or (names if len(names) == 1 else [])
    return f"did you mean `{folder / meant[0]}`?" if meant and folder / meant[0] != path else otherwise


def storable(text: str) -> str:
    r"""Text that databases accept: surrogate pairs, such as ``\ud83d\ude00`` from JSON, become one character.

    Raises:
        ValueError: It has a character that databases or terminals refuse.
    """
    if "\0" in text:
        raise ValueError("holds the character NUL, which databases refuse")
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise ValueError("holds half of a character (a lone surrogate), which can't be stored or shown") from None


def parse_value(text: str) -> Any:
    """Read text as a YAML value.

    Raises:
        InputError: The text is no YAML value.
    """
    return _Reader("command line").read(text)


def parse_given(text: str) -> Any:
    """Read the value of a `path=value` on the command line: a YAML scalar, or a mapping or list in flow style.

    Raises:
        InputError: The text is no YAML value, or YAML leaves a part of it out.
    """
    reader = _Reader("command line")
    value = reader.read(text)
    if isinstance(value, dict | list) and not text.lstrip().startswith(("{", "[")):
        return text.strip()  # a text with a colon or a dash, such as `sqlite:///:memory:`
    part = text[reader.span].strip()
    if part != text.strip():
        problem = f"YAML reads {f'only `{show(part)}`' if part else 'nothing'} of it"
        fix = "quote the value for YAML, too: `'path=\"…\"'`; ` #` begins a comment, and `---` a document"
        raise InputError(problem, file=reader.file, fix=fix)
    return value


def with_point(name: str | int, number: str) -> str:
    """The fix for a number with a decimal comma."""
    return f"write `{name}: {number.replace(',', '.')}`, with a point; thousands are written without a comma"


def _with_comma(number: yaml.Node, rest: yaml.Node) -> str:
    """The number that a comma has split into a value and a key, as in `{low: 0,001}`; empty for other nodes."""
    if not isinstance(number, yaml.ScalarNode) or not isinstance(rest, yaml.ScalarNode):
        return ""
    text = f"{number.value},{rest.value}"
    together = number.end_mark.index + 1 == rest.start_mark.index and number.style is rest.style is None
    return text if together and COMMA.fullmatch(text) else ""


def _line_at(mark: yaml.Mark) -> str:
    """The text of the line at a mark."""
    text = str(mark.buffer).rstrip("\0")
    start = text.rfind("\n", 0, mark.pointer) + 1
    return text[start:].partition("\n")[0]


def _joined(key: yaml.Node, value: yaml.Node, *, in_braces: bool) -> str:
    """A key and its value with the missing space between them; empty if no space is missing.

    In braces YAML reads `{low:1}` as a key without a value, and `trainer:{low: 1}` has its brace in the key.
    """
    if not isinstance(key, yaml.ScalarNode) or key.style or not isinstance(value, yaml.ScalarNode) or value.style:
        return ""
    match = _JOINED.fullmatch(key.value)
    if match is not None and not value.value and in_braces:
        return f"{match[1]}: {match[2]}"
    return f"{match[1]}: {match[2]}: {value.value}" if match is not None and match[2][0] in "{[" else ""


class _Reader:
    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[Keys, int] = {}
        self.span = slice(0)  # the document's part of the text, without comments around it
        self._open: set[int] = set()
        self._values = 0

    def read(self, text: str) -> Any:
        try:
            loader = Loader(text)
            try:
                node = loader.get_single_node()
                if node is None:
                    return None
                self.span = slice(node.start_mark.index, node.end_mark.index)
                return self._build(loader, node, ())
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            raise self._syntax_error(error) from error
        except yaml.reader.ReaderError as error:
            line = None if self.file == "command line" else text.count("\n", 0, error.position) + 1
            problem = f"not YAML: the character U+{int(error.character):04X} is not allowed"
            raise InputError(problem, file=self.file, line=line, fix="leave that character out") from error

    def _syntax_error(self, error: yaml.MarkedYAMLError) -> InputError:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        if isinstance(error, Limit):
            problem, fix = str(error.problem), error.fix
            return InputError(problem, file=self.file, line=self._line(mark), fix=fix)
        fix = "check the indentation, the brackets and the quotes here and on the line above"
        if "expected ':'" in problem or "mapping values" in problem:
            keys = "that a colon and a space follow each key"
            fix = f"check the indentation, the quotes, and {keys}, here and on the line above"
        if mark is not None and mark.buffer and (match := _BEFORE_BRACKET.match(_line_at(mark))):
            fix = f"write a space behind the colon of `{match[1]}`"
        if "\\t" in problem:
            fix = "indent with spaces: YAML takes no tabs there"
        if self.file == "command line":
            return InputError(f"not a YAML value: {problem}", file=self.file, fix="quote the value")
        return InputError(f"not YAML: {problem}", file=self.file, line=self._line(mark), fix=fix)

    def _line(self, mark: yaml.Mark | None) -> int | None:
        return None if mark is None or self.file == "command line" else mark.line + 1

    def _error(self, problem: str, node: yaml.Node, keys: Keys, fix: str, value: str = "") -> InputError:
        line = self._line(node.start_mark)
        return InputError(problem, file=self.file, line=line, path=join_path(keys), value=show(value), fix=fix)

    def _limit(self, said: tuple[str, str], node: yaml.Node, keys: Keys) -> InputError:
        return self._error(said[0], node, keys, said[1])

    def _build(self, loader: Loader, node: yaml.Node, keys: Keys) -> Any:
        self._values += 1  # an alias counts at each use
        if self._values > MAX_VALUES:
            raise self._limit(TOO_MANY, node, keys)
        if len(keys) > MAX_DEPTH:
            raise self._limit(TOO_DEEP, node, keys)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(loader, node, keys)
        if id(node) in self._open:
            raise self._error("an alias that contains itself", node, keys, "write the value out")
        self._open.add(id(node))
        try:
            return self._collection(loader, node, keys)
        finally:
            self._open.discard(id(node))

    def _collection(self, loader: Loader, node: yaml.Node, keys: Keys) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(loader, node, keys)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self._item(loader, child, (*keys, at)) for at, child in enumerate(node.value)]
        raise self._error(f"the YAML tag {node.tag} is not supported", node, keys, "write a plain value")

    def _item(self, loader: Loader, node: yaml.Node, keys: Keys) -> Any:
        self.lines[keys] = node.start_mark.line + 1
        return self._build(loader, node, keys)

    def _scalar(self, loader: Loader, node: yaml.ScalarNode, keys: Keys) -> Any:
        if node.tag not in _PLAIN_TAGS:
            fix = "write text, a number, true, false or null"
            raise self._error(f"the YAML tag {node.tag} is not supported", node, keys, fix, node.value)
        try:
            value = loader.construct_object(node)
        except (ValueError, LookupError) as error:
            raise self._error("does not fit its YAML tag", node, keys, "quote it", node.value) from error
        if isinstance(value, int | float):
            return self._number(value, node, keys)
        if not isinstance(value, str):
            return value
        try:
            return storable(value)
        except ValueError as error:
            raise self._error(str(error), node, keys, "leave that character out", ascii(value)) from error

    def _number(self, value: float, node: yaml.ScalarNode, keys: Keys) -> float:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            fix = "write a number of at most 64 bits, or quote it if text is meant"
            raise self._error("is too large for a whole number", node, keys, fix, node.value)
        if math.isinf(value) and "inf" not in node.value.lower():
            fix = "write a number below 1.8e308, or `.inf` if that is meant"
            raise self._error("is too large for a floating-point number", node, keys, fix, node.value)
        return value

    def _mapping(self, loader: Loader, node: yaml.MappingNode, keys: Keys) -> dict[str, Any]:
        for (name_node, number), (rest, nothing) in pairwise(node.value):
            if nothing.value == "" and (written := _with_comma(number, rest)):
                here = (*keys, self._key(loader, name_node, keys))
                raise self._error("holds a comma", number, here, with_point(here[-1], written), written)
        for key_node, value_node in node.value:
            if written := _joined(key_node, value_node, in_braces=bool(node.flow_style)):
                problem, fix = "a space is missing behind the colon of a key", f"write `{written}`"
                raise self._error(problem, key_node, keys, fix, key_node.value)
        data: dict[str, Any] = {}
        for merged in self._merged(node, keys):
            data = {**data, **self._build(loader, merged, keys)}
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                continue
            name, line = self._key(loader, key_node, keys), key_node.start_mark.line + 1
            here = (*keys, name)
            if name in seen:
                fix = f"keep one of the two; the other is on line {seen[name]}"
                raise self._error("this key is written twice", key_node, here, fix)
            seen[name] = self.lines[here] = line
            data[name] = self._build(loader, value_node, here)
        return data

    def _merged(self, node: yaml.MappingNode, keys: Keys) -> Iterator[yaml.MappingNode]:
        for key_node, value_node in node.value:
            if key_node.tag != _TAG + "merge":
                continue
            several = isinstance(value_node, yaml.SequenceNode)
            # The first of several merged mappings wins, so it is applied last.
            for part in reversed(value_node.value) if several else [value_node]:
                if not isinstance(part, yaml.MappingNode):
                    raise self._error("`<<` merges mappings only", part, keys, "give it an alias of a mapping")
                yield part

    def _key(self, loader: Loader, node: yaml.Node, keys: Keys) -> str:
        if isinstance(node, yaml.ScalarNode):
            name = self._scalar(loader, node, keys)
            if isinstance(name, bool) and node.value.lower() not in ("true", "false"):
                name = node.value  # `on` is a key of `run`; YAML 1.2 reads it as text
            if isinstance(name, str) and len(name) > MAX_KEY:
                problem, fix = f"a key has more than {MAX_KEY} characters", "write a shorter one"
                raise self._error(problem, node, keys, fix, name)
            if isinstance(name, str) and not is_nameable(name):
                fix = "write a name, with a `[` before each `]`"
                raise self._error(f"no path can lead to the key `{show(name)}`", node, keys, fix)
            if isinstance(name, str):
                return name
            fix = f'quote it: "{show(node.value)}"'
            raise self._error(f"the key `{show(node.value)}` is not text", node, keys, fix)
        raise self._error("a key is not text", node, keys, "use plain words as keys")
