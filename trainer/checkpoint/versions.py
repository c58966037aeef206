"""Versions of modules, by which one that has changed what it keeps reads what it saved before."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any


def versioned(made: Mapping[str, Any], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was made of a state dict, with what that says of the versions of its modules.

    Without it a module takes what it loads for that of its first version, and changes it to suit.
    """
    if not hasattr(state, "_metadata"):
        return made
    made = OrderedDict(made)
    made._metadata = state._metadata  # type: ignore[attr-defined]  # noqa: SLF001 - where torch has it
    return made
