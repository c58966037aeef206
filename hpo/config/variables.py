"""Sets the environment variables of processes that hpo starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Final

#: The variable with the dashboard's token, which only the dashboard's own process gets, not agents and trials.
TOKEN_ENV: Final = "HPO_DASHBOARD_TOKEN"


def without_token(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of an environment without the token, for agents and trials."""
    return {name: text for name, text in environment.items() if name != TOKEN_ENV}


@contextlib.contextmanager
def token_left_out() -> Iterator[None]:
    """Keep the token from processes that are started inside the block."""
    token = os.environ.pop(TOKEN_ENV, None)
    try:
        yield
    finally:
        if token is not None:
            os.environ[TOKEN_ENV] = token


@contextlib.contextmanager
def in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes that are started inside the block."""
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
