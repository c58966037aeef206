"""Configs and arguments for people to read: without what is secret in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from hpo.config.yaml_dumper import to_line
from hpo.config.yaml_source import parse_given
from hpo.errors import InputError, without_password

_STARS: Final = "***"
#: Names of what is secret; other tokens (`pad_token`, `max_tokens`) are for all to see.
_SECRET: Final = re.compile(
    r"(?i)(^|[-_.])(password|passwd|passphrase|secret|(api|access|secret|private)_?key"
    r"|(access|auth|api|bearer|hf|hub)_?token)$|(^|\.)token$"
)


def hidden(value: Any) -> Any:
    """A plain value without passwords of URLs in it, and without values of keys that are named as secrets are."""
    if isinstance(value, Mapping):
        return {key: _STARS if _is_secret(key, item) else hidden(item) for key, item in value.items()}
    if isinstance(value, list):
        return [hidden(item) for item in value]
    return without_password(value) if isinstance(value, str) else value


def hidden_argument(word: str) -> str:
    """A word of a command line, likewise: an override is shown without what is secret in its value."""
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
