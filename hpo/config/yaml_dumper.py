"""Writes a resolved config as YAML that the loader of study files reads as the same values."""

from collections.abc import Mapping
from typing import Any, Final

import yaml

from hpo.config.yaml_loader import Loader

_ENDLESS: Final = 2**31 - 1  # the longest line that libyaml accepts


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # one of two bases
    """Quotes a text that the loader would read as a number."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - a value that occurs twice is written twice
        """True."""
        return True


def to_yaml(config: Mapping[str, Any]) -> str:
    """A config of plain values as YAML, with its keys in their order."""
    text: str = yaml.dump(dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def to_line(value: Any) -> str:
    """A plain value on one line, which may follow a key and stand in brackets."""
    breaks = isinstance(value, str) and len(f"{value}.".splitlines()) > 1
    text: str = yaml.dump(
        [value],
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=True,
        default_style='"' if breaks else None,
        width=_ENDLESS,
    )
    return text.removeprefix("[").removesuffix("]\n")
