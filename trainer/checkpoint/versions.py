"""Keeps the module versions of a state dict, by which a module can read what an older version of it saved."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any


def versioned(made: Mapping[str, Any], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping ``made`` from a state dict, with that state dict's module versions.

    Without them, a module takes the state for one of its first version and converts it.
    """
    if not hasattr(state, "_metadata"):
        return made
    made = OrderedDict(made)
    made._metadata = state._metadata  # type: ignore[attr-defined]  # noqa: SLF001 - where torch keeps it
    return made
