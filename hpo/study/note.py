"""Writes the study's note for the dashboard: the study file that it was started with, and its environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Protocol

from hpo.config.hidden import hidden
from hpo.config.spec import StudySpec
from hpo.config.yaml_dumper import to_yaml
from hpo.storage.engines import display_url
from hpo.storage.study_storage import StudyStorage
from hpo.study.environment import environment

# The keys under which `optuna_dashboard.save_note` stores a note. Importing it takes a second and needs
# scikit-learn, at each start of a study; a test reads the note back with the dashboard's own function.
_VERSION_KEY: Final = "dashboard:note_ver"
_PART_KEY: Final = "dashboard:note_str:"
_PART: Final = 2045


class Stored(Protocol):
    """The part of `OpenStudy` that this module needs; `hpo.study.open_study` imports this module."""

    @property
    def spec(self) -> StudySpec:
        """The study file."""

    @property
    def storage(self) -> StudyStorage:
        """Where it is stored."""

    @property
    def study_id(self) -> int:
        """Optuna's id of the study."""


def write_note(opened: Stored) -> None:
    """Store the note of a study that has just been created, in place of any earlier note.

    Raises:
        StorageInternalError: The database failed.
    """
    storage, study_id, text = opened.storage, opened.study_id, note(opened.spec)
    attrs = storage.get_study_system_attrs(study_id)
    parts = [text[start : start + _PART] for start in range(0, len(text), _PART)]
    before = sum(key.startswith(_PART_KEY) for key in attrs)
    for place, part in enumerate([*parts, *[""] * (before - len(parts))]):
        storage.set_study_system_attr(study_id, f"{_PART_KEY}{place}", part)
    storage.set_study_system_attr(study_id, _VERSION_KEY, attrs.get(_VERSION_KEY, 0) + 1)


def stored_note(attrs: Mapping[str, Any]) -> str:
    """The note in a study's system attributes; empty where there is none."""
    parts = {int(key.removeprefix(_PART_KEY)): text for key, text in attrs.items() if key.startswith(_PART_KEY)}
    return "".join(parts[place] for place in sorted(parts))


def note(spec: StudySpec) -> str:
    """The note, in Markdown: the study file with defaults and interpolations filled in, and the environment."""
    here = environment(spec.folder)
    return (
        f"# {_code(spec.study.name)}\n\n"
        f"From {_code(str(spec.path))}, with what was left out filled in:\n\n{_fenced(shown_config(spec))}\n"
        f"## Environment\n\nOf the process that created the study:\n\n{_fenced(here)}"
    )


def shown_config(spec: StudySpec) -> dict[str, Any]:
    """The base config for people to read, without passwords in URLs and values of keys that look secret."""
    config: dict[str, Any] = hidden(spec.base_config())
    config["run"]["storage"] = display_url(spec.storage_url)
    return config


def _fenced(content: Mapping[str, Any]) -> str:
    """A block of YAML in a fence longer than any run of backticks in it."""
    text = to_yaml(content)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}yaml\n{text}{fence}\n"


def _code(text: str) -> str:
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {_line(text)} {fence}" if "`" in text else f"{fence}{_line(text)}{fence}"


def _line(text: str) -> str:
    return " ".join(text.split())
