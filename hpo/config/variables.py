"""The environment that processes get which hpo starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: The dashboard's token. It stays with the command that serves: agents and trials have no use for it.
TOKEN_ENV: Final = "HPO_DASHBOARD_TOKEN"


def without_token(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment as agents and trials get it."""
    return {name: text for name, text in environment.items() if name != TOKEN_ENV}
