"""Loads the valid part of a broken study file, so that the checks can find what else is wrong with it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from hpo.config.defaults import complete
from hpo.config.expressions import ExpressionError, parsed
from hpo.config.file_paths import absolute
from hpo.config.paths import Keys, assign, lookup
from hpo.config.schema import StudyFile
from hpo.config.schema_errors import explained, place_of
from hpo.config.spec import StudySpec, assembled, read_overridden
from hpo.config.validation import interpolated
from hpo.errors import InputError, each_error

#: How often invalid parts are left out: validators may find more once the types are right.
_ATTEMPTS: Final = 4
_ENTRY_DEPTH: Final = 2


def load_fitting(path: Path, overrides: Sequence[str] = ()) -> tuple[StudySpec | None, list[InputError]]:
    """Load the part of a study file that fits the schema, so that the checks can find what else is wrong with it.

    Parts that don't fit are left out, so that their defaults hold.

    Returns:
        The rest, or None if too little is left; and an error for each part that does not fit.
    """
    errors: list[InputError] = []
    try:
        raw, marks = read_overridden(path, overrides)
        for _ in range(_ATTEMPTS):
            data = interpolated(raw, marks)
            try:
                StudyFile.model_validate(data)
            except ValidationError as error:
                said = [item.path for item in errors]  # parts that were left out would be reported as missing
                found = explained(error, data, marks)
                errors += [item for item in found if not any(path.startswith(item.path) for path in said)]
                if any(item.path.startswith("objective") for item in found):
                    return None, errors  # without `objective`, this would be a study of the Trainer
                for item in error.errors(include_url=False):
                    _leave_out(raw, data, item)
                raw = complete(raw)
            else:
                return assembled(absolute(path), raw, marks), errors
    except InputError as error:
        errors += each_error(error)
    return None, errors


def _leave_out(raw: dict[str, Any], data: Mapping[str, Any], item: Any) -> None:
    """Remove the part that a pydantic error is about; a direction, which has no default, becomes "minimize".

    Args:
        raw: The study file, changed in place.
        data: The study file as pydantic saw it, with interpolations resolved.
        item: The error.
    """
    keys = place_of(item["loc"])[0]
    if item["type"] == "hpo":
        keys = (*keys, *item["ctx"]["keys"])
    keys = keys[:_ENTRY_DEPTH] if keys[0] == "search_space" else keys
    if keys == ("study", "direction"):
        assign(raw, keys, "minimize")
    else:
        _remove(raw, keys)
    if keys[0] == "search_space" and len(keys) == _ENTRY_DEPTH:
        _leave_out_dependent(raw, data, str(keys[1]))


def _leave_out_dependent(raw: dict[str, Any], data: Mapping[str, Any], path: str) -> None:
    """Remove what names an entry that has been removed, as it would be reported to name nothing."""
    space = raw["search_space"] if isinstance(raw["search_space"], dict) else {}
    for name in list(space):
        if name in space and path in _named_by(data["search_space"].get(name)):
            del space[name]
            _leave_out_dependent(raw, data, name)
    where = data.get("where")
    if path in _in_expressions([where] if isinstance(where, str) else where):
        raw.pop("where", None)


def _named_by(entry: Any) -> set[str]:
    """The parameters that an entry of the search space names."""
    if not isinstance(entry, dict):
        return set()
    when = entry.get("when")
    return {*_in_expressions([entry.get("low"), entry.get("high")]), *(when if isinstance(when, dict) else ())}


def _in_expressions(texts: Any) -> set[str]:
    """The parameters in those values that are expressions."""
    found: set[str] = set()
    for text in texts if isinstance(texts, list) else ():
        if isinstance(text, str):
            with suppress(ExpressionError):
                found.update(parsed(text).names)
    return found


def _remove(raw: dict[str, Any], keys: Keys) -> None:
    parent = lookup(raw, keys[:-1])
    if isinstance(parent, dict):
        parent.pop(keys[-1], None)
