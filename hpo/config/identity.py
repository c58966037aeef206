"""The identity of a study file: all values whose fields in the schema are not marked as `MAY_CHANGE`."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from hpo.config.paths import Keys, copy_plain, lookup
from hpo.config.schema import StudyFile, model_of
from hpo.config.schema_errors import place_of
from hpo.config.schema_types import MAY_CHANGE


def identity(config: Mapping[str, Any], model: type[BaseModel] = StudyFile) -> dict[str, Any]:
    """The part of a config that may not change once the study has started; sections without any are left out.

    Args:
        config: A base config, or whole sections of one.
        model: The config's model in the schema.
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
    """The identity of a stored base config, read through today's schema; an earlier version may have stored it.

    A key that is new in the schema gets its default, and one that the schema no longer has is left out. A config
    that today's schema can't read stays as it was stored.
    """
    stored = identity(config)
    data: dict[str, Any] = copy_plain(stored)
    study = data.setdefault("study", {})
    study["name"] = lookup(config, ("study", "name"))
    if study.get("objectives") is not None:  # `metric` and `direction` were derived from it
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
