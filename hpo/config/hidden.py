"""Hides secrets in configs and arguments that people will see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from hpo.config.yaml_dumper import to_line
from hpo.config.yaml_source import parse_given
from hpo.errors import InputError, without_password

_STARS: Final = "***"
#: Names of secret values; other tokens (`pad_token`, `max_tokens`) are not secret.
_SECRET: Final = re.compile(
    r"(?i)(^|[-_.])(password|passwd|passphrase|secret|(api|access|secret|private)_?key"
    r"|(access|auth|api|bearer|hf|hub)_?token)$|(^|\.)token$"
)


def hidden(value: Any) -> Any:
    """A plain value with the passwords of URLs, and the values of keys with a secret's name, hidden."""
    if isinstance(value, Mapping):
        return {key: _STARS if _is_secret(key, item) else hidden(item) for key, item in value.items()}
    if isinstance(value, list):
        return [hidden(item) for item in value]
    return without_password(value) if isinstance(value, str) else value


def hidden_argument(word: str) -> str:
    """An argument of a command line, with the secrets in an override's value hidden."""
    word = without_password(word)
    path, equals, text = word.partition("=")
    if not equals or path.startswith("-"):
        return word
    try:
        value = parse_given(text)
    except InputError:
        return word
    shown = hidden({path: value})[path]
    return word if shown == value else f"{path}={shown if isinstance(shown, str) else to_line(shown)}"


def _is_secret(key: object, value: object) -> bool:
    is_text = isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""
    return is_text and _SECRET.search(str(key)) is not None
