"""PyYAML's loader for study files: it reads numbers as OmegaConf does, and limits memory and stack."""

import re
from typing import Any, Final

import yaml

#: At most this many keys and values, with aliases expanded: OmegaConf and each copy of the config handle each one.
MAX_VALUES: Final = 10_000
#: At most this many nested mappings and lists.
MAX_DEPTH: Final = 50
#: The errors for a file above these limits, as (problem, fix).
TOO_MANY: Final = (
    f"holds more than {MAX_VALUES:,} keys and values, aliases written out",
    "keep long lists in a module or a file of their own, and name it",
)
TOO_DEEP: Final = (f"is nested deeper than {MAX_DEPTH} levels", "nest it less, or close an open bracket or quote")

_TAG = "tag:yaml.org,2002:"


class Limit(yaml.MarkedYAMLError):
    """A file is larger or deeper than a study file may be.

    Args:
        said: The problem and the fix.
        mark: The place in the file.
    """

    def __init__(self, said: tuple[str, str], mark: yaml.Mark) -> None:
        super().__init__(problem=said[0], problem_mark=mark)
        self.fix = said[1]


class Loader(yaml.SafeLoader):
    """SafeLoader that reads numbers as OmegaConf does, dates as text, and ``{a: ${b.c}}`` without quotes."""

    flow_level: int

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a value, or raise at the first beyond the limits; the parser has read no further then."""
        self._values += 1
        self._depth += 1
        if self._values > MAX_VALUES or self._depth > MAX_DEPTH:
            said = TOO_MANY if self._values > MAX_VALUES else TOO_DEEP
            raise Limit(said, self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def scan_plain(self) -> Any:
        """Scan an unquoted scalar; in a flow mapping, YAML would end it at the brace of ``${``."""
        length = self._interpolated_length() if self.flow_level else 0
        if not length:
            return super().scan_plain()
        start, text = self.get_mark(), self.prefix(length)
        self.forward(length)
        self.allow_simple_key = False
        return yaml.ScalarToken(text, True, start, self.get_mark())

    def scan_flow_scalar_non_spaces(self, double: bool, start_mark: yaml.Mark) -> Any:
        r"""Scan a part of a quoted scalar; PyYAML lets the error of an escape such as ``\U00110000`` through."""
        try:
            return super().scan_flow_scalar_non_spaces(double, start_mark)
        except (ValueError, OverflowError) as error:
            context, problem = "while scanning a quoted scalar", "found an escape that is no character"
            raise yaml.MarkedYAMLError(context, start_mark, problem, self.get_mark()) from error

    def _interpolated_length(self) -> int:
        """The length of the scalar ahead if it has an interpolation with closed braces, else 0."""
        length = depth = 0
        seen = False
        while (char := self.peek(length)) not in "\0\r\n":
            if char == "$" and self.peek(length + 1) == "{":
                depth, seen, length = depth + 1, True, length + 1
            elif depth:
                depth += (char == "{") - (char == "}")
            elif char in " \t,[]{}" or (char == ":" and self.peek(length + 1) in " \t\0\r\n,[]{}"):
                break
            length += 1
        return length if seen and not depth else 0


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in {_TAG + "timestamp", _TAG + "float"}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# The pattern of omegaconf/_utils.py get_yaml_loader: PyYAML alone reads 1e-3 as text.
Loader.add_implicit_resolver(
    _TAG + "float",
    re.compile(
        r"""^(?:
         [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
        |[-+]?\.[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)
