"""A resolved config as YAML that a study file's loader reads as the same values."""

from collections.abc import Mapping
from typing import Any, Final

import yaml

from hpo.config.yaml_loader import Loader

_ENDLESS: Final = 2**31 - 1  # the widest line that libyaml takes


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # one of two bases
    """Quotes text that the loader would take for a number."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - a value that stands twice is written twice
        """True."""
        return True


def to_yaml(config: Mapping[str, Any]) -> str:
    """The text of a config of plain values, its keys in their order."""
    text: str = yaml.dump(dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def to_line(value: Any) -> str:
    """A plain value on one line, as it may stand after a key and within brackets."""
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
