"""A resolved config as YAML that a study file's loader reads as the same values."""

from collections.abc import Mapping
from typing import Any

import yaml

from hpo.config.yaml_loader import Loader


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
