"""A search-space entry in the words of other tools (W&B sweeps, Ray Tune, older Optuna), in the words here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hpo.config.paths import show

_KEYS: Final = {
    "min": "low",
    "max": "high",
    "lower": "low",
    "upper": "high",
    "values": "choices",
    "categories": "choices",
    "options": "choices",
    "distribution": "type",
    "q": "step",
}
#: Type, and whether its logarithm is searched. What others call ``log_uniform`` has exponents for its ends in W&B
#: and not in Ray, and so is not known.
_TYPES: Final = {
    "uniform": ("float", False),
    "double": ("float", False),
    "real": ("float", False),
    "quniform": ("float", False),
    "loguniform": ("float", True),
    "qloguniform": ("float", True),
    "log_uniform_values": ("float", True),
    "randint": ("int", False),
    "int_uniform": ("int", False),
    "lograndint": ("int", True),
    "choice": ("categorical", False),
}


def translated(entry: Mapping[str, Any]) -> str:
    """The entry as it is written here, on one line; empty where it has no such word, or more than they say."""
    ours = {_KEYS.get(key, key): value for key, value in entry.items()}
    named = str(ours.get("type"))
    kind, is_log = _TYPES.get(named, (named if "type" in ours else _kind_of(ours), False))
    if len(ours) < len(entry) or (ours.keys() == entry.keys() and named not in _TYPES):
        return ""
    ours["type"] = kind
    if is_log:
        ours.setdefault("log", True)
    wanted = {"choices"} if kind == "categorical" else {"low", "high"}
    if kind not in ("float", "int", "categorical") or not wanted <= ours.keys():
        return ""
    keys = ["type", *(key for key in ours if key != "type")]
    return f"{{{', '.join(f'{key}: {show(ours[key])}' for key in keys)}}}"


def _kind_of(entry: Mapping[str, Any]) -> str:
    if "choices" in entry:
        return "categorical"
    ends = [entry.get("low"), entry.get("high")]
    return "int" if all(isinstance(end, int) and not isinstance(end, bool) for end in ends) else "float"
