"""Handles several validation or test sets by name, the first of which is the main one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_NAME = re.compile(r"\w+")


def data_sets(data: Any, prefix: str) -> dict[str, Any]:
    """The data sets to evaluate, by the prefix of the names of their metrics.

    Args:
        data: One data set, or a mapping of several by name.
        prefix: ``"val"`` or ``"test"``: the prefix of a single data set, and of the first of several, which is the
            main one. The prefix of each other set is this, ``_`` and its name.

    Raises:
        ValueError: The mapping is empty, or a name has characters other than letters, digits and underscores.
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
    """Refuse set names by which a metric of one set could be taken for a metric of another.

    Args:
        prefixes: The prefix of each set's metrics, that of the first set first.
        metrics: Names of the first set's metrics, without prefix: the given ones, or all that were recorded.

    Raises:
        ValueError: A metric or another set has a name that begins with a set's prefix and an underscore.
    """
    first, *others = prefixes
    taken = [f"{first}_{metric}" for metric in metrics] + others
    for prefix in others:
        for name in taken:
            if name != prefix and name.startswith(f"{prefix}_"):
                short = prefix.removeprefix(f"{first}_")
                raise ValueError(f"a set is called {short!r}, and {name} could be a number of it: rename it")


def each_set(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply a function to the data set, or to each of several."""
    return {name: function(one) for name, one in data.items()} if isinstance(data, Mapping) else function(data)


def first_set(data: Any) -> Any:
    """The main data set: the first of several, or the only one."""
    return next(iter(data.values())) if isinstance(data, Mapping) else data
