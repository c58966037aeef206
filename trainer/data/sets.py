"""Data sets by name: several of one kind, of which the first one counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_NAME = re.compile(r"\w+")


def data_sets(data: Any, prefix: str) -> dict[str, Any]:
    """Data to evaluate, by what the names of its numbers begin with.

    Args:
        data: One data set, or several in a mapping by name.
        prefix: ``"val"`` or ``"test"``: what the names begin with for one data set, and for the first of several,
            which is the one that counts. Those of another one begin with this, ``_`` and its name.

    Raises:
        ValueError: There is no data set in the mapping, or a name is no word.
    """
    if not isinstance(data, Mapping):
        return {prefix: data}
    if not data:
        raise ValueError(f"the mapping of {prefix} data is empty: give a data set, or several by name")
    for name in data:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"a {prefix} set is called {name!r}: give a name of letters, digits and underscores")
    first, *others = data
    return {prefix: data[first], **{f"{prefix}_{name}": data[name] for name in others}}


def check_distinct(prefixes: Iterable[str], metrics: Iterable[str]) -> None:
    """Refuse sets of which a number of one could be taken for a number of another.

    Args:
        prefixes: What the names of each set's numbers begin with, the first one's first.
        metrics: Names of numbers of the first one: of the metrics, or of all that was recorded of it.

    Raises:
        ValueError: The name of a set and an underscore begin that of a number or of another set.
    """
    first, *others = prefixes
    taken = [f"{first}_{metric}" for metric in metrics] + others
    for prefix in others:
        for name in taken:
            if name != prefix and name.startswith(f"{prefix}_"):
                short = prefix.removeprefix(f"{first}_")
                raise ValueError(f"a set is called {short!r}, and {name} could be a number of it: rename it")


def each_set(function: Callable[[Any], Any], data: Any) -> Any:
    """The data set, or each of several, replaced by what the function makes of it."""
    return {name: function(one) for name, one in data.items()} if isinstance(data, Mapping) else function(data)


def first_set(data: Any) -> Any:
    """The data set that counts: the first of several, or the only one."""
    return next(iter(data.values())) if isinstance(data, Mapping) else data
