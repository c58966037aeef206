"""Imports the names of a package on first use, so that code that needs none of them starts quickly."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` (PEP 562) and ``__dir__``.

    Args:
        package: Its ``__name__``.
        homes: Module → the names that the package offers from it.
    """
    found = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in found:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(importlib.import_module(found[name]), name)

    return get, lambda: sorted({*vars(importlib.import_module(package)), *found})
