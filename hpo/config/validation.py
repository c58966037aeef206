"""Validates a study file that has been read: OmegaConf resolves its interpolations, pydantic checks the values."""

from typing import Any, Final

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from hpo.config.interpolation import check_interpolations, plainly_resolved, sections_involved, unresolved
from hpo.config.lengths import with_lengths, without_lengths
from hpo.config.marks import Marks
from hpo.config.paths import leaves
from hpo.config.schema import StudyFile
from hpo.config.schema_errors import as_mapping, explained, listed_as_keys
from hpo.errors import together

#: OmegaConf's mark for a missing value.
_MISSING: Final = "???"


def validated(raw: dict[str, Any], marks: Marks) -> StudyFile:
    """Resolve a study file's interpolations, and validate it against the schema.

    Raises:
        InputError: The file does not fit the schema.
    """
    data = interpolated(raw, marks)
    try:
        return StudyFile.model_validate(data)
    except ValidationError as error:
        raise together(explained(error, data, marks)) from error


def interpolated(raw: dict[str, Any], marks: Marks) -> dict[str, Any]:
    """Resolve a study file's interpolations.

    Raises:
        InputError: An interpolation can't be resolved, a value is missing, or a section is not a mapping.
    """
    for name, section in raw.items():
        # Checked here, as an interpolation into such a section would fail first, with a less clear error.
        said = isinstance(section, str) and name in ("run", "loader", "trainer") and "${" not in section
        known = name in StudyFile.model_fields and name != "where"
        if known and (said or isinstance(section, list | int | float)):
            fix = as_mapping(name, section) if isinstance(section, str) else ""
            fix = listed_as_keys(name, section) if isinstance(section, list) else fix
            raise marks.error("must be a mapping", (name,), value=section, fix=fix or f"write `{name}: {{…}}`")
    if missing := [keys for keys, value in leaves(raw) if value == _MISSING]:
        problem, fix = f"`{_MISSING}` stands for a value that is still missing", "write the value"
        raise together([marks.error(problem, keys, value=_MISSING, fix=fix) for keys in missing])
    plain = plainly_resolved(raw)
    if plain is not None:
        return plain
    check_interpolations(raw, marks)
    involved = sections_involved(raw)
    given = {name: section for name, section in raw.items() if name in involved}
    try:
        data = OmegaConf.to_container(OmegaConf.create(with_lengths(given)), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise unresolved(raw, error, marks) from error
    assert isinstance(data, dict)
    resolved = without_lengths({str(key): value for key, value in data.items()}, marks)
    return {name: resolved[name] if name in involved else section for name, section in raw.items()}
