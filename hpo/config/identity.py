"""What makes two study files the same search: all that the schema's fields do not mark as `MAY_CHANGE`."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from hpo.config.paths import Keys, copy_plain, lookup
from hpo.config.schema import StudyFile, model_of
from hpo.config.schema_errors import place_of
from hpo.config.schema_types import MAY_CHANGE


def identity(config: Mapping[str, Any], model: type[BaseModel] = StudyFile) -> dict[str, Any]:
    """The part of a config that must stay as it is once the study has started; a section without any is left out.

    Args:
        config: A base config, or any part of it that has whole sections.
        model: What the config is by its schema.
    """
    kept: dict[str, Any] = {}
    for name, value in config.items():
        field = model.model_fields.get(name)
        if field is not None and MAY_CHANGE in field.metadata:
            continue
        inner = None if field is None else model_of(field)
        if inner is None or not isinstance(value, Mapping):
            kept[name] = copy_plain(value)
        elif section := identity(value, inner):
            kept[name] = section
    return kept


def stored_identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a base config that was stored, by an earlier version too, as today's schema reads it.

    A key that is new in the schema has its default, and one that is gone from it is left out. What today's schema
    can't read stays as it is stored.
    """
    stored = identity(config)
    data: dict[str, Any] = copy_plain(stored)
    study = data.setdefault("study", {})
    study["name"] = lookup(config, ("study", "name"))
    if study.get("objectives") is not None:  # these two were filled in from it
        study.pop("metric", None)
        study.pop("direction", None)
    try:
        _leave_out_unknown(data)
        read = StudyFile.model_validate(data)
    except ValidationError:
        return stored
    return identity(read.model_dump(mode="json"))


def _leave_out_unknown(data: dict[str, Any]) -> None:
    try:
        StudyFile.model_validate(data)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            if item["type"] == "extra_forbidden":
                keys: Keys = place_of(item["loc"])[0]
                lookup(data, keys[:-1]).pop(keys[-1])
