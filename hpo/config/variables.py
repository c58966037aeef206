"""The environment that processes get which hpo starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Final

#: The dashboard's token. It stays with the command that serves: agents and trials have no use for it.
TOKEN_ENV: Final = "HPO_DASHBOARD_TOKEN"


def without_token(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment as agents and trials get it."""
    return {name: text for name, text in environment.items() if name != TOKEN_ENV}


@contextlib.contextmanager
def token_left_out() -> Iterator[None]:
    """What is started inside does not inherit the token."""
    token = os.environ.pop(TOKEN_ENV, None)
    try:
        yield
    finally:
        if token is not None:
            os.environ[TOKEN_ENV] = token


@contextlib.contextmanager
def in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that a process started inside inherits."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
