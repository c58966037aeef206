"""Reads a study's original config and environment from the note that `hpo.study.note` stores with it."""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from hpo.config.yaml_loader import Loader
from hpo.study.note import shown_config, stored_note
from hpo.study.open_study import OpenStudy

_FENCED: Final = re.compile(r"^(`{3,})yaml\n(.*?)^\1$", re.DOTALL | re.MULTILINE)


def origin(opened: OpenStudy) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The config without passwords, and the environment in which the study was created.

    If the note was changed (people may edit it in the dashboard), the config is that of the current study file,
    and the environment is None.
    """
    blocks = _FENCED.findall(stored_note(opened.storage.get_study_system_attrs(opened.study_id)))
    try:
        config, environment = (yaml.load(text, Loader=Loader) for _, text in blocks)
    except (ValueError, yaml.YAMLError):
        return shown_config(opened.spec), None
    if not isinstance(config, dict) or not isinstance(environment, dict):
        return shown_config(opened.spec), None
    return config, environment
